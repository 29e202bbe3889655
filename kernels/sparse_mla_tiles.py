"""Launch tables of sparse MLA attention: plain Python, from architecture, dtypes, Hq and dims.

Neither T nor timing picks a tile or a chunk: both fix the order of a row's sums, and so its bits.

Floors at B=64, Hq=128, W=2048, 576/512 columns, on an H200: 37 µs of tensor cores, and 22 (656-byte
rows) or 35 µs (bf16) of memory. A tile of 64 heads reads a selected row twice, one of 16 eight
times, mostly from L2. What a tile costs in registers and instructions is in docs/kernels.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch

from .backend import Target, triton

#: NVIDIA GPUs with 99 KiB of shared memory for a program.
SMALL = (86, 89, 120, 121)


@dataclass(frozen=True)
class AttentionTile:
    """What a program holds: `block_h` heads of one row, against `block_keys` selected rows a step.

    Columns come in slices, `slice_v` of values and `slice_r` of the rest, each a product of its
    own. A program takes `chunk` of a row's indices. `hoist`: whether the compiler may compute
    addresses ahead of the loop, and keep them in registers.
    """

    block_h: int
    block_keys: int
    slice_v: int
    num_warps: int
    num_stages: int
    hoist: bool = True
    slice_r: int = 64
    chunk: int = 512
    #: NVIDIA's compiler aims at round numbers of programs, and may spill a little to get there.
    max_registers: int | None = None


@cache
def attention_tile(
    target: Target, dtype: torch.dtype, kv_dtype: torch.dtype, heads: int, dim: int, v_dim: int
) -> AttentionTile:
    """The tile for queries and rows of these dtypes (uint8: 656-byte rows)."""
    if target.backend == "interpreter":  # programs are what costs
        tile = AttentionTile(max(16, _padded(heads)), 32, 128, 4, 1, chunk=64)
    elif dtype == torch.float32:
        tile = _ieee_tile(target)
    else:
        tile = _tensor_core_tile(target, kv_dtype == torch.uint8, heads)
        # one program of more than 16 heads fills a multiprocessor's shared memory
        limit = 255 if heads > 16 else None
        # a partial result is then no more than half as large as the bf16 rows that it is of
        tile = replace(tile, chunk=512 if heads > 64 else 256, max_registers=limit)
    return replace(
        tile,
        slice_v=min(tile.slice_v, _padded(v_dim)),
        slice_r=min(tile.slice_r, _padded(dim - v_dim)),
    )


def _ieee_tile(target: Target) -> AttentionTile:
    """fp32: multiply-adds on NVIDIA, MFMA in fp32 on AMD."""
    if target.backend == "hip":
        return AttentionTile(16, 16, 64, 4, 1)
    return AttentionTile(16, 16 if target.arch in SMALL else 32, 64, 8, 2, max_registers=255)


def _tensor_core_tile(target: Target, fp8: bool, heads: int) -> AttentionTile:
    """Operands of two bytes; `fp8` rows are decoded to them, which takes registers."""
    block_h = 16 if heads <= 16 else 32
    if target.backend == "hip":
        # one stage: two do not fit into 64 KiB, and spill
        return AttentionTile(block_h, 32, 128, 4, 1)
    if heads > 32 and target.arch in (90, 100):
        return _warp_group_tile(target, fp8)
    if target.arch in SMALL and (target.has_fp8_dot or not fp8):
        return AttentionTile(block_h, 32, 128 if fp8 else 64, 4 if block_h == 16 else 8, 2)
    if fp8:
        keys = 64 if target.has_fp8_dot else 32
        return AttentionTile(block_h, keys, 128, 8, 2)
    return AttentionTile(block_h, 64, 64, 4 if block_h == 16 else 8, 2)


def _warp_group_tile(target: Target, fp8: bool) -> AttentionTile:
    """64 heads: the rows of wgmma and tcgen05, which take queries from shared memory.

    128 registers of a thread hold sums on sm_90. Left free to, the compiler keeps the address of
    every 16 columns of the queries in the others, and spills.
    """
    if target.arch == 90:
        return AttentionTile(64, 64, 128 if fp8 else 64, 8, 2, hoist=False)
    # several accumulators do not fit into tensor memory; Triton 3.6 keeps three times the rows that
    # 3.9 does, and two stages of 64 of them do not fit into shared memory
    if fp8:
        return AttentionTile(64, 64, 512, 8, 1, hoist=False)
    return AttentionTile(64, 32, 512, 8, 2)


def _padded(columns: int) -> int:
    """The least width of an operand with so many columns."""
    return max(16, triton.next_power_of_2(columns))
