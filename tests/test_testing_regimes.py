"""Regimes have the properties that their names promise."""

import math

import pytest
import torch

from lightning_indexer.testing.layouts import bits_of
from lightning_indexer.testing.regimes import (
    FP8,
    NAN_SCORES,
    NEG_INF_SCORES,
    POS_INF_SCORES,
    SCORE_REGIMES,
    SPECIAL_VALUES,
    VALUE_REGIMES,
    score_rows,
    values,
)

pytestmark = pytest.mark.once

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
K = 50


def rows_of(regime: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return score_rows(regime, 3, 400, K, dtype, seed=1)


def has(x: torch.Tensor, test) -> bool:
    return bool(test(x.float()).any())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("regime", SCORE_REGIMES)
def test_special_scores_come_in_the_regimes_listed_for_them(
    regime: str, dtype: torch.dtype
) -> None:
    x = rows_of(regime, dtype)
    assert x.shape == (3, 400) and x.dtype == dtype
    assert has(x, torch.isnan) == (regime in NAN_SCORES)
    assert has(x, torch.isneginf) == (regime in NEG_INF_SCORES)
    assert has(x, torch.isposinf) == (regime in POS_INF_SCORES)
    assert score_rows(regime, 0, 5, 3, dtype, 0).shape == (0, 5)
    assert score_rows(regime, 2, 0, 3, dtype, 0).shape == (2, 0)
    assert torch.equal(bits_of(x), bits_of(rows_of(regime, dtype)))  # by the seed alone


@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_near_the_kth_are_one_ulp_apart(dtype: torch.dtype) -> None:
    for row in rows_of("ulp apart", dtype):
        ranked = row.sort(descending=True).values
        assert (ranked[: K // 2] > 1.9 * ranked[-1]).all()
        near = ranked[K // 2 :]
        assert near[K // 2] in near.unique() and len(near.unique()) == 3
        steps = bits_of(near.unique()).long().diff()
        assert steps.tolist() == [1, 1]


def test_other_regimes_are_as_they_are_named() -> None:
    assert len(rows_of("rounded")[0].unique()) < 10
    assert (rows_of("all equal") == rows_of("all equal")[:, :1]).all()
    assert (rows_of("ascending").diff(dim=1) >= 0).all()
    assert (rows_of("descending").diff(dim=1) <= 0).all()
    assert ((rows_of("spikes") > 0).sum(1) == 1).all()
    relu = rows_of("relu")
    zeros = relu[relu == 0]
    assert 0.7 < len(zeros) / relu.numel() < 0.8
    assert {math.copysign(1, z) for z in zeros.tolist()} == {1.0, -1.0}
    close = rows_of("close")
    assert ((close >= 1) & (close < 1.0001)).all() and len(close.unique()) > 20
    nan = rows_of("nan")
    signs = {math.copysign(1, v) for v in nan[nan.isnan()].tolist()}
    assert signs == {1.0, -1.0}
    nothing = rows_of("nothing")
    assert (nothing.isnan() | nothing.isneginf()).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_subnormal_scores_are_subnormal(dtype: torch.dtype) -> None:
    x = rows_of("subnormal", dtype)
    below = x.abs() < torch.finfo(dtype).tiny
    assert below.float().mean() > 0.99 and (x != 0).float().mean() > 0.9


@pytest.mark.parametrize("dtype", [*DTYPES, FP8])
@pytest.mark.parametrize("regime", VALUE_REGIMES)
def test_operands_are_finite_but_for_the_special_regimes(regime: str, dtype: torch.dtype) -> None:
    x = values((40, 50), dtype, regime, torch.Generator().manual_seed(2))
    assert x.dtype == dtype and x.shape == (40, 50)
    special = regime in SPECIAL_VALUES and not (regime == "infinite" and dtype == FP8)
    assert bool(x.float().isfinite().all()) != special
    assert special or float(x.float().abs().max()) <= 448


def test_operands_are_as_their_regimes_are_named() -> None:
    def drawn(regime: str, dtype: torch.dtype) -> torch.Tensor:
        return values((40, 50), dtype, regime, torch.Generator().manual_seed(3)).float()

    assert set(drawn("ties", FP8).unique().tolist()) == {-1.0, 0.0, 1.0}
    assert drawn("fp8 extremes", FP8).unique().tolist() == [-448, -(2**-9), 0, 2**-9, 448]
    assert (drawn("subnormal", FP8).abs() < 2**-6).all()
    assert (drawn("subnormal", FP8) != 0).any()
    assert 0.05 < (drawn("spikes", torch.float16) != 0).float().mean() < 0.15
    zeros = drawn("signed zeros", torch.bfloat16)
    assert {math.copysign(1, z) for z in zeros[zeros == 0].tolist()} == {1.0, -1.0}
    spread = drawn("spread", torch.float32).abs()
    assert spread.max() / spread[spread > 0].min() > 1e5
