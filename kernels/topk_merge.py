"""Joining what is chosen inside a bracket with what is above it, as words of flags."""

from __future__ import annotations

from .backend import tl, triton
from .topk_words import popcount


@triton.jit
def merge_words(words_ptr, above_ptr, chosen_ptr, n, listed, quota, BLOCK: tl.constexpr):
    """Adds flags of words_ptr to those of above_ptr, offsets [0, n).

    Added are those whose rank r has chosen_ptr[r] > 0, or, with nothing listed, the first `quota`.
    """
    offs = tl.arange(0, BLOCK)
    words = tl.cdiv(n, 32)
    count = tl.full((), 0, tl.int32)
    first = tl.full((), 0, tl.int32)
    while first < words:
        mask = first + offs < words
        word = tl.load(words_ptr + first + offs, mask=mask, other=0).to(tl.uint32, bitcast=True)
        above = tl.load(above_ptr + first + offs, mask=mask, other=0).to(tl.uint32, bitcast=True)
        size = popcount(word)
        rank = count + tl.cumsum(size, 0) - size
        count += tl.sum(size, 0)
        if listed > 0:
            above |= _chosen_bits(word, size, rank, chosen_ptr, listed)
        else:
            above |= _lowest_bits(word, tl.minimum(tl.maximum(quota - rank, 0), size), size)
        tl.store(above_ptr + first + offs, above.to(tl.int32, bitcast=True), mask=mask)
        first += BLOCK
    tl.debug_barrier()


@triton.jit
def _chosen_bits(word, size, rank, chosen_ptr, listed):
    """The chosen bits of each word, whose lowest is entry `rank` of the list."""
    kept = word ^ word
    left = tl.max(size, 0)
    while left > 0:
        lowest = word & (0 - word)
        mask = (word != 0) & (rank < listed)
        kept |= tl.where(tl.load(chosen_ptr + rank, mask=mask, other=0) > 0, lowest, 0)
        word ^= lowest
        rank += 1
        left -= 1
    return kept


@triton.jit
def _lowest_bits(word, keep, size):
    """The `keep` lowest of the `size` bits set in each word; few words keep only some."""
    rest = word
    most = tl.max(tl.where(keep < size, keep, 0), 0)
    taken = tl.full((), 0, tl.int32)
    while taken < most:
        rest = tl.where(taken < keep, rest & (rest - 1), rest)
        taken += 1
    return tl.where(keep < size, word ^ rest, word)
