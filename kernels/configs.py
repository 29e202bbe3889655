"""Launch tables, in plain Python: tiles follow from architecture, dtype, H and D alone.

Timing never picks a tile, nor does T, L or the batch, because a tile fixes the order in which a
score is summed, and with it the score's bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from .backend import Target


@dataclass(frozen=True)
class ScoreConfig:
    """The tile of `mqa_logits` and `paged_mqa_logits`."""

    block_keys: int
    block_rows: int
    block_h: int
    chunk_d: int
    num_warps: int
    num_stages: int


#: Keys of a tile by the size block_h·chunk_d of a query operand, the widest that no dtype spills.
_KEYS_IN_SHARED_MEMORY = {8192: 128, 16384: 128, 32768: 64}  # wgmma, tcgen05 read operands there
_KEYS_IN_REGISTERS = {8192: 128, 16384: 64, 32768: 32}


@cache
def score_config(target: Target, dtype: torch.dtype, heads: int, head_dim: int) -> ScoreConfig:
    """The tile for queries of `dtype` (uint8: e4m3fn)."""
    block_h = max(16, _power_of_2(heads))
    block_rows = 8  # one read of the keys serves 8 rows, and 8 drafts of a request
    if target.backend == "interpreter":
        # programs and slices are what costs; wide fp32 keys still come in slices, as on a GPU
        block_rows, block_keys, chunk_d = 4, 128, max(32, _power_of_2(head_dim))
        if dtype == torch.float32:
            chunk_d = min(chunk_d, 64)
    elif dtype == torch.float32:
        # without tensor cores a thread holds whole operand rows, so D is read in slices
        block_keys, chunk_d = 64, 16
    else:
        chunk_d = max(32, _power_of_2(head_dim))  # 32: the K of an fp8 tensor instruction
        shared = target.backend == "cuda" and target.arch in (90, 100)
        table = _KEYS_IN_SHARED_MEMORY if shared else _KEYS_IN_REGISTERS
        block_keys = table[max(8192, block_h * chunk_d)]
        if dtype == torch.uint8 and not target.has_fp8_dot and block_h * chunk_d > 8192:
            block_keys //= 2  # decoding bytes takes registers of its own
    return ScoreConfig(
        block_keys=block_keys,
        block_rows=block_rows,
        block_h=block_h,
        chunk_d=chunk_d,
        num_warps=4,
        num_stages=2,
    )


def _power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()
