"""How sparse MLA attention is launched: chunks of each row, in groups of rows, then their merge."""

from __future__ import annotations

import math
from typing import Any

import torch

from .backend import Target, on_device_of, target_of, triton
from .score_tile import operand_dtype
from .sparse_mla_kernel import _merge_chunks_kernel, _sparse_mla_attention_kernel
from .sparse_mla_rows import GROUP, split_rows
from .sparse_mla_tiles import attention_tile

#: Bytes of partial results of one pair of launches: about what stays in a GPU's L2 cache.
SCRATCH_BYTES = 1 << 25


def launch(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """Writes out [T, Hq, v_dim] and lse [T, Hq]; uint8 kv holds 656-byte rows."""
    (rows, heads, dim), v_dim, width = q.shape, out.shape[2], indices.shape[1]
    target = target_of(q.device)
    tile = attention_tile(target, q.dtype, kv.dtype, heads, dim, v_dim)
    values, scales, rest = kv[:, :v_dim], None, kv[:, v_dim:]
    if kv.dtype == torch.uint8:
        values, scales, rest = split_rows("kv", kv)
    splits = triton.cdiv(width, tile.chunk)
    tiles = triton.cdiv(heads, tile.block_h)
    group = rows if splits == 1 else scratch_rows(rows, splits, heads, v_dim)
    scratch = _scratch(group, splits, heads, v_dim, q.device) if splits > 1 else (None, None)
    with on_device_of(q):
        for first in range(0, rows, group):
            part = slice(first, first + group)
            count = min(group, rows - first)
            results = (out[part], *out.stride(), lse[part], *lse.stride(), *scratch)
            _sparse_mla_attention_kernel[(count * splits * tiles,)](
                *(q[part], *q.stride()),
                *(values, *values.stride()),
                *((scales, scales.stride(0)) if scales is not None else (None, 0)),
                *(rest, *rest.stride()),
                *(indices[part], *indices.stride()),
                *results,
                *(scale * math.log2(math.e), kv.shape[0], width, splits),
                **kernel_constants(target, q.dtype, kv.dtype, heads, dim, v_dim),
            )
            if splits > 1:
                constants = merge_constants(target, heads, v_dim)
                _merge_chunks_kernel[(count * triton.cdiv(heads, constants["BLOCK_H"]),)](
                    *results,
                    splits,
                    FIXED_SPLITS=splits if target.backend == "interpreter" else None,
                    **constants,
                )


def kernel_constants(
    target: Target, dtype: torch.dtype, kv_dtype: torch.dtype, heads: int, dim: int, v_dim: int
) -> dict[str, Any]:
    """What the first kernel is compiled with."""
    tile = attention_tile(target, dtype, kv_dtype, heads, dim, v_dim)
    constants = {
        "H": heads,
        "V": v_dim,
        "REST": dim - v_dim,
        "GROUP": GROUP,
        "OPERAND": operand_dtype(target, dtype),
        "NATIVE_FP8": target.has_fp8_dot,
        "USE_PTX": target.backend == "cuda",
        # the interpreter of Triton 3.6 cannot loop up to a number computed in the kernel
        "FIXED_KEYS": target.backend == "interpreter",
        "CHUNK": tile.chunk,
        "BLOCK_H": tile.block_h,
        "BLOCK_KEYS": tile.block_keys,
        "SLICE_V": tile.slice_v,
        "SLICE_R": tile.slice_r,
        "HOIST": tile.hoist,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }
    if tile.max_registers is not None and target.backend == "cuda":
        constants["maxnreg"] = tile.max_registers
    return constants


def merge_constants(target: Target, heads: int, v_dim: int) -> dict[str, Any]:
    """What the merging kernel is compiled with."""
    # in the interpreter programs are what costs
    block_h = triton.next_power_of_2(heads) if target.backend == "interpreter" else 1
    block_v = triton.next_power_of_2(v_dim)
    return {"H": heads, "V": v_dim, "BLOCK_H": block_h, "BLOCK_V": block_v, "num_warps": 1}


def scratch_rows(rows: int, splits: int, heads: int, v_dim: int) -> int:
    """Rows whose partial results fit into the scratch, at least one."""
    return max(min(rows, SCRATCH_BYTES // (4 * splits * heads * (v_dim + 2))), 1)


def _scratch(
    rows: int, splits: int, heads: int, v_dim: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    sums = torch.empty((rows, splits, heads, v_dim), dtype=torch.float32, device=device)
    return sums, torch.empty((rows, splits, 2, heads), dtype=torch.float32, device=device)
