"""`topk_indices` of a few long rows, in three launches: sample, flag, finish.

Several programs flag a row. A row's state holds lo, hi and what to do with them, then the counts
(inside, above) of each program that flagged a part of it.
"""

from __future__ import annotations

from .backend import tl, triton
from .topk_bracket import NO_HI, ONE_WORD, sample_bracket
from .topk_finish import finish_row
from .topk_keys import MIN_KEY
from .topk_row import flag_row, locate_row

STATE_FIELDS = 3


@triton.jit
def _sample_kernel(
    x_ptr,
    stride_xt,
    stride_xl,
    starts_ptr,
    stride_starts,
    ends_ptr,
    stride_ends,
    L,
    state_ptr,
    stride_state,
    k,
    CAPACITY: tl.constexpr,
    SAMPLES: tl.constexpr,
    THREADS: tl.constexpr,
    POP_WORDS: tl.constexpr,
    HISTOGRAM: tl.constexpr,
    UNIT_STRIDE: tl.constexpr,
):
    """First of three: the bracket of each row, to its state."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr, skip, n = locate_row(
        x_ptr, stride_xt, stride_xl, starts_ptr, stride_starts, ends_ptr, stride_ends, L, row
    )
    if n > CAPACITY:
        lo, hi, form = sample_bracket(
            row_ptr, stride_xl, skip, n, k, CAPACITY, SAMPLES, UNIT_STRIDE
        )
        state_ptr += row * stride_state
        tl.store(state_ptr, lo.to(tl.int32, bitcast=True))
        tl.store(state_ptr + 1, hi.to(tl.int32, bitcast=True))
        tl.store(state_ptr + 2, form)


@triton.jit
def _flag_kernel(
    x_ptr,
    stride_xt,
    stride_xl,
    starts_ptr,
    stride_starts,
    ends_ptr,
    stride_ends,
    L,
    scratch_ptr,
    stride_scratch,
    words,
    state_ptr,
    stride_state,
    CAPACITY: tl.constexpr,
    SAMPLES: tl.constexpr,
    THREADS: tl.constexpr,
    POP_WORDS: tl.constexpr,
    HISTOGRAM: tl.constexpr,
    UNIT_STRIDE: tl.constexpr,
):
    """Second of three: the flags of a stretch of each row, and their numbers to its state."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    row_ptr, skip, n = locate_row(
        x_ptr, stride_xt, stride_xl, starts_ptr, stride_starts, ends_ptr, stride_ends, L, row
    )
    if n > CAPACITY:
        tiles = tl.cdiv(tl.cdiv(n, 32 * THREADS), tl.num_programs(1))
        first = split * tiles * (32 * THREADS)
        stop = tl.minimum(first + tiles * (32 * THREADS), n)
        state_ptr += row * stride_state
        lo, hi, form = _bracket(state_ptr)
        words_ptr = scratch_ptr + row * stride_scratch + CAPACITY + 1
        inside, above = flag_row(
            *(row_ptr, stride_xl, words_ptr, words, skip, first, stop, n, lo, hi, form),
            *(THREADS, UNIT_STRIDE),
        )
        tl.store(state_ptr + 3 + 2 * split, inside)
        tl.store(state_ptr + 4 + 2 * split, above)


@triton.jit
def _finish_kernel(
    x_ptr,
    stride_xt,
    stride_xl,
    starts_ptr,
    stride_starts,
    ends_ptr,
    stride_ends,
    L,
    scratch_ptr,
    stride_scratch,
    words,
    out_ptr,
    stride_ot,
    stride_ok,
    k,
    state_ptr,
    stride_state,
    splits,
    CAPACITY: tl.constexpr,
    SAMPLES: tl.constexpr,
    THREADS: tl.constexpr,
    POP_WORDS: tl.constexpr,
    HISTOGRAM: tl.constexpr,
    UNIT_STRIDE: tl.constexpr,
):
    """Third of three: the selection of each row from its flags, or anew if they are not enough."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr, skip, n = locate_row(
        x_ptr, stride_xt, stride_xl, starts_ptr, stride_starts, ends_ptr, stride_ends, L, row
    )
    lo = tl.full((), MIN_KEY, tl.uint32)
    hi = tl.full((), NO_HI, tl.uint32)
    form = tl.full((), ONE_WORD, tl.int32)
    inside = tl.full((), 0, tl.int32)
    above = tl.full((), 0, tl.int32)
    if n > CAPACITY:
        state_ptr += row * stride_state
        lo, hi, form = _bracket(state_ptr)
        split = tl.full((), 0, tl.int32)
        while split < splits:
            inside += tl.load(state_ptr + 3 + 2 * split)
            above += tl.load(state_ptr + 4 + 2 * split)
            split += 1
    finish_row(
        *(row_ptr, stride_xl, scratch_ptr + row * stride_scratch, words, skip, n, k),
        *(lo, hi, form, inside, above, out_ptr + row * stride_ot, stride_ok),
        *(CAPACITY, SAMPLES, THREADS, POP_WORDS, HISTOGRAM, UNIT_STRIDE),
    )


@triton.jit
def _bracket(state_ptr):
    """(lo, hi, what to do) as `_sample_kernel` left them."""
    lo = tl.load(state_ptr).to(tl.uint32, bitcast=True)
    hi = tl.load(state_ptr + 1).to(tl.uint32, bitcast=True)
    return lo, hi, tl.load(state_ptr + 2)
