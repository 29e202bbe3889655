"""Score rows that a selection meets, and our own kernels cut into small pieces for them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import torch

from lightning_indexer.kernels import topk_cpu, topk_kernel
from lightning_indexer.kernels.topk_plan import TopkPlan
from lightning_indexer.testing.cases import TopkCase as RowsCase
from lightning_indexer.testing.contracts import TopkContract
from lightning_indexer.testing.regimes import INF, NAN, SCORE_REGIMES, score_rows
from lightning_indexer.testing.strategies import topk_cases

__all__ = [
    "INF",
    "NAN",
    "REGIMES",
    "RowsCase",
    "in_small_pieces",
    "row_cases",
    "scores",
    "small_plan",
]
REGIMES = tuple(SCORE_REGIMES)
row_cases = topk_cases(TopkContract(empty_sizes=False))


def scores(rows: int, length: int, regime: str, seed: int) -> torch.Tensor:
    """[rows, length] fp32."""
    return score_rows(regime, rows, length, length // 2, torch.float32, seed)


def small_plan(seed: int) -> TopkPlan:
    """One of the ways to launch the kernels, with lists and tiles that short rows outgrow."""
    return TopkPlan(
        capacity=(16, 64)[seed // 8 % 2],
        samples=(8, 16)[seed // 4 % 2],
        threads=8,  # tiles of 256 scores
        pop_words=(8, 32)[seed // 4 % 2],
        launch_rows=1,
        splits=(1, 3)[seed // 2 % 2],
        histogram=bool(seed % 2),
    )


@contextmanager
def in_small_pieces(enabled: bool = True, seed: int = 0) -> Iterator[None]:
    """Small chunks, tiles and lists, so that short rows take the paths of long ones."""
    if not enabled:
        yield
        return

    def plan(_target: object, _multiprocessors: int, rows: int, _length: int) -> TopkPlan:
        small = small_plan(seed)
        return small if small.splits == 1 else replace(small, launch_rows=rows)

    with (
        patch.object(topk_cpu, "CHUNK_SCORES", 64),
        patch.object(topk_kernel, "plan_topk", plan),
    ):
        yield
