"""Words of 32 flags, one flag a score: written by one read of a row, then read instead of it.

A tile is 32·THREADS scores. `write_words` gives each thread 8 groups of 4 neighbouring scores, so
that loads are wide: bit 4g + i of word c stands for score 4·THREADS·g + 4c + i of the tile.
`order_words` transposes nibbles until bit b of word w stands for score 32w + b of the row.
"""

from __future__ import annotations

from .backend import tl, triton
from .topk_keys import load_scores, to_score


@triton.jit
def write_words(
    x_ptr,
    stride_x,
    words_ptr,
    skip,  # offsets below it are before the window: their flags are 0
    first,
    stop,
    n,
    lo,
    THREADS: tl.constexpr,
    UNIT_STRIDE: tl.constexpr,
):
    """Flags key ≥ lo for the tiles that start in [first, stop); returns how many are set."""
    TILE: tl.constexpr = 32 * THREADS
    offs = _tile_offsets(THREADS)
    offs_word = tl.arange(0, THREADS)
    score = to_score(lo)
    count = tl.zeros((THREADS,), tl.int32)
    while first < stop:
        scores = _load_tile(x_ptr, stride_x, first, offs, n, TILE, UNIT_STRIDE)
        word = _pack(scores >= score, THREADS) & _in_window(first + offs_word, skip)
        tl.store(words_ptr + first // 32 + offs_word, word)
        count += popcount(word.to(tl.uint32, bitcast=True))
        first += TILE
    return tl.sum(count, 0)


@triton.jit
def write_two_words(
    x_ptr,
    stride_x,
    words_ptr,
    above_ptr,
    skip,
    first,
    stop,
    n,
    lo,
    hi,
    THREADS: tl.constexpr,
    UNIT_STRIDE: tl.constexpr,
):
    """Flags lo ≤ key < hi to words_ptr and key ≥ hi to above_ptr; returns (these, those)."""
    TILE: tl.constexpr = 32 * THREADS
    offs = _tile_offsets(THREADS)
    offs_word = tl.arange(0, THREADS)
    score, high_score = to_score(lo), to_score(hi)
    count = tl.zeros((THREADS,), tl.int32)
    count_above = tl.zeros((THREADS,), tl.int32)
    while first < stop:
        scores = _load_tile(x_ptr, stride_x, first, offs, n, TILE, UNIT_STRIDE)
        mask = _in_window(first + offs_word, skip)
        above = _pack(scores >= high_score, THREADS) & mask
        word = (_pack(scores >= score, THREADS) & mask) ^ above
        at = first // 32 + offs_word
        tl.store(words_ptr + at, word)
        tl.store(above_ptr + at, above)
        count += popcount(word.to(tl.uint32, bitcast=True))
        count_above += popcount(above.to(tl.uint32, bitcast=True))
        first += TILE
    return tl.sum(count, 0), tl.sum(count_above, 0)


@triton.jit
def order_words(words_ptr, n, THREADS: tl.constexpr):
    """Puts the words of offsets [0, n) in the order of the row, in place."""
    STEP: tl.constexpr = THREADS // 8
    groups = tl.cdiv(n, 32 * THREADS) * STEP  # of eight words: eight nibbles of eight words
    first = tl.full((), 0, tl.int32)
    while first < groups:
        group = first + tl.arange(0, THREADS)
        mask = group < groups
        ptrs = words_ptr + group * 8
        a0, a1 = _load_word(ptrs, mask), _load_word(ptrs + 1, mask)
        a2, a3 = _load_word(ptrs + 2, mask), _load_word(ptrs + 3, mask)
        a4, a5 = _load_word(ptrs + 4, mask), _load_word(ptrs + 5, mask)
        a6, a7 = _load_word(ptrs + 6, mask), _load_word(ptrs + 7, mask)
        a0, a4 = _exchange(a0, a4, 16, 0x0000FFFF)
        a1, a5 = _exchange(a1, a5, 16, 0x0000FFFF)
        a2, a6 = _exchange(a2, a6, 16, 0x0000FFFF)
        a3, a7 = _exchange(a3, a7, 16, 0x0000FFFF)
        a0, a2 = _exchange(a0, a2, 8, 0x00FF00FF)
        a1, a3 = _exchange(a1, a3, 8, 0x00FF00FF)
        a4, a6 = _exchange(a4, a6, 8, 0x00FF00FF)
        a5, a7 = _exchange(a5, a7, 8, 0x00FF00FF)
        a0, a1 = _exchange(a0, a1, 4, 0x0F0F0F0F)
        a2, a3 = _exchange(a2, a3, 4, 0x0F0F0F0F)
        a4, a5 = _exchange(a4, a5, 4, 0x0F0F0F0F)
        a6, a7 = _exchange(a6, a7, 4, 0x0F0F0F0F)
        tl.debug_barrier()  # a tile's words are all read before any is replaced
        ptrs = words_ptr + group // STEP * THREADS + group % STEP
        _store_word(ptrs, a0, mask)
        _store_word(ptrs + STEP, a1, mask)
        _store_word(ptrs + 2 * STEP, a2, mask)
        _store_word(ptrs + 3 * STEP, a3, mask)
        _store_word(ptrs + 4 * STEP, a4, mask)
        _store_word(ptrs + 5 * STEP, a5, mask)
        _store_word(ptrs + 6 * STEP, a6, mask)
        _store_word(ptrs + 7 * STEP, a7, mask)
        first += THREADS
    tl.debug_barrier()


@triton.jit
def pop_words(words_ptr, n, skip, dst_ptr, stride_dst, room, BLOCK: tl.constexpr):
    """Stores, ascending, offset − skip of each set flag of [0, n), the first `room` of them."""
    offs = tl.arange(0, BLOCK)
    words = tl.cdiv(n, 32)
    count = tl.full((), 0, tl.int32)
    first = tl.full((), 0, tl.int32)
    while first < words:
        at = first + offs
        word = _load_word(words_ptr + at, at < words)
        size = popcount(word)
        rank = count + tl.cumsum(size, 0) - size
        count += tl.sum(size, 0)
        left = tl.max(size, 0)
        while left > 0:  # each word gives its lowest bit
            lowest = word & (0 - word)
            position = at * 32 + _bit_number(lowest) - skip
            dst_ptrs = dst_ptr + rank.to(tl.int64) * stride_dst
            tl.store(dst_ptrs, position, mask=(word != 0) & (rank < room))
            word ^= lowest
            rank += 1
            left -= 1
        first += BLOCK


@triton.jit
def popcount(word):
    """Bits set in each uint32."""
    pairs = word - ((word >> 1) & 0x55555555)
    nibbles = (pairs & 0x33333333) + ((pairs >> 2) & 0x33333333)
    octets = (nibbles + (nibbles >> 4)) & 0x0F0F0F0F
    return ((octets * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _bit_number(power):
    """Of a power of two: its exponent, read from the number as a float."""
    return (power.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127


@triton.jit
def _tile_offsets(THREADS: tl.constexpr):
    """[8, THREADS, 4]: group, thread and element → offset in the tile."""
    group = tl.arange(0, 8)[:, None, None] * (4 * THREADS)
    return group + tl.arange(0, THREADS)[None, :, None] * 4 + tl.arange(0, 4)[None, None, :]


@triton.jit
def _load_tile(x_ptr, stride_x, first, offs, n, TILE: tl.constexpr, UNIT_STRIDE: tl.constexpr):
    x_ptr += first.to(tl.int64) * stride_x
    if first + TILE <= n:  # a mask would cost the loads their width
        scores = load_scores(x_ptr, stride_x, offs, None, UNIT_STRIDE)
    else:
        scores = load_scores(x_ptr, stride_x, offs, offs < n - first, UNIT_STRIDE)
    return scores


@triton.jit
def _pack(flags, THREADS: tl.constexpr):
    """Flags of a tile [8, THREADS, 4] → words [THREADS] int32."""
    bit = tl.arange(0, 8)[:, None, None] * 4 + tl.arange(0, 4)[None, None, :]
    return tl.sum(tl.sum(tl.where(flags, 1 << bit, 0), 2), 0)


@triton.jit
def _in_window(first_in_word, skip):
    """The flags of a tile's word that may be set; skip ≤ 3 concerns the row's first word alone."""
    ones = tl.full((), -1, tl.int32)
    return tl.where(first_in_word == 0, ones << skip, ones)


@triton.jit
def _load_word(ptrs, mask):
    return tl.load(ptrs, mask=mask, other=0).to(tl.uint32, bitcast=True)


@triton.jit
def _store_word(ptrs, word, mask):
    tl.store(ptrs, word.to(tl.int32, bitcast=True), mask=mask)


@triton.jit
def _exchange(a, b, SHIFT: tl.constexpr, MASK: tl.constexpr):
    """Swaps the bits of `a` under MASK << SHIFT with those of `b` under MASK."""
    changed = ((a >> SHIFT) ^ b) & MASK
    return a ^ (changed << SHIFT), b ^ changed
