"""Device code of `topk_indices`: the k-th key by histograms, positions by words of 32 flags.

Both walk offsets [skip, n) of a row, or the first n entries of a list of offsets.
"""

from __future__ import annotations

from .backend import tl, triton

# Keys are uint32 and order like scores. Selectable ones are at least MIN_KEY, all others 0.
MIN_KEY = tl.constexpr(0x00800000)
INF_KEY = tl.constexpr(0xFF800000)
ALL = tl.constexpr(0x7FFFFFFF)


@triton.jit
def find_threshold(x_ptr, stride_x, list_ptr, skip, n, k, BLOCK: tl.constexpr):
    """(lo, ties): the k best are all keys above lo and the first `ties` of those equal to it."""
    BINS: tl.constexpr = 2048
    offs = tl.arange(0, BLOCK)
    offs_bin = tl.arange(0, BINS)
    lo = tl.full((), MIN_KEY, tl.uint32)
    ties = tl.full((), 0, tl.int32) + k
    shift = tl.full((), 22, tl.int32)  # digits of 10, 11 and 11 bits
    while shift >= 0:
        counts = tl.zeros((BINS,), tl.int32)
        first = tl.full((), 0, tl.int32)
        while first < n:
            keys = _load_keys(x_ptr, stride_x, list_ptr, first, offs, skip, n, BLOCK)
            digit = (keys - lo) >> shift.to(tl.uint32)
            inside = (keys >= lo) & (digit < BINS)
            counts += tl.histogram((digit & (BINS - 1)).to(tl.int32), BINS, mask=inside)
            first += BLOCK
        reaching = tl.cumsum(counts, 0, reverse=True)
        digit = tl.maximum(tl.sum((reaching >= ties).to(tl.int32), 0) - 1, 0)
        at_least = tl.sum(tl.where(offs_bin == digit, reaching, 0), 0)
        above = tl.sum(tl.where(offs_bin == digit + 1, reaching, 0), 0)
        lo += digit.to(tl.uint32) << shift.to(tl.uint32)
        if at_least <= ties:  # the whole bin is selected: no need to look inside
            ties = tl.full((), ALL, tl.int32)
            shift = tl.full((), -1, tl.int32)
        else:
            ties -= above
            shift -= 11
    return lo, ties


@triton.jit
def write_positions(
    x_ptr,
    stride_x,
    list_ptr,
    skip,
    n,
    lo,
    ties,
    dst_ptr,
    stride_dst,
    room,
    CUT_TIES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Stores, ascending, where key > lo, and the first `ties` places where key == lo.

    Returns their number; where it exceeds `room`, not all of them are stored.
    """
    WORDS: tl.constexpr = BLOCK // 32
    offs_word = tl.arange(0, WORDS) * 32
    offs = offs_word[:, None] + tl.arange(0, 32)[None, :]  # [WORDS, 32]
    count = tl.full((), 0, tl.int32)
    first = tl.full((), 0, tl.int32)
    while first < n:
        keys = _load_keys(x_ptr, stride_x, list_ptr, first, offs, skip, n, BLOCK)
        if CUT_TIES:
            tied = _pack(keys == lo)
            size = _popcount(tied)
            keep = tl.minimum(tl.maximum(ties - (tl.cumsum(size, 0) - size), 0), size)
            ties -= tl.sum(keep, 0)
            word = _pack(keys > lo) | _lowest_bits(tied, keep, size)
        else:
            word = _pack(keys >= lo)
        size = _popcount(word)
        at = count + tl.cumsum(size, 0) - size
        count += tl.sum(size, 0)
        word = tl.where(at + size <= room, word, 0)
        dst_ptrs = dst_ptr + at.to(tl.int64) * stride_dst
        left = tl.max(size, 0)
        while left > 0:  # each word gives its lowest bit
            mask = word != 0
            lowest = (word & (0 - word)).to(tl.float32)  # a power of two: its exponent is the bit
            bit = (lowest.to(tl.int32, bitcast=True) >> 23) - 127
            position = first + offs_word + bit
            if list_ptr is not None:
                position = tl.load(list_ptr + position, mask=mask, other=0)
            tl.store(dst_ptrs, position - skip, mask=mask)
            word = word & (word - 1)
            dst_ptrs += stride_dst
            left -= 1
        first += BLOCK
    return count


@triton.jit
def _load_keys(x_ptr, stride_x, list_ptr, first, offs, skip, n, BLOCK: tl.constexpr):
    """Keys at offsets first + offs, or at the offsets listed there; 0 outside [skip, n)."""
    offs += first
    mask = (offs >= skip) & (offs < n)
    if list_ptr is not None:
        offs = tl.load(list_ptr + offs, mask=mask, other=0)
    ptrs = x_ptr + offs.to(tl.int64) * stride_x
    if (first >= skip) & (first + BLOCK <= n):  # a mask would cost the loads their vector width
        x = tl.load(ptrs)
    else:
        x = tl.load(ptrs, mask=mask, other=float("-inf"))
    if x.dtype == tl.bfloat16:  # by hand: the interpreter's cast loses subnormals
        bits = x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
    else:
        bits = x.to(tl.float32).to(tl.uint32, bitcast=True)
    bits = tl.where(bits == 0x80000000, 0, bits)  # −0.0 is +0.0
    keys = tl.where(bits >= 0x80000000, bits ^ 0xFFFFFFFF, bits ^ 0x80000000)
    return tl.where((keys >= MIN_KEY) & (keys <= INF_KEY), keys, 0)


@triton.jit
def _pack(flags):
    """[WORDS, 32] → the words they are the bits of, [WORDS] uint32."""
    bits = tl.where(flags, 1 << tl.arange(0, 32)[None, :], 0)
    return tl.sum(bits, 1).to(tl.uint32, bitcast=True)


@triton.jit
def _popcount(word):
    pairs = word - ((word >> 1) & 0x55555555)
    nibbles = (pairs & 0x33333333) + ((pairs >> 2) & 0x33333333)
    octets = (nibbles + (nibbles >> 4)) & 0x0F0F0F0F
    return ((octets * 0x01010101) >> 24).to(tl.int32)


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
