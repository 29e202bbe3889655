"""Launch tables of sparse MLA attention: plain Python, from architecture, dtypes, Hq and dims.

Neither T nor timing picks a tile or a chunk: both fix the order of a row's sums, and so its bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from .backend import Target, triton


@dataclass(frozen=True)
class AttentionTile:
    """What a program holds: `block_h` heads of one row, against `block_keys` selected rows a step.

    Columns come in slices of `slice_v`, which is the width of a product; a program takes `chunk`
    of a row's indices, and partial results of several chunks are merged in order.
    """

    block_h: int
    block_keys: int
    slice_v: int
    slice_r: int
    num_warps: int
    num_stages: int
    chunk: int
    hoist: bool = False


@cache
def attention_tile(
    target: Target, dtype: torch.dtype, kv_dtype: torch.dtype, heads: int, dim: int, v_dim: int
) -> AttentionTile:
    """The tile for queries and rows of these dtypes (uint8: 656-byte rows)."""
    wide_v, wide_r = _padded(v_dim), _padded(dim - v_dim)
    if target.backend == "interpreter":  # where programs are what costs
        return AttentionTile(max(16, triton.next_power_of_2(heads)), 32, min(wide_v, 128), min(wide_r, 64), 4, 1, 64)
    return AttentionTile(16, 64, min(wide_v, 128), min(wide_r, 64), 8, 2, 512)


def _padded(columns: int) -> int:
    """The least width of an operand with so many columns."""
    return max(16, triton.next_power_of_2(columns))
