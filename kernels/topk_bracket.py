"""Brackets [lo, hi) of keys around the k-th greatest of a row: guessed from a sample, or counted.

A guess costs no read of the row and is checked by the flags that it leads to; counting digits of
keys costs at most four reads and is never wrong.
"""

from __future__ import annotations

from .backend import tl, triton
from .topk_keys import MIN_KEY, find_key, load_scores, to_keys
from .topk_plan import DIGITS

NO_HI = tl.constexpr(0xFF800001)  # above every key
BINS = tl.constexpr(DIGITS)

# What to do with a bracket.
ONE_WORD = tl.constexpr(0)  # hi is NO_HI: flag what is at least lo, the list holds it
TWO_WORDS = tl.constexpr(1)  # flag what is in the bracket, and what is above it
COUNT_FIRST = tl.constexpr(2)  # more in the bracket than the list holds: narrow it first

# Distances, in standard deviations, that keep a guess on the safe side. The square root of a rank
# in a sample has a standard deviation of 1/2, so a distance of d between roots is 2·d of them.
NARROWEST = tl.constexpr(2.25)
WIDEST = tl.constexpr(5.0)
BRACKET = tl.constexpr(3.3)


@triton.jit
def sample_bracket(
    x_ptr,
    stride_x,
    skip,
    n,
    k,
    CAPACITY: tl.constexpr,
    SAMPLES: tl.constexpr,
    UNIT_STRIDE: tl.constexpr,
):
    """(lo, hi, what to do): a guess from SAMPLES scores of [skip, n).

    Few wanted: lo is a sampled key that between k and CAPACITY keys should reach. If more of the
    sample reach it than meant, equal keys straddle the place, and hi becomes the next key.
    Many wanted: sampled keys on both sides of the place of the k-th, or one that it must equal.
    """
    offs = _sample_offsets(skip, n, SAMPLES)
    keys = to_keys(load_scores(x_ptr, stride_x, offs, None, UNIT_STRIDE))
    density = SAMPLES / n.to(tl.float32)
    rank = k * density  # of the k-th key, in the sample
    room = CAPACITY * density
    root = tl.sqrt(rank)
    free = tl.sqrt(room) - root
    few = free > NARROWEST
    spread = 2.0 + BRACKET * tl.sqrt(tl.maximum(rank * (1.0 - rank / SAMPLES), 0.0))
    aim = root + 0.5 * tl.minimum(free, WIDEST)
    lo_rank = tl.where(few, aim * aim, rank + spread)
    lo_rank = tl.minimum(lo_rank + 1.0, SAMPLES + 1.0).to(tl.int32)
    enough = lo_rank + lo_rank // 16
    lo = find_key(keys, lo_rank, enough, tl.full((), MIN_KEY, tl.uint32))
    hi = tl.full((), NO_HI, tl.uint32)
    form = tl.full((), ONE_WORD, tl.int32)
    if few:
        if tl.sum((keys >= lo).to(tl.int32), 0) > enough:
            hi = lo + 1
            form += TWO_WORDS
    else:
        if rank - spread >= 1.0:
            hi_rank = (rank - spread).to(tl.int32)
            hi = find_key(keys, hi_rank, hi_rank, lo)
        reaching_hi = tl.sum((keys >= hi).to(tl.int32), 0)
        if reaching_hi >= rank:  # equal keys from there to the place
            lo = hi
        if (lo == hi) | (tl.sum((keys > lo).to(tl.int32), 0) < rank):
            hi = lo + 1
        between = tl.sum((keys >= lo).to(tl.int32), 0) - reaching_hi
        fits = (between < 0.9 * room) | (hi - lo == 1)
        form += tl.where(fits, TWO_WORDS, COUNT_FIRST)
    return lo, hi, form


@triton.jit
def holds_the_answer(lo, hi, inside, above, k, CAPACITY: tl.constexpr):
    """Whether the flags of a bracket are enough to select from without reading the row again."""
    together = inside + above
    from_above = (above >= k) & (above <= CAPACITY)
    enough = (above <= k) & ((together >= k) | (lo == MIN_KEY))
    listed = (inside <= CAPACITY) | (hi - lo == 1) | (together <= k)
    return from_above | (enough & listed)


@triton.jit
def count_bracket(
    x_ptr,
    stride_x,
    bins_ptr,
    skip,
    n,
    k,
    lo,
    hi,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
    HISTOGRAM: tl.constexpr,
    UNIT_STRIDE: tl.constexpr,
):
    """(lo, hi) for which `holds_the_answer`: within a guess, or elsewhere if the guess is wrong.

    Counts digits of 11 bits. At most four reads: one that finds the guess wrong, and three of the
    whole range of keys; it stops once the bracket holds at most CAPACITY keys.
    """
    if not HISTOGRAM:
        _take_counts(bins_ptr)  # scratch comes with anything in it
    shift = tl.full((), 0, tl.int32)
    while ((hi - lo - 1) >> shift.to(tl.uint32)) >= BINS:
        shift += 1
    while shift >= 0:
        counts, above = _count_digits(
            x_ptr, stride_x, bins_ptr, skip, n, lo, shift, BLOCK, HISTOGRAM, UNIT_STRIDE
        )
        reaching = tl.cumsum(counts, 0, reverse=True) + above
        together = tl.max(reaching, 0)
        if (above >= k) | ((together < k) & (lo > MIN_KEY)):
            lo = tl.full((), MIN_KEY, tl.uint32)
            hi = tl.full((), NO_HI, tl.uint32)
            shift = tl.full((), 21, tl.int32)
        elif together < k:
            hi = tl.full((), NO_HI, tl.uint32)
            shift = tl.full((), -1, tl.int32)
        else:
            digit = tl.sum((reaching >= k).to(tl.int32), 0) - 1
            inside = tl.sum(tl.where(tl.arange(0, BINS) == digit, counts, 0), 0)
            lo += digit.to(tl.uint32) << shift.to(tl.uint32)
            hi = lo + (tl.full((), 1, tl.uint32) << shift.to(tl.uint32))
            done = (inside <= CAPACITY) | (shift == 0)
            shift = tl.where(done, -1, tl.maximum(shift - 11, 0))
    return lo, hi


@triton.jit
def _sample_offsets(skip, n, SAMPLES: tl.constexpr):
    """One offset in each of SAMPLES equal stretches; hashed, so that no period is followed."""
    stretch = tl.arange(0, SAMPLES)
    start = ((stretch.to(tl.int64) * n) // SAMPLES).to(tl.int32)
    fraction = (stretch * 40503) & 0xFFFF
    within = ((fraction.to(tl.int64) * (n // SAMPLES)) >> 16).to(tl.int32)
    return tl.maximum(start + within, skip)


@triton.jit
def _count_digits(
    x_ptr,
    stride_x,
    bins_ptr,
    skip,
    n,
    lo,
    shift,
    BLOCK: tl.constexpr,
    HISTOGRAM: tl.constexpr,
    UNIT_STRIDE: tl.constexpr,
):
    """How many keys of [skip, n) have each digit (key − lo) >> shift < BINS, how many a greater."""
    counts = tl.zeros((BINS,), tl.int32)
    beyond = tl.zeros((BLOCK,), tl.int32)
    first = tl.full((), 0, tl.int32)
    while first < n:
        offs = first + tl.arange(0, BLOCK)
        mask = (offs >= skip) & (offs < n)
        keys = to_keys(load_scores(x_ptr, stride_x, offs, mask, UNIT_STRIDE))
        digit = (keys - lo) >> shift.to(tl.uint32)
        inside = (keys >= lo) & (digit < BINS)
        beyond += ((keys >= lo) & (digit >= BINS)).to(tl.int32)
        digit = (digit & (BINS - 1)).to(tl.int32)
        if HISTOGRAM:
            counts += tl.histogram(digit, BINS, mask=inside)
        else:
            tl.atomic_add(bins_ptr + digit, 1, mask=inside, sem="relaxed", scope="cta")
        first += BLOCK
    if not HISTOGRAM:
        tl.debug_barrier()
        counts = _take_counts(bins_ptr)
    return counts, tl.sum(beyond, 0)


@triton.jit
def _take_counts(bins_ptr):
    """The counts, and zeros in their place, ready for the next atomic additions."""
    # not an exchange, for which Triton 3.6 names an instruction that AMD does not have
    zeros = tl.zeros((BINS,), tl.int32)
    counts = tl.atomic_and(bins_ptr + tl.arange(0, BINS), zeros, sem="relaxed", scope="cta")
    tl.debug_barrier()
    return counts
