"""`topk_indices`: how a call is launched, and how good the guess of its threshold is.

Both decide time and memory alone; docs/kernels.md says what users may rely on.
"""

import random

import pytest
import torch

from lightning_indexer.kernels.backend import Target, tl, triton
from lightning_indexer.kernels.topk import topk_indices
from lightning_indexer.kernels.topk_bracket import (
    COUNT_FIRST,
    NO_HI,
    ONE_WORD,
    TWO_WORDS,
    count_bracket,
    sample_bracket,
)
from lightning_indexer.kernels.topk_kernel import launch_constants
from lightning_indexer.kernels.topk_keys import MIN_KEY
from lightning_indexer.kernels.topk_plan import TopkPlan, plan_topk
from long_rows import long_row
from test_topk_reads import counting_loads

NVIDIA, AMD = Target("cuda", 90), Target("hip", "gfx942")
TARGETS = [NVIDIA, AMD, Target("interpreter", "cpu")]
MULTIPROCESSORS = 132
MIB = 1 << 20
CAPACITY = 4096
once = pytest.mark.once
in_interpreter = pytest.mark.interpreter


def plan_of(rows: int, length: int, target: Target = NVIDIA) -> TopkPlan:
    return plan_topk(target, MULTIPROCESSORS, rows, length)


@once
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("length", [1, 127, 128, 129, 2048, 2049, 4096])
def test_short_rows_are_compared_as_they_are_without_scratch(length: int, target: Target) -> None:
    plan = plan_of(70_000, length, target)
    assert (plan.samples, plan.splits, plan.launch_rows) == (0, 1, 70_000)
    assert plan.scratch(length) == (0, 0)
    least = max(length, 128)
    assert least <= plan.capacity < 2 * least and plan.capacity & (plan.capacity - 1) == 0
    warp = 64 if target is AMD else 32
    assert plan.threads == max(plan.capacity // 16, warp)  # 16 scores a thread


@once
@pytest.mark.parametrize(
    ("length", "listed"), [(4097, 4096), (262_144, 4096), (262_145, 8192), (1 << 24, 8192)]
)
def test_longer_rows_list_4096_candidates_and_8192_past_256k(length: int, listed: int) -> None:
    plan = plan_of(1000, length)
    assert (plan.capacity, plan.threads) == (listed, listed // 16)
    assert 2048 <= plan.samples <= plan.capacity and plan.samples & (plan.samples - 1) == 0


@once
def test_rows_are_split_from_32k_columns_if_they_are_at_most_half_the_multiprocessors() -> None:
    assert [plan_of(rows, 32_767).splits for rows in (1, 66)] == [1, 1]
    assert plan_of(67, 32_768).splits == plan_of(67, 1 << 20).splits == 1
    for rows in (1, 2, 5, 65, 66):
        for length in (32_768, 1 << 17, 1 << 20):
            plan = plan_of(rows, length)
            assert plan.splits > 1 and plan.launch_rows == rows
            assert rows * plan.splits <= 2 * MULTIPROCESSORS
            more = plan.splits + 1  # would be too many, or have too little to do
            assert rows * more > 2 * MULTIPROCESSORS or length < more * 64 * plan.threads
            assert length >= plan.splits * 64 * plan.threads  # of two tiles at least


@once
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("length", [4097, 32_768, 100_000, 1 << 20, 1 << 24])
def test_scratch_is_at_most_64_mib_or_eight_rows_a_multiprocessor(
    length: int, target: Target
) -> None:
    plan = plan_of(1 << 20, length, target)
    words, ints = plan.scratch(length)
    flags = -(-length // plan.tile) * plan.threads
    assert words == flags and plan.tile == 32 * plan.threads
    counts = 2048 if target is AMD else 0  # digits are counted in scratch there
    assert 1 <= ints - (2 * flags + plan.capacity + counts) <= 16 and ints % 16 == 0
    fits = 64 * MIB // (4 * ints)
    assert plan.launch_rows == max(fits, 8 * MULTIPROCESSORS)
    few = plan.launch_rows - 1
    assert plan_of(few, length, target).launch_rows == few
    assert plan.histogram is (target is not AMD)


@once
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("length", [1, 4096, 4097, 1 << 20])
@pytest.mark.parametrize("target", TARGETS)
def test_launch_says_the_plan_and_leaves_room_for_two_programs(
    target: Target, length: int, stride: int
) -> None:
    plan = plan_of(9, length, target)
    constants = launch_constants(plan, target, stride)
    assert constants.pop("maxnreg", None) == (128 if target is NVIDIA and stride == 1 else None)
    lanes = 64 if target is AMD else 32
    assert constants.pop("num_warps") * lanes == plan.threads
    assert constants.pop("POP_WORDS") in (0, 1024)  # a power of two where words are listed
    assert constants == {
        "CAPACITY": plan.capacity,
        "SAMPLES": plan.samples,
        "THREADS": plan.threads,
        "HISTOGRAM": plan.histogram,
        "UNIT_STRIDE": stride == 1,
    }


@triton.jit
def _guess_kernel(x_ptr, out_ptr, n, k, CAPACITY: tl.constexpr, SAMPLES: tl.constexpr):
    lo, hi, form = sample_bracket(x_ptr, 1, 0, n, k, CAPACITY, SAMPLES, True)
    tl.store(out_ptr, lo.to(tl.int64))
    tl.store(out_ptr + 1, hi.to(tl.int64))
    tl.store(out_ptr + 2, form.to(tl.int64))


def guess(x: torch.Tensor, k: int) -> tuple[int, int, int]:
    """Scores in the bracket and above it, and what is to be done with it."""
    out = torch.zeros(3, dtype=torch.int64)
    _guess_kernel[(1,)](x, out, x.numel(), k, CAPACITY, plan_of(9, x.numel()).samples)
    lo, hi, form = out.tolist()
    bits = x.view(torch.int32).to(torch.int64)
    keys = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits) + 2**31
    above = 0 if hi == NO_HI.value else int((keys >= hi).sum())
    return int((keys >= lo).sum()) - above, above, form


@in_interpreter
@pytest.mark.parametrize(
    ("length", "k"), [(65_536, 2048), (65_536, 100), (20_000, 1800), (5000, 5), (200_000, 2048)]
)
def test_sampled_threshold_lets_between_k_and_4096_scores_through(length: int, k: int) -> None:
    counts = []
    for seed in range(24):
        x = torch.randn(length, generator=torch.Generator().manual_seed(seed))
        inside, above, form = guess(x, k)
        assert (form, above) == (ONE_WORD.value, 0)
        counts.append(inside)
    missed = sum(not k <= inside <= CAPACITY for inside in counts)
    assert missed == 0, counts
    if length > 64_000 and k > 1000:  # both limits are equally far: halfway between their roots
        middle = ((k**0.5 + CAPACITY**0.5) / 2) ** 2
        assert abs(sum(counts) / len(counts) / middle - 1) < 0.08


@in_interpreter
@pytest.mark.parametrize(("length", "k"), [(20_000, 9000), (20_000, 15_000), (60_000, 2400 * 10)])
def test_large_k_lies_between_two_sampled_bounds(length: int, k: int) -> None:
    for seed in range(12):
        x = torch.randn(length, generator=torch.Generator().manual_seed(seed))
        inside, above, form = guess(x, k)
        assert above < k <= above + inside
        if length == 20_000:
            assert form == TWO_WORDS.value and inside <= CAPACITY
        else:  # more than a list holds: counted inside the bounds first
            assert form == (TWO_WORDS if inside <= 0.9 * CAPACITY else COUNT_FIRST).value


@triton.jit
def _count_kernel(
    x_ptr, bins_ptr, out_ptr, skip, n, k, lo, hi, CAPACITY: tl.constexpr, HISTOGRAM: tl.constexpr
):
    lo, hi = count_bracket(
        *(x_ptr, 1, bins_ptr, skip, n, k, lo.to(tl.uint32), hi.to(tl.uint32)),
        *(CAPACITY, 64, HISTOGRAM, True),
    )
    tl.store(out_ptr, lo.to(tl.int64))
    tl.store(out_ptr + 1, hi.to(tl.int64))


@in_interpreter
@pytest.mark.parametrize("histogram", [True, False])
def test_counted_bracket_holds_the_answer_whatever_was_guessed(histogram: bool) -> None:
    """Keys lie at the ends of digits of 11 bits, and the first and the last of a row matter."""
    draw = random.Random(histogram)
    listed, bins = 8, torch.full((2048,), -7, dtype=torch.int32)
    steps = [a * s + b for s in (1, 1 << 11, 1 << 22) for a in (0, 1, 2) for b in (-1, 0, 1)]
    for _ in range(120):
        base = draw.choice([2**31 + 2**24, 2**31 - 2**24])
        keys = [base + draw.choice(steps) for _ in range(draw.choice([40, 64, 65]))]
        skip = draw.choice([0, 0, 0, 1, 2, 3])
        keys[skip], keys[-1] = max(keys) + draw.randint(0, 1), draw.choice([min(keys), max(keys)])
        seen, k = keys[skip:], draw.randint(1, len(keys) - skip)
        kth = sorted(seen)[-k]
        lo = draw.choice([MIN_KEY.value, min(seen), kth, kth + 1, kth + 1, max(seen) + 1])
        hi = draw.choice([NO_HI.value, lo + 1, lo + 2048, lo + 2049])
        bits = [key - 2**31 if key >= 2**31 else (key - 2**31) ^ 0x7FFFFFFF for key in keys]
        x, out = torch.tensor(bits, dtype=torch.int32).view(torch.float32), torch.zeros(2).long()
        _count_kernel[(1,)](x, bins, out, skip, len(keys), k, lo, hi, listed, histogram)
        lo, hi = out.tolist()
        above = sum(key >= hi for key in seen)
        inside = sum(lo <= key < hi for key in seen)
        few = inside <= listed or hi - lo == 1 or inside + above <= k
        reaches = inside + above >= k or lo == MIN_KEY.value
        assert k <= above <= listed or (above <= k and reaches and few), (lo, hi, above, inside)


@in_interpreter
@pytest.mark.parametrize("k", [1, 700, 3000, 9000, 19_000])
def test_row_of_different_scores_is_read_once_whatever_k_is(k: int) -> None:
    x = long_row("normal", 20_000, k)
    with counting_loads(x) as loaded:
        topk_indices(x, k)
    assert loaded[0] <= 20_000 + 2048 + CAPACITY
