"""Tiles of scores on a CPU: products of one shape per (H, D), so that their bits never vary.

The bits of a BLAS product depend on its shape. Each query tile and key tile is multiplied in one
fixed shape, partial tiles zero-padded: [rows·H, D] × [D, keys]. A product of many query tiles is
faster; it is taken where a trial on this machine shows that it gives the bits of the tiles.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

#: A product of fewer rows is slow, and of three or fewer another kernel of other bits (gemv).
MIN_PRODUCT_ROWS = 64
#: Query tiles of no more values meet few keys at a time: small models have short contexts to pad.
SMALL_TILE = 64 * 64
FEW_KEYS, MANY_KEYS = 256, 512


@contextmanager
def ieee_products() -> Iterator[None]:
    """fp32 products stay fp32, although `set_float32_matmul_precision` may allow bf16."""
    matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]  # a property at run time
    asked = matmul.fp32_precision
    if asked in ("none", "ieee"):
        yield
        return
    matmul.fp32_precision = "ieee"
    try:
        yield
    finally:
        matmul.fp32_precision = asked


def tile_shape(heads: int, head_dim: int) -> tuple[int, int]:
    """Rows and keys of a tile; nothing else may choose them."""
    rows = -(-MIN_PRODUCT_ROWS // heads)
    return rows, MANY_KEYS if rows * heads * head_dim > SMALL_TILE else FEW_KEYS


def score_tiles(
    queries: torch.Tensor,
    weights: torch.Tensor,
    keys: torch.Tensor,
    scores: torch.Tensor,
    *,
    no_nan: bool = False,
) -> None:
    """scores[t,0,s] ← Σ_h weights[t,0,h]·relu(queries[t,h]·keys[s]), all fp32 and contiguous.

    `keys` may be packed. `no_nan`: no queries·keys can be NaN, which saves a pass over them.
    """
    rows, heads, head_dim = queries.shape
    with ieee_products():
        dots = _relu_products(queries.view(rows * heads, head_dim), keys, no_nan)
        torch.bmm(weights, dots.view(rows, heads, -1), out=scores)


def pack_keys(keys: torch.Tensor, heads: int, rows: int) -> torch.Tensor:
    """Keys for products with so many query rows, laid out once as each would have to anew."""
    if keys.shape[0] == MANY_KEYS and has_inner_product():
        return torch.ops.mkldnn._reorder_linear_weight(keys, rows * heads)
    return keys


@cache
def tiles_score_as_one(heads: int, head_dim: int, tiles: int, threads: int) -> bool:
    """Whether `tiles` tiles at once, of packed keys, have the bits that each has alone.

    A trial, once per argument: BLAS libraries choose their kernels by shape, machine and threads.
    """
    rows, width = tile_shape(heads, head_dim)
    generator = torch.Generator("cpu").manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")

    queries = normal(tiles * rows, heads, head_dim)
    queries[-1].zero_()  # a zero's sign is a bit too
    weights, keys = normal(tiles * rows, 1, heads), normal(width, head_dim)
    at_once, alone = normal(tiles * rows, 1, width), normal(tiles * rows, 1, width)
    for i in range(0, tiles * rows, rows):
        tile = slice(i, i + rows)
        score_tiles(queries[tile], weights[tile], keys, alone[tile])
    packed = pack_keys(keys, heads, tiles * rows)
    for no_nan in (False, True):
        score_tiles(queries, weights, packed, at_once, no_nan=no_nan)
        if not torch.equal(at_once.view(torch.int32), alone.view(torch.int32)):
            return False
    return True


def _relu_products(queries: torch.Tensor, keys: torch.Tensor, no_nan: bool) -> torch.Tensor:
    """relu(queries·keysᵀ), [M, D] × [W, D] → [M, W]; relu(NaN) is NaN."""
    if keys.shape[0] == MANY_KEYS and has_inner_product():
        relu = "relu" if no_nan else "none"  # oneDNN's turns NaN into 0
        dots = torch.ops.mkldnn._linear_pointwise(queries, keys, None, relu, [], "")
        return dots if no_nan else dots.relu_()
    # autocast would make mm and bmm round to bf16, but lets out= be
    dots = queries.new_empty(queries.shape[0], keys.shape[0])
    return torch.mm(queries, keys.t(), out=dots).relu_()


@cache
def has_inner_product() -> bool:
    """Whether this torch has oneDNN's fp32 product for x86, twice as fast as MKL's on AMD."""
    return (
        torch.backends.cpu.get_cpu_capability().startswith("AVX")
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )
