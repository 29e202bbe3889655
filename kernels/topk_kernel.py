"""The Triton kernel of `topk_indices`: one program a row, exact, a bounded number of reads.

A long row is narrowed first: a sample gives a threshold that rather more than k scores reach,
and one pass lists their positions. If the list can hold the answer, selection goes on in the
list, otherwise (plateaus, a sample that lies) in the row. Selection is the same code in both:
at most three histogram passes find the k-th key exactly, one pass writes the positions.
"""

from __future__ import annotations

import torch

from .backend import Target, on_device_of, target_of, tl, triton
from .topk_radix import ALL, MIN_KEY, find_threshold, write_positions

#: Scores a program handles at a time; with 8 a thread no target spills (16 and 32 sometimes do).
MAX_BLOCK = 4096
#: The same with a list: 512 threads may have 128 registers each, which Triton 3.6 exceeds.
MAX_LISTING_BLOCK = 2048
MIN_BLOCK = 1024
THREAD_SCORES = 8
#: The list has room for three times k, and at least this many positions.
MIN_LIST = 4096
#: Sampled scores a row: at least this many (at most MIN_LIST / 2), and no further apart than that.
MIN_SAMPLES = 2048
MAX_STEP = 64


def list_capacity(k: int, length: int) -> int:
    """Positions a row's list has room for; 0 where rows are too short for a list to pay."""
    capacity = max(MIN_LIST, triton.next_power_of_2(3 * k))
    return capacity if length > 2 * capacity else 0


def block_size(length: int, capacity: int) -> int:
    """Scores a program handles at a time: short rows need no more than they have."""
    most = MAX_LISTING_BLOCK if capacity else MAX_BLOCK
    return min(most, max(MIN_BLOCK, triton.next_power_of_2(length)))


def num_warps(block: int, target: Target) -> int:
    """Warps of a program that handles `block` scores at a time."""
    lanes = 64 if target.backend == "hip" else 32
    return max(block // (THREAD_SCORES * lanes), 1)


def launch_topk(
    logits: torch.Tensor,
    k: int,
    row_starts: torch.Tensor | None,
    row_ends: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Writes the selection of every row of `logits` [T, L] to `out` [T, k]."""
    rows, length = logits.shape
    capacity = list_capacity(k, length)
    block = block_size(length, capacity)
    lists = logits.new_empty((rows, capacity), dtype=torch.int32) if capacity else None
    with on_device_of(out):
        _topk_kernel[(rows,)](
            *(logits, *logits.stride()),
            *(row_starts, 0 if row_starts is None else row_starts.stride(0)),
            *(row_ends, 0 if row_ends is None else row_ends.stride(0)),
            *(out, *out.stride()),
            lists,
            length,
            k,
            CAPACITY=capacity,
            MIN_SAMPLES=MIN_SAMPLES,
            MAX_STEP=MAX_STEP,
            BLOCK=block,
            num_warps=num_warps(block, target_of(logits.device)),
        )


@triton.jit
def _topk_kernel(
    x_ptr,
    stride_xt,
    stride_xl,
    starts_ptr,
    stride_starts,
    ends_ptr,
    stride_ends,
    out_ptr,
    stride_ot,
    stride_ok,
    lists_ptr,
    L,
    k,
    CAPACITY: tl.constexpr,
    MIN_SAMPLES: tl.constexpr,
    MAX_STEP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    start = tl.full((), 0, tl.int32)
    end = start + L
    if starts_ptr is not None:
        start = tl.maximum(tl.load(starts_ptr + row * stride_starts), 0)
        start = tl.minimum(start, L).to(tl.int32)
    if ends_ptr is not None:
        end = tl.minimum(tl.load(ends_ptr + row * stride_ends), L)
        end = tl.maximum(end, 0).to(tl.int32)

    # Offsets count from a multiple of 4, which keeps loads vectorised: skip the first 0 to 3.
    base = tl.multiple_of(start // 4 * 4, 4)
    skip = start - base
    n = end - base
    x_ptr += row * stride_xt + base.to(tl.int64) * stride_xl
    out_ptr += row * stride_ot

    written = tl.full((), -1, tl.int32)
    if CAPACITY > 0:  # noqa: SIM102 (known when compiled, the other is not)
        if n > 2 * CAPACITY:
            list_ptr = lists_ptr + row * CAPACITY
            step = tl.minimum(n // MIN_SAMPLES, MAX_STEP)
            samples = n // step
            aim = ((samples.to(tl.int64) * (CAPACITY // 2)) // n).to(tl.int32)
            aim = tl.maximum(aim, 1)
            lo, _ties = find_threshold(
                x_ptr,
                step.to(tl.int64) * stride_xl,
                None,
                tl.minimum(skip, 1),
                samples,
                aim,
                BLOCK,
            )
            listed = write_positions(
                x_ptr, stride_xl, None, skip, n, lo, ALL, list_ptr, 1, CAPACITY, False, BLOCK
            )
            tl.debug_barrier()  # the list is read by other threads than wrote it
            if (listed <= CAPACITY) & ((listed >= k) | (lo == MIN_KEY)):
                written = _select(
                    x_ptr + skip.to(tl.int64) * stride_xl,
                    stride_xl,
                    list_ptr,
                    0,
                    listed,
                    k,
                    out_ptr,
                    stride_ok,
                    BLOCK // 2,
                )
    if written < 0:
        written = _select(x_ptr, stride_xl, None, skip, n, k, out_ptr, stride_ok, BLOCK)

    while written < k:
        offs = written + tl.arange(0, BLOCK)
        tl.store(
            out_ptr + offs.to(tl.int64) * stride_ok, tl.full((BLOCK,), -1, tl.int32), mask=offs < k
        )
        written += BLOCK


@triton.jit
def _select(x_ptr, stride_x, list_ptr, skip, n, k, out_ptr, stride_o, BLOCK: tl.constexpr):
    """Writes the selection from offsets [skip, n), or from a list's first n entries; how many."""
    lo = tl.full((), MIN_KEY, tl.uint32)
    ties = tl.full((), ALL, tl.int32)
    if n - skip > k:
        lo, ties = find_threshold(x_ptr, stride_x, list_ptr, skip, n, k, BLOCK)
    return write_positions(
        x_ptr, stride_x, list_ptr, skip, n, lo, ties, out_ptr, stride_o, k, True, BLOCK
    )
