"""The kinds of the public reports on selections, in sizes and values of our own choice.

Rows are built as the reports build theirs, from a drawn length, k, scale and seed, and compared
with sorting. The reports themselves are in test_topk_reports.
"""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import lightning_indexer as li
from counting import AGREEMENT, POISONED, counts_examples, tallies
from lightning_indexer.testing import reference
from score_rows import INF, NAN, in_small_pieces
from scoring import share

POISON = 0x7FFFFFFF
PAGE = 4
Build = Callable[[torch.Tensor, int, torch.Generator], torch.Tensor]


def _order(place: torch.Tensor, g: torch.Generator) -> torch.Tensor:
    """0 … L−1 rising, falling or shuffled."""
    choice = int(torch.randint(3, (), generator=g))
    return (place, place.flip(0), torch.randperm(len(place), generator=g))[choice]


def _some(place: torch.Tensor, share: float, g: torch.Generator) -> torch.Tensor:
    return torch.rand(len(place), generator=g) < share


def _coarse_bin(place: torch.Tensor, k: int, g: torch.Generator) -> torch.Tensor:
    """Distinct fp32 numbers with the same leading bits."""
    exponent = int(torch.randint(-20, 20, (), generator=g))
    return (1 + _order(place, g) * 2.0**-22) * 2.0**exponent


def _out_of_fp16(place: torch.Tensor, k: int, g: torch.Generator) -> torch.Tensor:
    """All 0, inf or −inf in fp16."""
    choice = int(torch.randint(3, (), generator=g))
    scale, start = ((1e-12, 0.0), (8.0, 70000.0), (-8.0, -70000.0))[choice]
    return start + scale * _order(place, g)


def _winners_over_a_plateau(place: torch.Tensor, k: int, g: torch.Generator) -> torch.Tensor:
    return torch.where(_some(place, 0.1, g), 2 + 0.001 * _order(place, g), 0.5)


def _outlier(place: torch.Tensor, k: int, g: torch.Generator) -> torch.Tensor:
    row = torch.zeros(len(place))
    at = torch.randperm(len(place), generator=g)[:3]
    row[at] = torch.tensor([65504.0, 1.25, 1.0])[: len(at)]
    return row


def _numbers_among_nan(place: torch.Tensor, k: int, g: torch.Generator) -> torch.Tensor:
    """About k numbers, NaN of both signs between them."""
    nan = torch.where(_some(place, 0.5, g), NAN, -NAN)
    return torch.where(_some(place, min(1.0, k / len(place)), g), place.float(), nan)


def _infinities(place: torch.Tensor, k: int, g: torch.Generator) -> torch.Tensor:
    row = torch.where(_some(place, 0.2, g), INF, 1 + 0.01 * place)
    return torch.where(_some(place, 0.3, g), -INF, row)


def _few_numbers(place: torch.Tensor, k: int, g: torch.Generator) -> torch.Tensor:
    return torch.where(_some(place, 0.1, g), place.float(), -INF)


def _zeros_of_both_signs(place: torch.Tensor, k: int, g: torch.Generator) -> torch.Tensor:
    row = torch.where(_some(place, 0.5, g), 0.0, -0.0)
    return torch.where(_some(place, 0.05, g), place + 1.0, row)


def _stairs(place: torch.Tensor, k: int, g: torch.Generator) -> torch.Tensor:
    """Plateaus of equal width."""
    width = int(torch.randint(2, 30, (), generator=g))
    return (_order(place, g) // width).float()


def _all_equal(place: torch.Tensor, k: int, g: torch.Generator) -> torch.Tensor:
    return torch.full((len(place),), float(torch.randn((), generator=g)))


#: Kind of report → rows like its.
ROWS: dict[str, tuple[Build, ...]] = {
    "topk_overflow": (_coarse_bin, _out_of_fp16, _winners_over_a_plateau, _outlier),
    "topk_nan_inf": (_numbers_among_nan, _infinities, _few_numbers, _out_of_fp16),
    "topk_ties_determinism": (_zeros_of_both_signs, _stairs, _all_equal),
}


every_build = pytest.mark.parametrize(
    "build",
    [
        pytest.param(build, id=f"{kind}:{build.__name__.strip('_')}")
        for kind, builds in ROWS.items()
        for build in builds
    ],
)


@dataclass(frozen=True)
class Row:
    length: int
    k: int
    garbage: float
    around: tuple[int, int]  # columns before and behind the window
    dtype: torch.dtype
    small_pieces: bool
    seed: int

    def logits(self, build: Build) -> torch.Tensor:
        """[1, around + length], garbage around the window."""
        g = torch.Generator().manual_seed(self.seed)
        before, behind = self.around
        row = torch.full((1, before + self.length + behind), self.garbage, dtype=self.dtype)
        row[0, before : before + self.length] = build(torch.arange(self.length), self.k, g).to(
            self.dtype
        )
        return row


rows = st.builds(
    Row,
    length=st.integers(1, 120) | st.integers(250, 900),
    k=st.integers(1, 40) | st.integers(1, 1000),
    garbage=st.sampled_from([1e4, INF, NAN, -INF]),
    around=st.tuples(st.integers(0, 9), st.integers(0, 9)),
    dtype=st.sampled_from([torch.float32, torch.float32, torch.float16, torch.bfloat16]),
    small_pieces=st.booleans(),
    seed=st.integers(0, 2**31),
)


@share(4)
@given(case=rows)
@every_build
@counts_examples("topk_indices")
@tallies(AGREEMENT, "topk_indices")
@tallies(POISONED, "topk_indices")
def test_rows_like_those_of_the_reports_are_selected_from_exactly(build: Build, case: Row) -> None:
    x, before = case.logits(build), case.around[0]
    starts, ends = torch.tensor([before]), torch.tensor([before + case.length])
    out = torch.full((1, case.k), POISON, dtype=torch.int32)
    with in_small_pieces(case.small_pieces, case.seed):
        got = li.topk_indices(x, case.k, starts, ends, out=out)
    assert torch.equal(got, reference.topk_indices(x, case.k, starts, ends))


@share(8)
@given(case=rows, others=st.lists(st.integers(-5, 400), min_size=1, max_size=4), data=st.data())
@every_build
@counts_examples("topk_indices")
def test_rows_like_those_of_the_reports_select_the_same_beside_any_neighbour(
    build: Build, case: Row, others: list[int], data: st.DataObject
) -> None:
    x = case.logits(build)
    at = data.draw(st.integers(0, len(others)))
    lengths = torch.tensor([*others[:at], x.shape[1], *others[at:]])
    batch = torch.full((len(lengths), max(x.shape[1], 400)), INF, dtype=x.dtype)
    batch[at, : x.shape[1]] = x
    got = li.topk_indices(batch, case.k, None, lengths)
    assert torch.equal(got[at], li.topk_indices(x, case.k)[0])
    for other, length in zip(got, lengths.tolist(), strict=True):
        valid = other[other >= 0]
        assert (valid < max(length, 0)).all()
        assert (other[len(valid) :] == -1).all()


@share(8)
@given(
    parts=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=4),
    k=st.integers(1, 8),
    seed=st.integers(0, 2**31),
)
@counts_examples("topk_indices")
def test_packed_requests_select_among_their_own_keys(
    parts: list[tuple[int, int]], k: int, seed: int
) -> None:
    # row_window_prefill: requests of (cached, new) tokens; all keys of others would win
    g = torch.Generator().manual_seed(seed)
    total = sum(cached + new for cached, new in parts)
    first, starts, ends, alone = 0, [], [], []
    blocks = []
    for cached, new in parts:
        length = cached + new
        scores = torch.randn(new, length, generator=g)
        row = torch.full((new, total), 1e30)
        row[:, first : first + length] = scores
        blocks.append(row)
        own = torch.arange(cached + 1, length + 1)
        starts += [first] * new
        ends += (first + own).tolist()
        alone.append(reference.topk_indices(scores, k, None, own))
        first += length
    got = li.topk_indices(
        torch.cat(blocks), k, torch.tensor(starts).int(), torch.tensor(ends).int()
    )
    assert torch.equal(got, torch.cat(alone))


@share(8)
@given(
    length=st.integers(1, 40), split=st.integers(0, 40), pads=st.integers(0, 6), k=st.integers(1, 9)
)
@counts_examples("topk_indices")
def test_a_position_selects_the_same_in_one_pass_in_chunks_and_step_by_step(
    length: int, split: int, pads: int, k: int
) -> None:
    # row_window_prefill: left pads have the best scores, and what is not written yet is NaN
    g = torch.Generator().manual_seed(length * 41 + split)
    logits = torch.randn(length, pads + length, generator=g).round(decimals=1)
    logits[:, :pads] = 100.0
    starts, ends = torch.full((length,), pads), pads + torch.arange(1, length + 1)
    whole = li.topk_indices(logits, k, starts, ends)
    assert torch.equal(whole, reference.topk_indices(logits, k, starts, ends))
    split = min(split, length)
    early = logits[:split].clone()
    early[:, pads + split :] = NAN
    chunks = [
        li.topk_indices(x, k, starts[rows], ends[rows])
        for x, rows in ((early, slice(0, split)), (logits[split:], slice(split, None)))
    ]
    assert torch.equal(torch.cat(chunks), whole)
    last = li.topk_indices(logits[-1:], k, starts[-1:], ends[-1:])
    assert torch.equal(last, whole[-1:])


@share(8)
@given(
    counts=st.lists(st.integers(0, 4), min_size=1, max_size=6),
    lengths=st.lists(st.integers(0, 8), min_size=6, max_size=6),
    k=st.integers(1, 6),
    seed=st.integers(0, 2**31),
)
@counts_examples("paged_select_topk")
def test_rows_of_any_counts_select_as_their_request_alone(
    counts: list[int], lengths: list[int], k: int, seed: int
) -> None:
    # row_length_mtp: ragged and equal numbers of rows, requests without any
    g = torch.Generator().manual_seed(seed)
    table = li.BlockTable(6, 12, num_pages=18, page_size=PAGE)
    for request in range(6):
        table.allocate(request, 12)
    cache = torch.randn(18, PAGE, 8, generator=g)
    rows = [li.RequestRows(r, lengths[r], [0] * n) for r, n in enumerate(counts)]
    batch = li.target_batch(rows, table.table, PAGE)
    total = sum(counts)
    q, weights = torch.randn(total, 1, 2, 8, generator=g), torch.rand(total, 2, generator=g)
    lens, owners = batch.context_lens(), batch.row_to_request

    def select(part: slice, owner: torch.Tensor) -> torch.Tensor:
        paging = {"row_to_request": owner, "max_context_len": 12, "page_size": PAGE}
        return li.paged_select_topk(
            q[part], cache, weights[part], lens[part], table.table, k, **paging
        )

    got, first = select(slice(None), owners), 0
    for request, count in enumerate(counts):
        part = slice(first, first + count)
        assert lens[part].tolist() == list(
            range(lengths[request] + 1, lengths[request] + count + 1)
        )
        alone = select(part, torch.full((count,), request, dtype=torch.int32))
        assert torch.equal(got[part], alone)
        first += count
    assert first == total
