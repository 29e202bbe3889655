"""From the flags of a row to its answer: candidates are listed and compared in registers."""

from __future__ import annotations

from .backend import tl, triton
from .topk_bracket import COUNT_FIRST, NO_HI, count_bracket, holds_the_answer
from .topk_keys import MIN_KEY, find_key, load_scores, to_keys
from .topk_merge import merge_words
from .topk_words import order_words, pop_words, write_two_words

ALL = tl.constexpr(0x7FFFFFFF)


@triton.jit
def finish_row(
    x_ptr,
    stride_x,
    scratch_ptr,
    words,
    skip,
    n,
    k,
    lo,
    hi,
    form,
    inside,
    above,
    out_ptr,
    stride_o,
    CAPACITY: tl.constexpr,
    SAMPLES: tl.constexpr,
    THREADS: tl.constexpr,
    POP_WORDS: tl.constexpr,
    HISTOGRAM: tl.constexpr,
    UNIT_STRIDE: tl.constexpr,
):
    """Writes the selection of [skip, n), a flagged row if it is longer than CAPACITY.

    Where one list holds the answer (what is inside the bracket, with nothing above it, or what is
    above it), the answer is chosen from that list. Otherwise what is above is selected, and what
    is inside joins it: the chosen of a list, the first of equal scores, or all.
    """
    want = tl.full((), 0, tl.int32) + k
    direct = n >= 0
    first = skip
    listed = n
    if SAMPLES > 0:
        list_ptr = scratch_ptr
        words_ptr = scratch_ptr + CAPACITY + 1
        above_ptr = words_ptr + words
        if n > CAPACITY:
            if (form == COUNT_FIRST) | (holds_the_answer(lo, hi, inside, above, k, CAPACITY) == 0):
                lo, hi, inside, above = _flag_for_certain(
                    *(x_ptr, stride_x, words_ptr, words, skip, n, k, lo, hi, form),
                    *(CAPACITY, THREADS, HISTOGRAM, UNIT_STRIDE),
                )
            from_above = (above >= k) & (above <= CAPACITY)
            direct = from_above | ((above == 0) & (inside <= CAPACITY))
            listing = direct | ((inside + above > k) & (hi - lo > 1) & (above < k))
            first = skip * 0
            listed = tl.where(from_above, above, tl.where(listing, inside, 0))
            want = tl.where(from_above, want, k - above)
            order_words(words_ptr, n, THREADS)
            if hi < NO_HI:
                order_words(above_ptr, n, THREADS)
            source_ptr = words_ptr + tl.where(from_above, words, 0)
            if listed > 0:
                pop_words(source_ptr, n, 0, list_ptr, 1, CAPACITY, POP_WORDS)
                tl.debug_barrier()
    places = tl.arange(0, CAPACITY)
    mask = (places >= first) & (places < listed)
    offs = places
    if SAMPLES > 0:  # noqa: SIM102 (known when compiled, the other is not)
        if n > CAPACITY:
            offs = tl.load(list_ptr + places, mask=mask, other=0)
    keys = tl.where(mask, to_keys(load_scores(x_ptr, stride_x, offs, mask, UNIT_STRIDE)), 0)
    rank = _choose(keys, want, lo)
    written = tl.max(rank, 0)
    if direct:
        out_ptrs = out_ptr + (rank - 1).to(tl.int64) * stride_o
        tl.store(out_ptrs, offs - skip, mask=rank > 0)
    if SAMPLES > 0:  # noqa: SIM102
        if direct == 0:
            quota = tl.where(inside + above <= k, ALL, tl.where(hi - lo == 1, want, 0))
            _write_joined(
                *(words_ptr, above_ptr, list_ptr, rank, skip, n, k, listed, quota),
                *(out_ptr, stride_o, CAPACITY, POP_WORDS),
            )
            written = tl.minimum(inside + above, k)
    _write_nothing(out_ptr, stride_o, written, k, CAPACITY)


@triton.jit
def _flag_for_certain(
    x_ptr,
    stride_x,
    words_ptr,
    words,
    skip,
    n,
    k,
    lo,
    hi,
    form,
    CAPACITY: tl.constexpr,
    THREADS: tl.constexpr,
    HISTOGRAM: tl.constexpr,
    UNIT_STRIDE: tl.constexpr,
):
    """(lo, hi, inside, above): a bracket found by counting, and its flags."""
    if form != COUNT_FIRST:  # the guess was wrong
        lo = tl.full((), MIN_KEY, tl.uint32)
        hi = tl.full((), NO_HI, tl.uint32)
    bins_ptr = words_ptr + 2 * words
    lo, hi = count_bracket(
        *(x_ptr, stride_x, bins_ptr, skip, n, k, lo, hi),
        *(CAPACITY, 2 * THREADS, HISTOGRAM, UNIT_STRIDE),
    )
    inside, above = write_two_words(
        *(x_ptr, stride_x, words_ptr, words_ptr + words, skip, skip * 0, n, n, lo, hi),
        *(THREADS, UNIT_STRIDE),
    )
    tl.debug_barrier()
    return lo, hi, inside, above


@triton.jit
def _write_joined(
    words_ptr,
    above_ptr,
    list_ptr,
    rank,  # of the listed: 0 if not chosen
    skip,
    n,
    k,
    listed,
    quota,
    out_ptr,
    stride_o,
    CAPACITY: tl.constexpr,
    POP_WORDS: tl.constexpr,
):
    """Writes what is above, and of what is inside the chosen of the list or the first `quota`."""
    places = tl.arange(0, CAPACITY)
    tl.store(list_ptr + places, rank, mask=places < listed)
    tl.debug_barrier()
    merge_words(words_ptr, above_ptr, list_ptr, n, listed, quota, POP_WORDS)
    pop_words(above_ptr, n, skip, out_ptr, stride_o, k, POP_WORDS)


@triton.jit
def _choose(keys, want, lo):
    """1, 2, … for the `want` greatest keys ≥ lo, ties to the first, and 0 for the others.

    All keys ≥ lo are chosen where there are fewer.
    """
    threshold = find_key(keys, want, want, lo)
    rank = _number(keys >= threshold)
    if tl.max(rank, 0) > want:
        places = want - tl.sum((keys > threshold).to(tl.int32), 0)
        tied = _number(keys == threshold)
        rank = _number((keys > threshold) | ((tied > 0) & (tied <= places)))
    return rank


@triton.jit
def _number(flags):
    """1, 2, … where a flag is set, 0 elsewhere."""
    return tl.where(flags, tl.cumsum(flags.to(tl.int32), 0), 0)


@triton.jit
def _write_nothing(out_ptr, stride_o, written, k, BLOCK: tl.constexpr):
    """Stores −1 to the entries [written, k)."""
    while written < k:
        offs = written + tl.arange(0, BLOCK)
        nothing = tl.full((BLOCK,), -1, tl.int32)
        tl.store(out_ptr + offs.to(tl.int64) * stride_o, nothing, mask=offs < k)
        written += BLOCK
