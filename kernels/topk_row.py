"""Where a row is, and its flags: what one launch and three do alike."""

from __future__ import annotations

from .backend import tl, triton
from .topk_bracket import COUNT_FIRST, ONE_WORD
from .topk_words import write_two_words, write_words


@triton.jit
def locate_row(
    x_ptr, stride_xt, stride_xl, starts_ptr, stride_starts, ends_ptr, stride_ends, L, row
):
    """(pointer, skip, n): the window is at [skip, n) from the pointer, a multiple of 4 columns."""
    start = tl.full((), 0, tl.int32)
    end = start + L
    if starts_ptr is not None:
        start = tl.maximum(tl.load(starts_ptr + row * stride_starts), 0)
        start = tl.minimum(start, L).to(tl.int32)
    if ends_ptr is not None:
        end = tl.minimum(tl.load(ends_ptr + row * stride_ends), L)
        end = tl.maximum(end, 0).to(tl.int32)
    base = tl.multiple_of(start // 4 * 4, 4)  # keeps loads wide
    return x_ptr + row * stride_xt + base.to(tl.int64) * stride_xl, start - base, end - base


@triton.jit
def flag_row(
    x_ptr,
    stride_x,
    words_ptr,
    words,
    skip,
    first,
    stop,
    n,
    lo,
    hi,
    form,
    THREADS: tl.constexpr,
    UNIT_STRIDE: tl.constexpr,
):
    """Flags the tiles that start in [first, stop) as `form` says; (inside, above) the bracket."""
    inside = tl.full((), 0, tl.int32)
    above = tl.full((), 0, tl.int32)
    first += above
    if form == ONE_WORD:
        inside += write_words(
            x_ptr, stride_x, words_ptr, skip, first, stop, n, lo, THREADS, UNIT_STRIDE
        )
    elif form != COUNT_FIRST:
        inside, above = write_two_words(
            *(x_ptr, stride_x, words_ptr, words_ptr + words),
            *(skip, first, stop, n, lo, hi, THREADS, UNIT_STRIDE),
        )
    return inside, above
