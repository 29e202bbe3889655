"""Scores of a row as fp32 numbers and as ordered keys, and the search for a key by counting.

A key is a uint32 that orders like its score; −0.0 has the key of +0.0. Selectable scores have keys
from MIN_KEY to INF_KEY; NaN and −inf have 0.
"""

from __future__ import annotations

from .backend import tl, triton

MIN_KEY = tl.constexpr(0x00800000)
INF_KEY = tl.constexpr(0xFF800000)


@triton.jit
def load_scores(x_ptr, stride_x, offs, mask, UNIT_STRIDE: tl.constexpr):
    """Scores at offsets `offs` of a row, in fp32; −inf where `mask` (None: everywhere) is false."""
    ptrs = x_ptr + (offs if UNIT_STRIDE else offs.to(tl.int64) * stride_x)
    if mask is None:  # noqa: SIM108 (chosen when compiled)
        x = tl.load(ptrs)
    else:
        x = tl.load(ptrs, mask=mask, other=float("-inf"))
    if x.dtype == tl.bfloat16:  # by hand: the interpreter's cast loses subnormals
        bits = x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
        scores = bits.to(tl.float32, bitcast=True)
    else:
        scores = x.to(tl.float32)
    return scores


@triton.jit
def to_keys(scores):
    """fp32 scores → keys."""
    bits = scores.to(tl.uint32, bitcast=True)
    bits = tl.where(bits == 0x80000000, 0, bits)
    keys = tl.where(bits >= 0x80000000, bits ^ 0xFFFFFFFF, bits ^ 0x80000000)
    return tl.where((keys >= MIN_KEY) & (keys <= INF_KEY), keys, 0)


@triton.jit
def to_score(key):
    """The number that a score must be at least for its key to be at least `key`.

    A key above INF_KEY gives NaN, which no score reaches.
    """
    bits = tl.where(key >= 0x80000000, key ^ 0x80000000, key ^ 0xFFFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def find_key(keys, least, most, lo):
    """A key ≥ lo that `least` to `most` of `keys` reach, else the last that `least` reach, else lo.

    Bisection in registers: about log2(range / distance of neighbours) rounds, 32 at most.
    """
    hi = tl.max(keys, 0)
    while lo < hi:
        middle = hi - ((hi - lo) >> 1)
        reaching = tl.sum((keys >= middle).to(tl.int32), 0)
        lo = tl.where(reaching >= least, middle, lo)
        hi = tl.where(reaching > most, hi, tl.where(reaching >= least, middle, middle - 1))
    return lo
