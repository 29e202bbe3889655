"""Public reports of compilers and interpreters that miscount; each names its source."""

import ast
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import lightning_indexer as li
from counting import counts_examples
from lightning_indexer.kernels.backend import tl, triton
from lightning_indexer.kernels.topk_bracket import BINS, _count_digits, _take_counts
from lightning_indexer.kernels.topk_keys import MIN_KEY
from lightning_indexer.kernels.topk_plan import DIGITS
from lightning_indexer.testing import reference
from score_rows import REGIMES, scores
from scoring import share

pytest.importorskip("triton")

#: The counting kernels run in the interpreter and on a GPU; a CPU path has none.
DEVICES = (
    pytest.param("cpu", marks=pytest.mark.interpreter),
    pytest.param("cuda", marks=pytest.mark.gpu),
)
QUIET_NAN, NEGATIVE_NAN, ALL_ONES = 0x7FC00000, 0xFFC00000, 0xFFFFFFFF


@triton.jit
def _digits_kernel(
    x_ptr,
    bins_ptr,
    n,
    bounds_ptr,
    counts_ptr,
    BLOCK: tl.constexpr,
    HISTOGRAM: tl.constexpr,
):
    """`_count_digits` of a row; the counts and then how many lie beyond them."""
    lo = tl.load(bounds_ptr).to(tl.uint32)
    shift = tl.load(bounds_ptr + 1).to(tl.int32)
    skip = tl.load(bounds_ptr + 2).to(tl.int32)
    if not HISTOGRAM:
        _take_counts(bins_ptr)
    counts, beyond = _count_digits(x_ptr, 1, bins_ptr, skip, n, lo, shift, BLOCK, HISTOGRAM, True)
    tl.store(counts_ptr + tl.arange(0, BINS), counts)
    tl.store(counts_ptr + BINS, beyond)


def key_of(score: float) -> int:
    """A number's place in the order of fp32 scores, −0.0 with +0.0; 0 for NaN and −inf."""
    x = torch.tensor(score + 0.0)
    if not x > float("-inf"):
        return 0
    bits = int(x.view(torch.int32)) & 0xFFFFFFFF
    return 0xFFFFFFFF - bits if bits >> 31 else bits + 0x80000000


@dataclass(frozen=True)
class Digits:
    """A row of scores, and which digits of their keys are counted."""

    length: int
    skip: int
    regime: str
    rank: int
    shift: int
    seed: int

    def row(self) -> torch.Tensor:
        return scores(1, self.length, self.regime, self.seed)[0]

    def lo(self) -> int:
        """The key of one of the scores, so that others lie on both sides of it."""
        keys = sorted(map(key_of, self.row().tolist()))
        return max(keys[self.rank % self.length], MIN_KEY.value)


digits = st.builds(
    Digits,
    length=st.integers(1, 700),
    skip=st.integers(0, 3),
    regime=st.sampled_from(REGIMES),
    rank=st.integers(0, 700),
    shift=st.integers(0, 21),
    seed=st.integers(0, 2**31),
)


def counted(case: Digits, device: str, histogram: bool) -> list[int]:
    row = case.row().to(device)
    bounds = torch.tensor([case.lo(), case.shift, case.skip], device=device)
    bins = torch.full((DIGITS,), -1, dtype=torch.int32, device=device)
    counts = torch.full((DIGITS + 1,), -1, dtype=torch.int32, device=device)
    options = {"BLOCK": 256, "HISTOGRAM": histogram}
    _digits_kernel[(1,)](row, bins, case.length, bounds, counts, **options)
    return counts.tolist()


@share(2)
@given(case=digits)
@pytest.mark.parametrize("histogram", [True, False])
@pytest.mark.parametrize("device", DEVICES)
@counts_examples("topk_indices")
def test_every_key_is_counted_once_under_its_digit_or_not_at_all(
    device: str, histogram: bool, case: Digits
) -> None:
    # triton-lang/triton#11194: values past the last bin were counted in it, by the interpreter
    # alone; what lies outside is masked here. triton-lang/triton#10889: 300 equal digits gave 44,
    # summed in 8 bits. triton-lang/triton#6987: counts that did not add up, on a GPU alone.
    lo = case.lo()
    keys = [key_of(x) for x in case.row().tolist()[case.skip :]]
    expected = [0] * (DIGITS + 1)
    for key in keys:
        if key >= lo:
            expected[min((key - lo) >> case.shift, DIGITS)] += 1
    got = counted(case, device, histogram)
    assert got == expected
    assert sum(got) + sum(key < lo for key in keys) == max(case.length - case.skip, 0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("histogram", [True, False])
@pytest.mark.parametrize("equal", [127, 128, 255, 256, 300, 513, 1000])
def test_as_many_equal_digits_as_there_are_make_one_count(
    equal: int, histogram: bool, device: str
) -> None:
    # triton-lang/triton#10889
    row = torch.full((equal,), 0.25, device=device)
    bounds = torch.tensor([key_of(0.25) - 5, 0, 0], device=device)
    bins = torch.full((DIGITS,), 7, dtype=torch.int32, device=device)
    counts = torch.zeros(DIGITS + 1, dtype=torch.int32, device=device)
    options = {"BLOCK": 512, "HISTOGRAM": histogram}
    _digits_kernel[(1,)](row, bins, equal, bounds, counts, **options)
    assert counts[5] == equal
    assert counts.sum() == equal


@pytest.mark.once
def test_no_kernel_counts_digits_after_a_product_of_matrices() -> None:
    # triton-lang/triton#6987: tl.histogram after tl.dot in one kernel miscounted on a GPU.
    reached = _reached()
    assert any("dot" in names for names in reached.values())
    assert any("histogram" in names for names in reached.values())
    both = [name for name, names in reached.items() if {"dot", "histogram"} <= names]
    assert not both


@pytest.mark.once
def test_histograms_are_masked() -> None:
    # triton-lang/triton#11194: what is out of range must not be left to the histogram.
    calls = [
        node
        for tree in _trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "tl.histogram"
    ]
    assert calls
    assert all("mask" in {keyword.arg for keyword in call.keywords} for call in calls)


def _trees() -> list[ast.Module]:
    folder = Path(li.__file__).parent / "kernels"
    return [ast.parse(path.read_text()) for path in sorted(folder.glob("*.py"))]


def _reached() -> dict[str, set[str]]:
    """Of each function in kernels/: all that it calls, and that they call; `tl.x` as x."""
    direct = {
        node.name: {
            ast.unparse(call.func).removeprefix("tl.")
            for call in ast.walk(node)
            if isinstance(call, ast.Call)
        }
        for tree in _trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
    }
    reached = {name: set(names) for name, names in direct.items()}
    for _ in direct:
        for names in reached.values():
            names |= {further for name in list(names) for further in direct.get(name, ())}
    return reached


@share(4)
@given(
    columns=st.integers(1, 60),
    k=st.integers(1, 70),
    bits=st.sampled_from([ALL_ONES, NEGATIVE_NAN, QUIET_NAN, 0x7F800001, 0xFF800001, 0x7FFFFFFF]),
    data=st.data(),
)
@counts_examples("topk_indices")
def test_no_bit_pattern_sorts_a_padding_lane_before_a_real_one(
    columns: int, k: int, bits: int, data: st.DataObject
) -> None:
    # triton-lang/triton#10814: 13 columns in 16 lanes; a negative NaN, all ones, sorted behind the
    # −inf of the padding, whose positions came out.
    places = data.draw(st.sets(st.integers(0, columns - 1), max_size=columns))
    row = torch.arange(1, columns + 1).float()
    signed = bits - 2**32 if bits >> 31 else bits
    row.view(torch.int32)[list(places)] = signed
    numbers = [p for p in range(columns) if p not in places][-k:]
    got = li.topk_indices(row[None], k)
    assert got[0].tolist() == numbers + [-1] * (k - len(numbers))
    assert torch.equal(got, reference.topk_indices(row[None], k))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("columns, place", [(13, 4), (13, 12), (5, 0), (33, 32)])
def test_all_ones_is_never_selected_in_two_bytes(
    columns: int, place: int, dtype: torch.dtype
) -> None:
    # triton-lang/triton#10814
    row = torch.arange(1, columns + 1).to(dtype)
    row.view(torch.int16)[place] = -1
    expected = [p for p in range(columns) if p != place]
    assert li.topk_indices(row[None], columns)[0].tolist() == [*expected, -1]
