"""Row compaction of shared top-k buffers, in place and in one launch for all of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .aliasing import distinct_buffers, spans_meet
from .backend import on_device_of, tl, triton, use_triton
from .checks import INDEX_DTYPES, check_int, check_range, check_tensor, content_checks
from .registry import register_op

#: Elements a program holds in registers between its loads and its stores (32 a thread).
TILE = 8192
NUM_WARPS = 8
#: More rows than this leave slices under 16 bytes wide: gather to scratch instead.
MAX_ROWS_IN_PLACE = 2048
#: Each buffer adds 32 bytes of kernel arguments (limit 4 KB) and a branch; more take more launches.
BUFFERS_PER_LAUNCH = 32


def compact_topk_indices(
    buffers: torch.Tensor | Sequence[torch.Tensor],
    rows: torch.Tensor,
    *,
    num_rows: int | None = None,
) -> None:
    """buffer[i] ← old buffer[rows[i]] for i < n, in place, over the full width.

    Args:
        buffers: [M, W] int32 of any strides, or a list or tuple of them that share M, dtype and
            device (W may differ). The same memory listed twice is compacted once.
        rows: [n] int32 or int64, n ≤ M, any order, duplicates allowed. An id outside
            [0, num_rows or M) yields a row of −1.
        num_rows: how many leading rows hold a selection (default M).

    Returns:
        None. Rows n and above keep their contents.

    Raises:
        TypeError, ValueError: a wrong type, dtype, shape or device, n > M, num_rows > M, or
            buffers that overlap in part. With LIGHTNING_INDEXER_CHECK=1 also a row id out of
            range. Nothing has been written then.

    Guarantees:
        Safe in place for every order of rows. No synchronisation, no stray read, one launch for
        up to 32 buffers.

    Source:
        `compact_topk_indices` of vLLM's MTP models (index_share_for_mtp_iteration).
    """
    listed = [buffers] if isinstance(buffers, torch.Tensor) else buffers
    if not isinstance(listed, (list, tuple)):
        raise TypeError(f"buffers must be a tensor or a list of them, got {type(buffers).__name__}")
    check_tensor("rows", rows, dtype=INDEX_DTYPES, shape=(None,))
    unique: list[torch.Tensor] = []
    for i, buffer in enumerate(listed):
        check_tensor(f"buffers[{i}]", buffer, dtype=torch.int32, shape=(None, None))
        check_tensor(
            f"buffers[{i}]", buffer, shape=(listed[0].shape[0], None), device=listed[0].device
        )
        if not any(buffer is other for other in unique):
            unique.append(buffer)
    if not unique:
        return
    height = unique[0].shape[0]
    check_tensor("rows", rows, device=unique[0].device)
    if rows.shape[0] > height:
        raise ValueError(f"rows must hold at most M = {height} ids, got {rows.shape[0]}")
    limit = height if num_rows is None else check_int("num_rows", num_rows, minimum=0)
    if limit > height:
        raise ValueError(f"num_rows must be at most M = {height}, got {limit}")
    COMPACT_OP(unique, rows, limit)


def _compact(buffers: list[torch.Tensor], rows: torch.Tensor, num_rows: int) -> None:
    buffers = distinct_buffers(buffers)
    if rows.numel() == 0 or not buffers:
        return
    if content_checks(rows):
        check_range("rows", rows, 0, num_rows)
    if any(spans_meet(rows, buffer) for buffer in buffers):
        rows = rows.clone()  # a program may write where another still reads its ids
    if use_triton(rows) and rows.shape[0] <= MAX_ROWS_IN_PLACE:
        for i in range(0, len(buffers), BUFFERS_PER_LAUNCH):
            _launch(buffers[i : i + BUFFERS_PER_LAUNCH], rows, num_rows)
    else:
        for buffer in buffers:
            _gather_then_write(buffer, rows, num_rows)


def _gather_then_write(buffer: torch.Tensor, rows: torch.Tensor, num_rows: int) -> None:
    known = (rows >= 0) & (rows < num_rows)
    gathered = buffer.index_select(0, rows.where(known, 0))
    buffer[: rows.shape[0]] = gathered.masked_fill_(~known[:, None], -1)


def slice_shape(n: int) -> tuple[int, int]:
    """Rows and columns of a program's tile: 128-byte slices or wider where they fit."""
    block_n = triton.next_power_of_2(n)
    return block_n, min(max(2048 // block_n, 32), TILE // block_n, 256)


def _launch(buffers: list[torch.Tensor], rows: torch.Tensor, num_rows: int) -> None:
    block_n, block_w = slice_shape(rows.shape[0])
    widest = max(buffer.shape[1] for buffer in buffers)
    with on_device_of(rows):
        _compact_kernel[(triton.cdiv(widest, block_w), len(buffers))](
            tuple(buffers),
            tuple(buffer.stride(0) for buffer in buffers),
            tuple(buffer.stride(1) for buffer in buffers),
            tuple(buffer.shape[1] for buffer in buffers),
            rows,
            rows.stride(0),
            rows.shape[0],
            num_rows,
            BLOCK_N=block_n,
            BLOCK_W=block_w,
            num_warps=NUM_WARPS,
        )


@triton.jit
def _compact_kernel(
    buffer_ptrs,
    strides_bm,
    strides_bw,
    widths,
    rows_ptr,
    stride_rn,
    n,
    num_rows,
    BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    for b in tl.static_range(len(buffer_ptrs)):
        if tl.program_id(1) == b:
            _compact_slice(
                buffer_ptrs[b],
                strides_bm[b],
                strides_bw[b],
                widths[b],
                rows_ptr,
                stride_rn,
                n,
                num_rows,
                BLOCK_N,
                BLOCK_W,
            )


@triton.jit
def _compact_slice(
    buffer_ptr,
    stride_bm,
    stride_bw,
    width,
    rows_ptr,
    stride_rn,
    n,
    num_rows,
    BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    offs_n = tl.arange(0, BLOCK_N)
    offs_w = tl.program_id(0) * BLOCK_W + tl.arange(0, BLOCK_W)
    mask_n = offs_n < n
    source = tl.load(rows_ptr + offs_n.to(tl.int64) * stride_rn, mask=mask_n, other=-1)
    known = (source >= 0) & (source < num_rows)
    mask_w = offs_w[None, :] < width
    columns = buffer_ptr + offs_w.to(tl.int64)[None, :] * stride_bw  # [1, BLOCK_W]
    held = tl.load(
        columns + source.to(tl.int64)[:, None] * stride_bm, mask=known[:, None] & mask_w, other=-1
    )  # [BLOCK_N, BLOCK_W]
    # No other program touches these columns: once all of them are read, any row may be written.
    tl.debug_barrier()
    tl.store(
        columns + offs_n.to(tl.int64)[:, None] * stride_bm, held, mask=mask_n[:, None] & mask_w
    )


COMPACT_OP = register_op(
    "compact_topk_indices(Tensor(a!)[] buffers, Tensor rows, int num_rows) -> ()",
    _compact,
    mutates="buffers",
    checks_aliasing=False,  # equal buffers, and rows within one, are fine
)
