"""What the CPU scorer promises beyond the ops' own tests: the bits of its ways to go about it."""

import dataclasses
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from counting import BATCHES, counts_examples, tallies
from lightning_indexer.kernels import score_cpu
from lightning_indexer.kernels.mqa_logits import mqa_logits
from lightning_indexer.kernels.select_topk import select_topk
from scoring import ScoreCase, same_bits, score_cases, share

pytestmark = pytest.mark.once

#: 70 rows of one tile each: two whole groups of 32, and a third that is mostly empty.
LARGE = ScoreCase(70, 600, 64, 128, "fp32", True, "normal", "causal", "contiguous", seed=7)


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def tile_by_tile(inputs: dict) -> torch.Tensor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(score_cpu, "tiles_score_as_one", lambda *_: False)
        return mqa_logits(**inputs)


@share(4)
@given(case=score_cases, group=st.integers(1, 5), loaded=st.integers(1, 3))
@counts_examples("mqa_logits")
@tallies(BATCHES, "mqa_logits")
def test_groups_give_the_bits_of_single_tiles(case: ScoreCase, group: int, loaded: int) -> None:
    inputs = case.inputs()
    alone = tile_by_tile(inputs)
    assert same_bits(mqa_logits(**inputs), alone)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(score_cpu, "GROUP", group)
        patch.setattr(score_cpu, "LOADED_TILES", loaded)
        assert same_bits(mqa_logits(**inputs), alone)


@pytest.mark.parametrize("windows", ["full", "causal", "packed", "any"])
def test_large_groups_give_the_bits_of_single_tiles(windows: str) -> None:
    inputs = dataclasses.replace(LARGE, windows=windows).inputs()
    assert same_bits(mqa_logits(**inputs), tile_by_tile(inputs))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_nan_in_one_head_reaches_the_scores_of_large_groups(value: float) -> None:
    inputs = dataclasses.replace(LARGE, windows="full").inputs()
    inputs["k"][5, :2] = value
    inputs["q"][11, :, :2] = -torch.tensor(value).sign().nan_to_num(1)  # their products are −inf
    inputs["q"][11, 3, :2] = torch.tensor([1, -1])  # but in head 3: inf − inf
    got = mqa_logits(**inputs)
    assert got[11, 5].isnan()
    assert same_bits(got, tile_by_tile(inputs))


def test_bits_and_selection_do_not_depend_on_threads(two_threads) -> None:
    inputs = LARGE.inputs()
    scores, selected = mqa_logits(**inputs), select_topk(**inputs, topk=50)
    torch.set_num_threads(1)
    assert same_bits(mqa_logits(**inputs), scores)
    assert torch.equal(select_topk(**inputs, topk=50, workspace_bytes=4 * 600 * 7), selected)


def test_rows_that_share_no_key_tile_with_their_group_are_untouched() -> None:
    """Half of a group is scored at once with rows that see none of those keys."""
    inputs = dataclasses.replace(LARGE, rows=4, length=1500, windows="full").inputs()
    inputs["row_starts"] = torch.tensor([0, 0, 0, 1400], dtype=torch.int32)
    inputs["row_ends"] = torch.tensor([700, 690, 20, 1500], dtype=torch.int32)
    got = mqa_logits(**inputs)
    assert same_bits(got, tile_by_tile(inputs))
    positions = torch.arange(1500)
    for t, (start, end) in enumerate(zip([0, 0, 0, 1400], [700, 690, 20, 1500], strict=True)):
        seen = (positions >= start) & (positions < end)
        assert torch.equal(got[t] > -torch.inf, seen)
