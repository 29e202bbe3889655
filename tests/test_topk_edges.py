"""`topk_indices` at the edges of its lists, tiles, launches and scratch, in small pieces."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch

from lightning_indexer.kernels import select_topk as select_module
from lightning_indexer.kernels import topk_cpu, topk_kernel
from lightning_indexer.kernels.select_topk import paged_select_topk, select_topk
from lightning_indexer.kernels.topk import topk_indices
from lightning_indexer.kernels.topk_plan import TopkPlan
from paged_scoring import PagedCase
from scoring import FP8

LENGTH = 264
CAPACITY = 16
INF, NAN = float("inf"), float("nan")
LARGEST = torch.finfo(torch.float32).max
SUBNORMAL = 2.0**-149
POISON = -0x5EAF00D
MARGIN = 4096


#: Lists of 16 candidates, tiles of 256 scores; the row of a program, or a third of a row.
ALONE = TopkPlan(CAPACITY, 8, 8, 8, launch_rows=1, splits=1, histogram=True)
SPLIT = TopkPlan(CAPACITY, 8, 8, 8, launch_rows=9, splits=3, histogram=False)
both_plans = pytest.mark.parametrize("plan", [SPLIT, ALONE], ids=["split", "alone"])


@contextmanager
def launched_by(plan: TopkPlan) -> Iterator[None]:
    with patch.object(topk_kernel, "plan_topk", lambda *_: plan):
        yield


@contextmanager
def guarded_scratch(margins: list[torch.Tensor]) -> Iterator[None]:
    """Scratch comes full of garbage, with garbage before and after it that `margins` gets."""
    original = torch.Tensor.new_empty

    def new_empty(like: torch.Tensor, shape: Any, **options: Any) -> torch.Tensor:
        if options != {"dtype": torch.int32}:  # one of the interpreter's own
            return original(like, shape, **options)
        size = torch.Size(shape).numel()
        whole = torch.full((size + 2 * MARGIN,), POISON, **options)
        margins.extend((whole[:MARGIN], whole[MARGIN + size :]))
        return whole[MARGIN : MARGIN + size].view(shape)

    with patch.object(torch.Tensor, "new_empty", new_empty):
        yield


def by_sorting(row: list[float], k: int) -> list[int]:
    """The rule, on Python's numbers: NaN and −inf out, greatest first, ties to the first."""
    able = [s for s, x in enumerate(row) if x > -INF]
    best = sorted(sorted(able, key=lambda s: (-row[s], s))[:k])
    return best + [-1] * (k - len(best))


def check(x: torch.Tensor, k: int, plan: TopkPlan) -> None:
    margins: list[torch.Tensor] = []
    out = torch.full((x.shape[0], k), POISON, dtype=torch.int32)
    with launched_by(plan), guarded_scratch(margins):
        topk_indices(x, k, out=out)
    assert out.tolist() == [by_sorting(row, k) for row in x.tolist()]
    assert all((margin == POISON).all() for margin in margins)


def shuffled(values: torch.Tensor, seed: int) -> torch.Tensor:
    return values[torch.randperm(len(values), generator=torch.Generator().manual_seed(seed))]


def plateau(higher: int, equal: int, seed: int, length: int = LENGTH) -> torch.Tensor:
    """`higher` different scores above `equal` ones, and different ones below, in any order."""
    top = 2.0 + torch.arange(higher) / 1024
    below = -torch.arange(1.0, length - higher - equal + 1)
    return shuffled(torch.cat([top, torch.ones(equal), below]), seed)


#: k, and the shape of a row: so many above the plateau, and so many in it.
PLATEAUS = {
    CAPACITY: [(CAPACITY + 1, 1), (CAPACITY - 1, CAPACITY + 1)],
    100: [(100, 17), (100 - CAPACITY, 17)],
}


@both_plans
@pytest.mark.parametrize("k", PLATEAUS)
def test_plateau_at_the_last_place_is_cut_where_the_rule_says(plan: TopkPlan, k: int) -> None:
    check(torch.stack([plateau(*shape, seed=k) for shape in PLATEAUS[k]]), k, plan)


def test_fewer_numbers_than_wanted_are_all_selected() -> None:
    place = torch.arange(LENGTH, dtype=torch.float32)
    rows = [torch.where(place < able, -place, NAN) for able in (0, CAPACITY, CAPACITY + 1, 30)]
    check(torch.stack([shuffled(row, 1) for row in rows]), 31, SPLIT)


@pytest.mark.parametrize("plan, k", [(ALONE, 3), (SPLIT, 20)], ids=["alone", "split"])
@pytest.mark.parametrize("length", [1, CAPACITY, CAPACITY + 1, 33, 256, 257])
def test_length_is_exact_at_edges_of_lists_words_and_tiles(
    plan: TopkPlan, k: int, length: int
) -> None:
    check(shuffled(torch.arange(length) / 8, length)[None], k, plan)


EXTREMES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "least number": lambda x: torch.where(x % 3 == 0, -LARGEST, -INF),
    "infinite": lambda x: torch.where(x % 3 == 0, INF, LARGEST),
    "around zero": lambda x: (x % 5 - 2) * SUBNORMAL,
    "zeros of both signs": lambda x: torch.where(x % 2 == 0, -0.0, 0.0),
    "neighbours": lambda x: 1 + (x % 3) * 2.0**-23,
}


@pytest.mark.parametrize("kind", EXTREMES)
def test_ends_of_the_range_of_numbers_are_in_order(kind: str) -> None:
    place = torch.arange(136, dtype=torch.float32)
    x = EXTREMES[kind](shuffled(place, 1))[None]
    check(x, 9, ALONE)
    check(x[:, :70], 50, SPLIT)


@pytest.mark.parametrize("k", [1, CAPACITY // 2])
def test_short_row_of_least_and_greatest_numbers_needs_no_scratch(k: int) -> None:
    plan = TopkPlan(CAPACITY, 0, 8, 0, launch_rows=2, splits=1, histogram=True)
    row = torch.tensor([NAN, -INF, -LARGEST, -LARGEST, LARGEST, INF, -0.0, 0.0, -SUBNORMAL])
    check(torch.stack([row, torch.full_like(row, -INF)]), k, plan)


def test_row_as_long_as_a_list_is_selected_from_whole_whatever_k() -> None:
    row = shuffled(1 + torch.arange(CAPACITY) // 2 * 2.0**-23, seed=5)[None]
    for k in range(1, CAPACITY + 2):
        check(row, k, SPLIT if k % 4 == 0 else ALONE)


@both_plans
def test_sample_of_a_single_score_is_enough(plan: TopkPlan) -> None:
    plan = dataclasses.replace(plan, samples=1)
    check(plateau(11, 30, seed=8)[None], 20, plan)
    check(plateau(9, 1, seed=8, length=70)[None], 8, plan)


def test_more_places_than_scores_are_for_the_least_number_too() -> None:
    row = torch.tensor([0.0, -LARGEST, -INF, NAN, -LARGEST, -1.0])
    for k in (6, 7):
        check(row[None], k, TopkPlan(CAPACITY, 0, 8, 0, launch_rows=1, splits=1, histogram=True))


def test_nan_of_any_sign_and_payload_is_never_selected() -> None:
    nans = [sign | bits for sign in (0, -(2**31)) for bits in (0x7F800001, 0x7FC00000, 0x7FFFFFFF)]
    row = torch.tensor(nans * 6, dtype=torch.int32).view(torch.float32)
    assert row.isnan().all()
    row[7], row[9] = -INF, -1.0
    check(row[None], 3, SPLIT)
    check(row[None, :CAPACITY], 3, SPLIT)


def test_last_launch_touches_no_row_after_the_last() -> None:
    plan = dataclasses.replace(ALONE, launch_rows=3)
    around = torch.full((7, CAPACITY), -1.0)
    out = torch.full((7, 2), POISON, dtype=torch.int32)
    with launched_by(plan):
        topk_indices(around[:4], 2, out=out[:4])
    assert out.tolist() == [[0, 1]] * 4 + [[POISON, POISON]] * 3


@pytest.mark.once
@pytest.mark.parametrize(
    "rows, length, chunks",
    [(7, 20, [3, 3, 1]), (3, 20, [3]), (2, 64, [1, 1]), (2, 65, [1, 1]), (65, 1, [64, 1])],
)
def test_chunk_on_a_cpu_has_as_many_rows_as_fit_and_one_at_least(
    rows: int, length: int, chunks: list[int]
) -> None:
    chunk = Mock(wraps=topk_cpu._select_chunk)
    with patch.object(topk_cpu, "CHUNK_SCORES", 64), patch.object(topk_cpu, "_select_chunk", chunk):
        topk_indices(torch.zeros(rows, length), 2)
    assert [len(call.args[0]) for call in chunk.call_args_list] == chunks


@pytest.mark.once
@pytest.mark.parametrize("device, mebibytes", [("cpu", 8), ("cuda", 256)])
def test_default_workspace_is_that_of_the_documentation_or_one_row(
    device: str, mebibytes: int
) -> None:
    assert f"{mebibytes} MiB on a {'CPU' if device == 'cpu' else 'GPU'}" in str(select_topk.__doc__)
    for length, size in ((1, mebibytes << 20), (1 << 18, mebibytes << 20), (1 << 28, 1 << 30)):
        got = select_module._check_workspace(None, length, torch.device(device))
        assert got == size


def test_no_key_at_all_needs_no_workspace() -> None:
    none, row = torch.empty(0, 32), torch.zeros(3, dtype=torch.int32)
    scores = torch.ones(3, 2, 32), none, torch.ones(3, 2), row, row
    assert select_topk(*scores, 2, workspace_bytes=0).tolist() == [[-1, -1]] * 3


def test_page_has_64_tokens_and_one_that_is_not_there_is_refused_before_a_row_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LIGHTNING_INDEXER_CHECK", "1")
    case = PagedCase(
        2, 1, 128, 2, 32, 64, ("nominal 4-D", FP8), "drafts", "normal", "contiguous", seed=4
    )
    inputs = case.inputs(hostile=False)
    pages = len(inputs["cache"])
    inputs.pop("page_size")
    inputs["block_table"][:] = pages - 1
    inputs["context_lens"][:] = 128
    out = torch.full((2, 3), POISON, dtype=torch.int32)
    one_row: dict[str, Any] = {"topk": 3, "workspace_bytes": 4 * 128, "out": out}
    assert (paged_select_topk(**inputs, **one_row) >= 0).all()
    out.fill_(POISON)
    inputs["block_table"][1] = pages
    with pytest.raises(ValueError, match=rf"block_table.*{pages}"):
        paged_select_topk(**inputs, **one_row)
    assert (out == POISON).all()


@pytest.mark.once
def test_rows_are_as_long_as_int32_counts_and_a_block_of_8192_no_longer() -> None:
    longest = 2**31 - 8192
    assert topk_indices(torch.empty(0, longest), 3).shape == (0, 3)
    with pytest.raises(ValueError, match=rf"at most {longest} columns, got {longest + 1}$"):
        topk_indices(torch.empty(0, longest + 1), 3)
