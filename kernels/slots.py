"""Positions in a request's context → physical slots of a paged cache."""

from __future__ import annotations

import torch

from .backend import on_device_of, tl, triton, use_triton
from .checks import (
    INDEX_DTYPES,
    check_int,
    check_out,
    check_range,
    check_tensor,
    content_checks,
)
from .registry import register_op

#: A program's positions, 32 a thread: they share what a row costs, and 2048-wide rows still give 2
#: programs.
BLOCK_W = 1024
NUM_WARPS = 1


def indices_to_slots(
    indices: torch.Tensor,
    block_table: torch.Tensor,
    row_to_request: torch.Tensor,
    page_size: int,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """slots[t,j] = block_table[r, indices[t,j] // S]·S + indices[t,j] % S, r = row_to_request[t].

    The table holds page ids, one for each S = page_size tokens. With a table already expanded to
    one slot a token, pass page_size=1.

    Args:
        indices: [T, W] int32, any strides; positions in the row's request, −1 for none.
        block_table: [B, pages] int32, any strides; a negative entry is a page never assigned.
        row_to_request: [T] int32 or int64, any stride; the row's line of block_table.
        page_size: S, tokens a page.
        out: [T, W] int32 or int64, any strides, sharing no memory with the inputs.

    Returns:
        `out`, int32 if it was not given. −1 where the position is negative or past the table, the
        page is negative, the request outside [0, B), or the slot too large for out's dtype.

    Raises:
        TypeError, ValueError: an argument of wrong type, dtype, shape or device. With
            LIGHTNING_INDEXER_CHECK=1 also a position, request or page that only garbage explains
            (below −1, or past the table); nothing is written then.

    Guarantees:
        Never reads outside the inputs, whatever they hold. Does not synchronise.

    Source:
        vLLM's `convert_req_index_to_global_index`, with −1 rather than slot 0 for bad positions.
    """
    check_tensor("indices", indices, dtype=torch.int32, shape=(None, None))
    device, (rows, width) = indices.device, indices.shape
    check_tensor("block_table", block_table, dtype=torch.int32, shape=(None, None), device=device)
    check_tensor("row_to_request", row_to_request, dtype=INDEX_DTYPES, shape=(rows,), device=device)
    check_int("page_size", page_size, minimum=1)
    if out is None:
        out = torch.empty((rows, width), dtype=torch.int32, device=device)
    else:
        check_out(out, dtype=INDEX_DTYPES, shape=(rows, width), device=device)
    _op(indices, block_table, row_to_request, page_size, out=out)
    return out


def _indices_to_slots(
    indices: torch.Tensor,
    block_table: torch.Tensor,
    row_to_request: torch.Tensor,
    page_size: int,
    *,
    out: torch.Tensor,
) -> None:
    if content_checks(out):
        _check_contents(indices, block_table, row_to_request, page_size)
    if out.numel() == 0:
        return
    if not use_triton(out):
        page, found = _pages(indices, block_table, row_to_request, page_size)
        slots = page.long() * page_size + indices % page_size
        found &= (page >= 0) & (slots <= torch.iinfo(out.dtype).max)
        out.copy_(torch.where(found, slots, -1))
        return
    (rows, width), (requests, blocks) = indices.shape, block_table.shape
    block_w = min(BLOCK_W, triton.next_power_of_2(width))
    with on_device_of(out):
        _indices_to_slots_kernel[(rows, triton.cdiv(width, block_w))](
            *(indices, *indices.stride()),
            *(block_table, *block_table.stride()),
            *(row_to_request, *row_to_request.stride()),
            *(out, *out.stride()),
            *(width, requests, min(blocks * page_size, 2**31)),
            PAGE_SIZE=page_size,
            BLOCK_W=block_w,
            WHOLE_BLOCKS=width % block_w == 0,
            num_warps=NUM_WARPS,
        )


def _pages(
    indices: torch.Tensor, block_table: torch.Tensor, row_to_request: torch.Tensor, page_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The table's entry for every position [T, W], and whether the table has one."""
    requests, blocks = block_table.shape
    block = indices.div(page_size, rounding_mode="floor")
    known = (row_to_request >= 0) & (row_to_request < requests)
    found = known[:, None] & (block >= 0) & (block < blocks)
    if block_table.numel() == 0:
        return torch.full_like(indices, -1), found
    request = torch.where(known, row_to_request, 0).long()[:, None]
    return block_table[request, torch.where(found, block, 0).long()], found


def _check_contents(
    indices: torch.Tensor, block_table: torch.Tensor, row_to_request: torch.Tensor, page_size: int
) -> None:
    requests, blocks = block_table.shape
    check_range("indices", indices, -1, blocks * page_size)
    check_range("row_to_request", row_to_request, -1, requests)
    page, found = _pages(indices, block_table, row_to_request, page_size)
    check_range("block_table", page[found], -1, 2**31)


_op = register_op(
    "indices_to_slots(Tensor indices, Tensor block_table, Tensor row_to_request, int page_size,"
    " *, Tensor(a!) out) -> ()",
    _indices_to_slots,
    mutates="out",
)


@triton.jit
def _indices_to_slots_kernel(
    indices_ptr,
    stride_it,
    stride_iw,
    table_ptr,
    stride_tb,
    stride_tp,
    request_ptr,
    stride_r,
    out_ptr,
    stride_ot,
    stride_ow,
    W,
    B,
    positions,
    PAGE_SIZE: tl.constexpr,
    BLOCK_W: tl.constexpr,
    WHOLE_BLOCKS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot_type: tl.constexpr = out_ptr.dtype.element_ty
    # Loads no wider than 16 bytes of slots: else data would move between threads.
    ELEMENTS: tl.constexpr = 128 // slot_type.primitive_bitwidth
    offs_w = tl.program_id(1).to(tl.int64) * BLOCK_W
    offs_w += tl.max_contiguous(tl.arange(0, BLOCK_W), ELEMENTS)
    mask_w = (offs_w < W) | WHOLE_BLOCKS  # a mask known to be true costs nothing
    request = tl.load(request_ptr + row * stride_r).to(tl.int64)
    position = tl.load(
        indices_ptr + row * stride_it + offs_w * stride_iw, mask=mask_w, other=-1
    )  # [BLOCK_W]
    bits = position.to(tl.uint32, bitcast=True)  # of a negative position: 2³¹ or more
    known = tl.where((request >= 0) & (request < B), positions, 0)  # a bad request has no table
    block = (bits // PAGE_SIZE).to(tl.int64)
    entry = table_ptr + request * stride_tb + block * stride_tp
    page = tl.load(entry, mask=bits < known, other=-1)
    slot = _slot(page, bits % PAGE_SIZE, PAGE_SIZE, slot_type)
    tl.store(out_ptr + row * stride_ot + offs_w * stride_ow, slot, mask=mask_w)


@triton.jit
def _slot(page, offset, PAGE_SIZE: tl.constexpr, dtype: tl.constexpr):
    """page·S + offset; −1 where the page is negative or the slot too large for dtype.

    A slot that wrapped around could look valid and address another request's token.
    """
    END: tl.constexpr = 2147483648
    page_bits = page.to(tl.uint32, bitcast=True)  # of a negative page: END or more
    if dtype == tl.int64:
        fits = page_bits < END
    else:
        fits = page_bits < END // PAGE_SIZE
        if END % PAGE_SIZE != 0:
            fits |= (page_bits == END // PAGE_SIZE) & (offset < END % PAGE_SIZE)
    return tl.where(fits, page.to(dtype) * PAGE_SIZE + offset.to(dtype), -1)
