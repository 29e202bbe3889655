"""Long rows at the shipped sizes: every way to launch them, and every way a sample can lie."""

from unittest.mock import patch

import pytest
import torch

from lightning_indexer.kernels import topk_kernel
from lightning_indexer.kernels.backend import Target
from lightning_indexer.kernels.topk import topk_indices
from lightning_indexer.kernels.topk_plan import SHORT, TopkPlan, plan_topk
from lightning_indexer.testing import reference
from long_rows import ADVERSARIAL, long_row
from score_rows import in_small_pieces, scores, small_plan

H200 = Target("cuda", 90)
LENGTH = 9001


@pytest.mark.parametrize("k", [1, 300, 2048, 2500, 4500, 8990])
@pytest.mark.parametrize("kind", ADVERSARIAL)
def test_long_rows_are_exact_whatever_the_sample_says(kind: str, k: int) -> None:
    x = long_row(kind, LENGTH, k)
    start = torch.tensor([3])
    assert torch.equal(topk_indices(x, k, start), reference.topk_indices(x, k, start))


@pytest.mark.parametrize("seed", range(16))
def test_every_plan_gives_the_same_indices(seed: int) -> None:
    x = torch.cat([scores(1, 600, regime, seed) for regime in ("normal", "rounded")])
    starts, ends = torch.tensor([0, 3]), torch.tensor([600, 550])
    for k in (9, 300):
        with in_small_pieces(seed=seed):
            got = topk_indices(x, k, starts, ends)
        assert torch.equal(got, reference.topk_indices(x, k, starts, ends)), small_plan(seed)


def test_several_launches_share_their_scratch_without_mixing_rows() -> None:
    x = scores(7, 600, "rounded", seed=3)
    plan = TopkPlan(16, 8, 8, 4, launch_rows=3, splits=1, histogram=True)
    with patch.object(topk_kernel, "plan_topk", lambda *_: plan):
        got = topk_indices(x, 20)
    assert torch.equal(got, reference.topk_indices(x, 20))


@pytest.mark.parametrize("rows", [1, 5])
def test_few_long_rows_are_split_without_changing_an_index(rows: int) -> None:
    plan = plan_topk(H200, 132, rows, 1 << 15)
    assert plan.splits > 1
    x = scores(rows, 1 << 15, "relu", seed=rows)
    with patch.object(topk_kernel, "plan_topk", lambda *_: plan):
        got = topk_indices(x, 500)
    assert torch.equal(got, topk_indices(x, 500))


@pytest.mark.once
@pytest.mark.parametrize(
    "rows, length, splits", [(1, 1 << 15, 2), (64, 1 << 16, 4), (67, 1 << 16, 1), (1, 32767, 1)]
)
def test_rows_are_split_when_there_are_too_few_to_fill_the_device(
    rows: int, length: int, splits: int
) -> None:
    assert plan_topk(H200, 132, rows, length).splits == splits


@pytest.mark.once
@pytest.mark.parametrize("length", [1, 127, SHORT, SHORT + 1, 1 << 16, 1 << 18, 1 << 20, 1 << 30])
@pytest.mark.parametrize("rows", [1, 64, 4096, 100_000])
def test_plan_is_one_that_the_kernels_can_run(rows: int, length: int) -> None:
    for target, warp in ((H200, 32), (Target("hip", "gfx942"), 64)):
        plan = plan_topk(target, 132, rows, length)
        assert plan.threads % warp == 0 and plan.threads <= 512
        assert plan.samples <= plan.capacity < 2 * max(length, 128)
        assert (plan.samples == 0) == (length <= plan.capacity)
        assert 1 <= plan.launch_rows <= rows and (plan.splits == 1 or plan.launch_rows == rows)
        assert plan.scratch(length)[1] * 4 * plan.launch_rows <= max(
            1 << 26, 8 * 132 * (length // 4 + (1 << 17))
        )
