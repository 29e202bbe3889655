"""Launch tables, in plain Python: tiles follow from architecture, dtype, H and D alone.

Timing never picks a tile, nor does T, L or the batch, because a tile fixes the order in which a
score is summed, and with it the score's bits. What the entries cost, and what was tried beside
them, is in docs/kernels.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from .backend import Target


@dataclass(frozen=True)
class ScoreConfig:
    """The tile of `mqa_logits` and `paged_mqa_logits`.

    A program holds `block_keys` keys and scores them for up to `block_rows` query rows. Heads are
    multiplied `dot_heads` at a time, and a key's products are added into `sums` partial sums.
    """

    block_keys: int
    block_rows: int
    block_h: int
    dot_heads: int
    sums: int
    chunk_d: int
    num_warps: int
    num_stages: int = 2
    #: NVIDIA's compiler aims at round numbers of programs, and may spill a little to get there.
    max_registers: int | None = None


@dataclass(frozen=True)
class _Tile:
    """What operands on tensor cores decide, at H=64 and D=128."""

    keys: int
    rows: int
    dot_heads: int
    sums: int
    warps: int
    max_registers: int | None = None


@cache
def score_config(
    target: Target, dtype: torch.dtype, key_dtype: torch.dtype, heads: int, head_dim: int
) -> ScoreConfig:
    """The tile for queries and keys of these dtypes (uint8: e4m3fn)."""
    block_h = max(16, _power_of_2(heads))
    wide = max(32, _power_of_2(head_dim))  # 32: the K of an fp8 tensor instruction
    if target.backend == "interpreter":
        # programs and slices are what costs; wide fp32 keys still come in slices, as on a GPU
        chunk_d = min(wide, 64) if dtype == torch.float32 else wide
        return ScoreConfig(128, 4, block_h, block_h, block_h // 2, chunk_d, 4)
    if dtype == torch.float32:
        # without tensor cores a thread holds whole operand rows, so D is read in slices
        return ScoreConfig(64, 16, block_h, block_h, block_h // 2, 16, 4, max_registers=255)
    fnuz = dtype == torch.uint8 and target.arch == "gfx942"
    as_it_is = dtype == torch.uint8 and target.has_fp8_dot
    tile = _tensor_core_tile(target, one_byte=fnuz or as_it_is)
    keys, warps = tile.keys, tile.warps
    if key_dtype == torch.uint8 and not (fnuz or as_it_is):
        keys = min(keys, 32 * warps)  # decoding keys takes registers of its own
    keys = keys * 64 // max(64, block_h) * 128 // max(128, wide)
    if target.arch in (90, 100):
        keys = max(keys, 16 * warps)  # what wgmma and tcgen05 take
    return ScoreConfig(
        block_keys=keys,
        block_rows=tile.rows,
        block_h=block_h,
        dot_heads=min(tile.dot_heads, block_h),
        sums=min(tile.sums, block_h // 2),
        chunk_d=wide,
        num_warps=warps,
        max_registers=tile.max_registers,
    )


def _tensor_core_tile(target: Target, one_byte: bool) -> _Tile:
    """The tile for operands of one byte or two.

    256 keys and 16 rows read 40 bytes of fp8 a score; 16 rows are all drafts of a request.
    """
    if target.backend == "hip":
        if one_byte:  # encoding 256 keys costs as much as scoring 5 rows
            return _Tile(256, 32, 64, 8, 4)
        # 32 KiB of the 64 that a compute unit has: two programs
        return _Tile(128, 16, 64, 8, 4)
    if target.arch == 90:
        # 8 sums: those that one thread's columns of wgmma belong to. Two-byte queries take
        # addresses that 4 warps have no registers for.
        return _Tile(256, 16, 64, 8, 4 if one_byte else 8)
    if target.arch == 100:
        # 2 sums: a thread has all heads of a key, and packs two additions
        return _Tile(256, 16, 64, 2, 4 if one_byte else 8)
    # mma.sync: 32 heads at a time, so that all warps lie along the keys and no sum crosses them
    if one_byte:
        return _Tile(256, 16, 32, 8, 8, max_registers=255)
    return _Tile(128, 16, 32, 16, 4)  # three programs of 168 registers


def _power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()
