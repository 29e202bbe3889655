"""The paged index-K cache → contiguous keys, all requests one after another."""

from __future__ import annotations

import torch

from .backend import on_device_of, tl, triton, use_triton
from .cache_layout import SCALE_BYTES, check_cache, split_pages
from .checks import (
    INDEX_DTYPES,
    check_int,
    check_out,
    check_range,
    check_tensor,
    content_checks,
)
from .registry import register_op

TILE = 2048  # elements a program: 16 keys of D=128, one 16-byte load a thread
MAX_LENGTH = 2**40  # more keys than any memory holds; sums of longer lengths could wrap around

#: Rows without a key, as bit patterns of the payload: zero bytes beside a NaN scale, else NaN.
_FILL = {torch.uint8: 0, torch.bfloat16: 0x7FC0, torch.float16: 0x7E00, torch.float32: 0x7FC00000}
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def read_index_k(
    cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    page_size: int = 64,
    head_dim: int | None = None,
    total: int | None = None,
    out: tuple[torch.Tensor, torch.Tensor | None] | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """values[Σ_{r<b} len_r + s] = cache[block_table[b, s // S], s % S] for s < len_b; so scales.

    Args:
        cache: uint8 [P, S, 1, D+4], [P, S, D+4] or [P, bytes ≥ S·(D+4)], pages contiguous and
            any stride apart (see cache_layout); or bf16, fp16 or fp32 [P, S, D], any strides.
        block_table: [B, pages] int32, any strides.
        context_lens: [B] int32 or int64, any stride; a negative length counts as 0.
        page_size: S, tokens a page.
        head_dim: D. Taken from out or the cache's last dimension if not given; a flat
            [P, bytes] cache needs it or out.
        total: rows to gather, at least Σ len. Without it and out, the sum is read back from the
            device (which synchronises, and cannot be captured or traced).
        out: (values, scales) to write to, values [total, D] e4m3 and scales [total] fp32 for a
            uint8 cache, or (values, None) in a float cache's dtype. Any strides.

    Returns:
        `out`, as above. A row without a key (past Σ len, past the table, or in a page outside the
        cache) holds zeros and the scale NaN, NaN itself for float caches: never selected.

    Raises:
        TypeError, ValueError: an argument of wrong type, dtype, shape or device. Fewer rows than
            Σ len raise on a CPU and with LIGHTNING_INDEXER_CHECK=1; so do then lengths outside
            the table and pages outside the cache. Nothing is written before.

    Guarantees:
        With total or out it does not synchronise; on a GPU keys beyond the last row are dropped.
        Bits are copied unchanged. Never reads outside the cache or the table.

    Source:
        vLLM's `cp_gather_indexer_k_quant_cache` and SGLang's `GetKAndS` (DeepGEMM's page layout).
    """
    cache = check_tensor("cache", cache)
    device, quantised = cache.device, cache.dtype == torch.uint8
    check_int("page_size", page_size, minimum=1)
    if out is not None and not (isinstance(out, tuple) and len(out) == 2):
        raise TypeError(f"out must be a tuple (values, scales), got {type(out).__name__}")
    if head_dim is None:
        head_dim = _infer_head_dim(cache, out)
    check_int("head_dim", head_dim, minimum=1)
    check_cache(cache, page_size, head_dim)
    check_tensor("block_table", block_table, dtype=torch.int32, shape=(None, None), device=device)
    requests = block_table.shape[0]
    check_tensor("context_lens", context_lens, dtype=INDEX_DTYPES, shape=(requests,), device=device)
    if total is not None:
        check_int("total", total, minimum=0)
    elif out is not None:
        total = check_tensor("out[0]", out[0], shape=(None, head_dim)).shape[0]
    else:
        total = int(context_lens.clamp(min=0).sum())
    dtype = torch.float8_e4m3fn if quantised else cache.dtype
    if out is None:
        scales = torch.empty(total, dtype=torch.float32, device=device) if quantised else None
        out = torch.empty((total, head_dim), dtype=dtype, device=device), scales
    else:
        check_out(out[0], dtype=dtype, shape=(total, head_dim), device=device)
        if quantised:
            check_out(out[1], dtype=torch.float32, shape=(total,), device=device)
        elif out[1] is not None:
            raise TypeError(f"out[1] must be None for a {cache.dtype} cache, got a tensor")
    values, scales = out
    payload = values.view(torch.uint8) if quantised else values
    parts = [payload] if scales is None else [payload, scales]
    _op(cache, block_table, context_lens, page_size, out=parts)
    return out


def _infer_head_dim(cache: torch.Tensor, out: tuple | None) -> int:
    if out is not None:
        return check_tensor("out[0]", out[0], shape=(None, None)).shape[1]
    if cache.dim() < 3:
        raise ValueError(
            f"head_dim must be given for a cache of shape {list(cache.shape)}, got None"
        )
    return cache.shape[-1] - (SCALE_BYTES if cache.dtype == torch.uint8 else 0)


def _read_index_k(
    cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    page_size: int,
    *,
    out: list[torch.Tensor],
) -> None:
    total, head_dim = out[0].shape
    most = min(MAX_LENGTH, torch.iinfo(context_lens.dtype).max)
    ends = context_lens.clamp(0, most).cumsum(0, dtype=torch.int64)  # [B]
    checked = content_checks(cache)
    if (checked or cache.device.type == "cpu") and len(ends) and total < int(ends[-1]):
        raise ValueError(f"total (the rows of out) must be at least {int(ends[-1])}, got {total}")
    if checked:
        _check_contents(block_table, context_lens, page_size, cache.shape[0])
    if total == 0:
        return
    values, scales = split_pages(cache, page_size, head_dim)
    if not use_triton(cache):
        _read_on_cpu(values, scales, block_table, ends, out)
        return
    bits = _BITS[values.element_size()]  # copied as integers, so that NaN payloads stay
    values, payload = values.view(bits), out[0].view(bits)
    block_d = triton.next_power_of_2(head_dim)
    block_n = max(TILE // block_d, 1)
    requests, blocks = block_table.shape
    with on_device_of(cache):
        _read_index_k_kernel[(triton.cdiv(total, block_n),)](
            *(values, *values.stride()),
            *((scales, *scales.stride()) if scales is not None else (None, 0, 0)),
            *(block_table, *block_table.stride()),
            ends,
            *(payload, *payload.stride()),
            *((out[1], *out[1].stride()) if scales is not None else (None, 0)),
            *(total, requests, blocks, values.shape[0]),
            D=head_dim,
            PAGE_SIZE=page_size,
            FILL=_FILL[cache.dtype],
            STEPS=requests.bit_length(),
            BLOCK_N=block_n,
            BLOCK_D=block_d,
        )


def _read_on_cpu(
    values: torch.Tensor,
    scales: torch.Tensor | None,
    block_table: torch.Tensor,
    ends: torch.Tensor,
    out: list[torch.Tensor],
) -> None:
    page_size = values.shape[1]
    rows = torch.arange(out[0].shape[0])
    request = torch.searchsorted(ends, rows, right=True)
    starts = torch.cat([ends.new_zeros(1), ends])
    position = rows - starts[request]
    found = (request < len(ends)) & (position < block_table.shape[1] * page_size)
    page = torch.full_like(rows, -1)
    page[found] = block_table[request[found], position[found] // page_size].long()
    found &= (page >= 0) & (page < values.shape[0])
    page, token = page[found], position[found] % page_size
    out[0].fill_(0 if scales is not None else float("nan"))
    out[0][found] = values[page, token]
    if scales is not None:
        out[1].fill_(float("nan"))
        out[1][found] = scales[page, token]


def _check_contents(
    block_table: torch.Tensor, context_lens: torch.Tensor, page_size: int, pages: int
) -> None:
    blocks = block_table.shape[1]
    check_range("context_lens", context_lens, 0, blocks * page_size + 1)
    starts = torch.arange(blocks, device=block_table.device) * page_size
    check_range("block_table", block_table[starts < context_lens[:, None]], 0, pages)


_op = register_op(
    "read_index_k(Tensor cache, Tensor block_table, Tensor context_lens, int page_size,"
    " *, Tensor(a!)[] out) -> ()",
    _read_index_k,
    mutates="out",
)


@triton.jit
def _read_index_k_kernel(
    values_ptr,
    stride_vp,
    stride_vt,
    stride_vd,
    scales_ptr,
    stride_sp,
    stride_st,
    table_ptr,
    stride_tb,
    stride_tp,
    ends_ptr,
    out_ptr,
    stride_on,
    stride_od,
    out_scales_ptr,
    stride_os,
    total,
    B,
    blocks,
    P,
    D: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    FILL: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = rows < total
    request, start = _request_of(rows, ends_ptr, B, STEPS)  # [BLOCK_N]
    position = rows - start
    block = position // PAGE_SIZE
    found = mask_n & (request < B) & (block < blocks)
    page = table_ptr + request.to(tl.int64) * stride_tb + block * stride_tp
    page = tl.load(page, mask=found, other=-1).to(tl.int64)
    found &= (page >= 0) & (page < P)
    token = position % PAGE_SIZE
    offs_d = tl.arange(0, BLOCK_D).to(tl.int64)
    mask_d = offs_d < D
    value = values_ptr + (page * stride_vp + token * stride_vt)[:, None]
    value += offs_d[None, :] * stride_vd
    value = tl.load(value, mask=found[:, None] & mask_d[None, :], other=FILL)  # [BLOCK_N, BLOCK_D]
    out = out_ptr + rows[:, None] * stride_on + offs_d[None, :] * stride_od
    tl.store(out, value, mask=mask_n[:, None] & mask_d[None, :])
    if scales_ptr is not None:
        scale = scales_ptr + page * stride_sp + token * stride_st
        scale = tl.load(scale, mask=found, other=float("nan"))
        tl.store(out_scales_ptr + rows * stride_os, scale, mask=mask_n)


@triton.jit
def _request_of(rows, ends_ptr, B, STEPS: tl.constexpr):
    """The first request that ends past each row, B if none does, and where that request starts."""
    low = tl.zeros_like(rows).to(tl.int32)
    high = low + B
    for _ in tl.static_range(STEPS):
        middle = (low + high) // 2
        open_ = low < high
        end = tl.load(ends_ptr + middle, mask=open_, other=0)
        low = tl.where(open_ & (end <= rows), middle + 1, low)
        high = tl.where(open_ & (end > rows), middle, high)
    start = tl.load(ends_ptr + low - 1, mask=low > 0, other=0)
    return low, start
