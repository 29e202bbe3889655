"""What ragged and paged scoring share on the device, so that their scores agree bit for bit.

A program holds one tile of keys and scores it for several query rows. The product is
dot(K, Qᵀ): the sum over heads then stays within a thread, and costs a few shuffles where
dot(Q, Kᵀ) costs hundreds.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from .backend import Target, tl, triton
from .configs import score_config
from .e4m3 import e4m3_to_fp16


@cache
def tile_constants(target: Target, dtype: torch.dtype, heads: int, head_dim: int) -> dict[str, Any]:
    """What both kernels are compiled with for queries of `dtype` (uint8: e4m3fn)."""
    config = score_config(target, dtype, heads, head_dim)
    return {
        "H": heads,
        "D": head_dim,
        "OPERAND": _operand_dtype(target, dtype),
        "BLOCK_H": config.block_h,
        "CHUNK_D": config.chunk_d,
        "BLOCK_KEYS": config.block_keys,
        "BLOCK_ROWS": config.block_rows,
        # the interpreter of Triton 3.6 cannot loop up to a number computed in the kernel
        "FIXED_ROWS": target.backend == "interpreter",
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }


def _operand_dtype(target: Target, dtype: torch.dtype) -> Any:
    """The Triton type in which queries and keys are multiplied.

    Exact wherever it differs from `dtype`: fp16 holds every e4m3fn value, fp32 every other one.
    """
    if target.backend == "interpreter" or dtype == torch.float32:
        return tl.float32  # the interpreter multiplies the bit patterns of bf16
    if dtype == torch.uint8:
        return tl.float8e4nv if target.has_fp8_dot else tl.float16
    return tl.bfloat16 if dtype == torch.bfloat16 else tl.float16


@triton.jit
def as_operand(x, OPERAND: tl.constexpr):
    """Loaded values, exactly, as dot operands; uint8 holds e4m3fn."""
    if x.dtype == tl.uint8:
        if tl.float8e4nv == OPERAND:
            operand = x.to(tl.float8e4nv, bitcast=True)
        else:
            operand = e4m3_to_fp16(x).to(OPERAND)
    elif x.dtype == tl.bfloat16 and tl.float32 == OPERAND:
        # by bits: the interpreter's own cast loses subnormals
        bits = x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
        operand = bits.to(tl.float32, bitcast=True)
    else:
        operand = x.to(OPERAND)
    return operand


@triton.jit
def load_keys(
    key_ptrs,  # [BLOCK_KEYS], each key's first element
    stride_kd,
    mask_keys,
    first_d,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    OPERAND: tl.constexpr,
):
    """Dimensions [first_d, first_d + WIDTH) of a tile of keys: [BLOCK_KEYS, WIDTH] operands."""
    offs_d = first_d + tl.arange(0, WIDTH)
    mask = mask_keys[:, None] & (offs_d < D)[None, :]
    k = tl.load(key_ptrs[:, None] + offs_d[None, :] * stride_kd, mask=mask, other=0)
    return as_operand(k, OPERAND)


@triton.jit
def score_row(
    keys,  # [BLOCK_KEYS, CHUNK_D] operands; unused if D is read in several chunks
    key_ptrs,  # [BLOCK_KEYS], each key's first element
    stride_kd,
    mask_keys,
    q_ptr,  # the row's first query element
    stride_qh,
    stride_qd,
    w_ptr,  # the row's first weight
    stride_wh,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    CHUNK_D: tl.constexpr,
    OPERAND: tl.constexpr,
):
    """Σ_h weights[h]·relu(q[h]·k) for each key of the tile: [BLOCK_KEYS] fp32, unscaled."""
    offs_h = tl.arange(0, BLOCK_H)
    offs_d = tl.arange(0, CHUNK_D)
    mask_h = offs_h < H
    q_ptrs = q_ptr + offs_h.to(tl.int64)[:, None] * stride_qh + offs_d[None, :] * stride_qd
    dots = tl.zeros((key_ptrs.shape[0], BLOCK_H), tl.float32)
    for first_d in tl.range(0, D, CHUNK_D, num_stages=1):
        mask_q = mask_h[:, None] & (first_d + offs_d < D)[None, :]
        q = tl.load(q_ptrs + first_d * stride_qd, mask=mask_q, other=0)  # [BLOCK_H, CHUNK_D]
        if CHUNK_D >= D:
            k = keys
        else:
            k = load_keys(key_ptrs, stride_kd, mask_keys, first_d, D, CHUNK_D, OPERAND)
        q = as_operand(q, OPERAND)
        dots = tl.dot(k, tl.trans(q), acc=dots, input_precision="ieee")
    relu = tl.maximum(dots, 0.0, propagate_nan=tl.PropagateNan.ALL)
    weights = tl.load(w_ptr + offs_h.to(tl.int64) * stride_wh, mask=mask_h, other=0.0)
    weighted = relu * weights[None, :]
    if BLOCK_H != H:  # an infinite key times a padding head's zeros would be NaN
        weighted = tl.where(mask_h[None, :], weighted, 0.0)
    return tl.sum(weighted, axis=1)
