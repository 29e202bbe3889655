"""What the CPU's products promise: IEEE fp32, and the bits of a tile however many are scored."""

import pytest
import torch

from lightning_indexer.kernels import products_cpu
from lightning_indexer.kernels.products_cpu import (
    ieee_products,
    score_tiles,
    tile_shape,
    tiles_score_as_one,
)
from scoring import same_bits

pytestmark = pytest.mark.once

MATMUL = torch.backends.mkldnn.matmul
SMALL, LARGE = (4, 32), (64, 128)  # by mm, by oneDNN where there is one


@pytest.fixture
def lowered_precision():
    before = MATMUL.fp32_precision
    torch.set_float32_matmul_precision("medium")
    yield
    torch.set_float32_matmul_precision("highest")
    MATMUL.fp32_precision = before


@pytest.fixture
def no_inner_product(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(products_cpu, "has_inner_product", lambda: False)
    tiles_score_as_one.cache_clear()
    yield
    tiles_score_as_one.cache_clear()


def tile(heads: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(heads)
    rows, width = tile_shape(heads, head_dim)
    queries = torch.randn(rows, heads, head_dim, generator=g)
    weights = torch.randn(rows, 1, heads, generator=g)
    return queries, weights, torch.randn(width, head_dim, generator=g)


def scores(
    queries: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor
) -> torch.Tensor:  # [rows, keys]
    out = torch.empty(queries.shape[0], 1, keys.shape[0])
    score_tiles(queries, weights, keys, out)
    return out[:, 0]


def assert_is_the_formula(queries: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor) -> None:
    dots = torch.einsum("thd,ld->thl", queries.double(), keys.double()).relu_()
    exact = torch.einsum("thl,th->tl", dots, weights[:, 0].double())
    # fp32 loses some 1e-5 here, bf16 some 1e-1
    assert (scores(queries, weights, keys) - exact).abs().max() < 1e-3


@pytest.mark.parametrize("sizes", [SMALL, LARGE])
def test_tile_is_the_formula_in_fp32_whatever_is_allowed(sizes, lowered_precision) -> None:
    assert_is_the_formula(*tile(*sizes))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_is_the_formula(*tile(*sizes))


def test_tile_is_the_formula_without_onednn(no_inner_product) -> None:
    assert_is_the_formula(*tile(*LARGE))
    assert isinstance(tiles_score_as_one(*LARGE, 4, 1), bool)


@pytest.mark.parametrize("sizes", [SMALL, LARGE])
def test_nan_passes_the_relu(sizes) -> None:
    queries, weights, keys = tile(*sizes)
    keys[5, 3] = float("nan")
    got = scores(queries, weights, keys)
    assert got[:, 5].isnan().all() and got.isnan().sum() == got.shape[0]


@pytest.mark.parametrize("sizes", [SMALL, LARGE])
def test_trial_tells_machines_that_multiply_by_shape(sizes, monkeypatch) -> None:
    """A difference at one place, in a product of several tiles alone, fails the trial."""
    product = products_cpu._relu_products

    def by_shape(queries: torch.Tensor, keys: torch.Tensor, no_nan: bool) -> torch.Tensor:
        dots = product(queries, keys, no_nan)
        rows = tile_shape(*sizes)[0] * sizes[0]
        if queries.shape[0] > rows:
            dots[rows, 7] = dots[rows, 7].abs() + 1
        return dots

    tiles_score_as_one.cache_clear()
    monkeypatch.setattr(products_cpu, "_relu_products", by_shape)
    assert not tiles_score_as_one(*sizes, 3, torch.get_num_threads())
    tiles_score_as_one.cache_clear()


@pytest.mark.parametrize("tiles", [2, 5, 64])
@pytest.mark.parametrize("sizes", [SMALL, LARGE])
def test_trial_that_passes_holds_for_other_values(sizes, tiles: int) -> None:
    if not tiles_score_as_one(*sizes, tiles, torch.get_num_threads()):
        pytest.skip("this machine's products depend on their shape")
    queries, weights, keys = tile(*sizes)
    many = torch.cat([queries * 2.0**-i for i in range(tiles)])  # exact: only exponents differ
    got = scores(many, weights.repeat(tiles, 1, 1), keys).view(tiles, -1)
    one = scores(queries, weights, keys).flatten()
    assert all(same_bits(got[i], one * 2.0**-i) for i in range(tiles))


def test_trial_leaves_the_random_state_alone() -> None:
    tiles_score_as_one.cache_clear()
    before = torch.random.get_rng_state()
    tiles_score_as_one(*SMALL, 2, 1)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_products_are_ieee_fp32_although_lower_precision_is_allowed(lowered_precision):
    assert MATMUL.fp32_precision == "bf16"
    with ieee_products():
        assert MATMUL.fp32_precision == "ieee"
    assert MATMUL.fp32_precision == "bf16"


def test_the_setting_is_put_back_after_an_error(lowered_precision):
    with pytest.raises(RuntimeError), ieee_products():
        raise RuntimeError
    assert MATMUL.fp32_precision == "bf16"
