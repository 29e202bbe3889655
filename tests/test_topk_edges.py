"""`topk_indices` at the edges of its lists, tiles, launches and scratch, in small pieces."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch

from lightning_indexer.kernels import topk_kernel
from lightning_indexer.kernels.topk import topk_indices
from lightning_indexer.kernels.topk_plan import TopkPlan

LENGTH = 520
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
    CAPACITY: [(CAPACITY, 1), (CAPACITY + 1, 1), (CAPACITY - 1, CAPACITY + 1), (0, CAPACITY)],
    100: [(100, 17), (101, 1), (100 - CAPACITY, 17), (30, 70), (84, 400)],
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
@pytest.mark.parametrize("length", [1, CAPACITY, CAPACITY + 1, 33, 257])
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
    place = torch.arange(LENGTH, dtype=torch.float32)
    x = EXTREMES[kind](shuffled(place, 1))[None]
    check(x, 9, ALONE)
    check(x[:, :300], 200, SPLIT)


@pytest.mark.parametrize("k", [1, CAPACITY // 2])
def test_short_row_of_least_and_greatest_numbers_needs_no_scratch(k: int) -> None:
    plan = TopkPlan(CAPACITY, 0, 8, 0, launch_rows=2, splits=1, histogram=True)
    row = torch.tensor([NAN, -INF, -LARGEST, -LARGEST, LARGEST, INF, -0.0, 0.0, -SUBNORMAL])
    check(torch.stack([row, torch.full_like(row, -INF)]), k, plan)
