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
from .e4m3 import e4m3_to_fnuz, e4m3_to_fp16


@cache
def tile_constants(
    target: Target, dtype: torch.dtype, key_dtype: torch.dtype, heads: int, head_dim: int
) -> dict[str, Any]:
    """What both kernels are compiled with for queries and keys of these dtypes (uint8: e4m3fn)."""
    config = score_config(target, dtype, key_dtype, heads, head_dim)
    constants = {
        "H": heads,
        "D": head_dim,
        "OPERAND": operand_dtype(target, dtype),
        "BLOCK_H": config.block_h,
        "DOT_HEADS": config.dot_heads,
        "SUMS": config.sums,
        "CHUNK_D": config.chunk_d,
        "BLOCK_KEYS": config.block_keys,
        "BLOCK_ROWS": config.block_rows,
        # PTX, unknown to the interpreter and to AMD, whose compiler needs no such help
        "USE_PTX": target.backend == "cuda",
        # the interpreter of Triton 3.6 cannot loop up to a number computed in the kernel
        "FIXED_ROWS": target.backend == "interpreter",
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }
    if config.max_registers is not None and target.backend == "cuda":
        constants["maxnreg"] = config.max_registers
    return constants


def operand_dtype(target: Target, dtype: torch.dtype) -> Any:
    """The Triton type in which queries and keys are multiplied.

    Exact wherever it differs from `dtype`: fp16 holds every e4m3fn value, e4m3fnuz its half, fp32
    every other one.
    """
    if target.backend == "interpreter" or dtype == torch.float32:
        return tl.float32  # the interpreter multiplies the bit patterns of bf16
    if dtype == torch.uint8:
        if target.arch == "gfx942":
            return tl.float8e4b8
        return tl.float8e4nv if target.has_fp8_dot else tl.float16
    return tl.bfloat16 if dtype == torch.bfloat16 else tl.float16


@triton.jit
def typed(ptr, OPERAND: tl.constexpr):
    """`ptr`, as one to e4m3fn if it points to such bytes and they are multiplied as they are.

    Loaded as fp8, a tile goes from memory to the tensor cores' shared memory without a copy.
    """
    if ptr.dtype.element_ty == tl.uint8 and tl.float8e4nv == OPERAND:
        as_fp8 = ptr.to(tl.pointer_type(tl.float8e4nv), bitcast=True)
    else:
        as_fp8 = ptr
    return as_fp8


@triton.jit
def as_operand(x, OPERAND: tl.constexpr):
    """Loaded values, exactly, as dot operands; uint8 holds e4m3fn."""
    if x.dtype == tl.uint8:
        if tl.float8e4b8 == OPERAND:
            operand = e4m3_to_fnuz(x).to(tl.float8e4b8, bitcast=True)
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
    USE_PTX: tl.constexpr,
):
    """Dimensions [first_d, first_d + WIDTH) of a tile of keys: [BLOCK_KEYS, WIDTH] operands."""
    offs_d = first_d + tl.arange(0, WIDTH)
    mask = mask_keys[:, None] & (offs_d < D)[None, :]
    k_ptrs = key_ptrs[:, None] + offs_d.to(tl.int64)[None, :] * stride_kd
    k = tl.load(k_ptrs, mask=mask, other=0.0)
    operand = as_operand(k, OPERAND)
    if USE_PTX and k.dtype == tl.uint8 and WIDTH >= D:
        # what the compiler cannot see through it cannot repeat for every row
        operand = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [operand], dtype=operand.dtype, is_pure=False, pack=2
        )
    return operand


@triton.jit
def add_heads(
    sums,  # [BLOCK_KEYS, SUMS], or None for zeros
    relu,  # [BLOCK_KEYS, heads from first_h on]
    w_ptr,
    stride_wh,
    first_h,
    H: tl.constexpr,
    SUMS: tl.constexpr,
):
    """Adds weights·relu to `sums`, SUMS heads at a time: a chain of multiply-adds a partial sum.

    The multiply-adds are spelt out: which product of a sum a compiler would fuse is its own
    affair, and may differ between two kernels, and with it the bits.
    """
    KEYS: tl.constexpr = relu.shape[0]
    HEADS: tl.constexpr = relu.shape[1]
    if HEADS == SUMS:
        offs_h = first_h + tl.arange(0, SUMS)
        w_ptrs = w_ptr + offs_h.to(tl.int64) * stride_wh
        weights = tl.load(w_ptrs, mask=offs_h < H, other=0.0)[None, :]
        if sums is None:
            added = relu * weights
        else:
            added = tl.fma(relu, weights.broadcast_to(KEYS, SUMS), sums)
    else:
        HALF: tl.constexpr = HEADS // 2
        low, high = tl.split(tl.permute(tl.reshape(relu, [KEYS, 2, HALF]), (0, 2, 1)))
        added = add_heads(sums, low, w_ptr, stride_wh, first_h, H, SUMS)
        added = add_heads(added, high, w_ptr, stride_wh, first_h + HALF, H, SUMS)
    return added


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
    DOT_HEADS: tl.constexpr,
    SUMS: tl.constexpr,
    CHUNK_D: tl.constexpr,
    OPERAND: tl.constexpr,
    USE_PTX: tl.constexpr,
):
    """Σ_h weights[h]·relu(q[h]·k) for each key of the tile: [BLOCK_KEYS] fp32, unscaled."""
    sums = None
    for first_h in tl.static_range(0, BLOCK_H, DOT_HEADS):
        offs_h = first_h + tl.arange(0, DOT_HEADS)
        mask_h = offs_h < H
        q_rows = q_ptr + offs_h.to(tl.int64)[:, None] * stride_qh  # [DOT_HEADS, 1]
        dots = tl.zeros((key_ptrs.shape[0], DOT_HEADS), tl.float32)
        for first_d in tl.range(0, D, CHUNK_D, num_stages=1):
            offs_d = first_d + tl.arange(0, CHUNK_D)
            q_ptrs = q_rows + offs_d.to(tl.int64)[None, :] * stride_qd
            mask_q = mask_h[:, None] & (offs_d < D)[None, :]
            q = tl.load(q_ptrs, mask=mask_q, other=0.0)  # [DOT_HEADS, CHUNK_D]
            if CHUNK_D >= D:
                k = keys
            else:
                k = load_keys(key_ptrs, stride_kd, mask_keys, first_d, D, CHUNK_D, OPERAND, USE_PTX)
            if q.dtype == tl.uint8:  # as `encoded_queries` left them
                q = q.to(OPERAND, bitcast=True)
            q = as_operand(q, OPERAND)
            dots = tl.dot(k, tl.trans(q), acc=dots, input_precision="ieee")
        relu = tl.maximum(dots, 0.0, propagate_nan=tl.PropagateNan.ALL)
        if BLOCK_H != H:  # an infinite key times a padding head's zeros would be NaN
            relu = tl.where(mask_h[None, :], relu, 0.0)
        sums = add_heads(sums, relu, w_ptr, stride_wh, first_h, H, SUMS)
    scores = tl.sum(sums, axis=1)
    if tl.float8e4b8 == OPERAND:  # both operands were halves
        scores = scores * 4.0
    return scores


@triton.jit
def cut(bound, L):
    """A window's bound or a length (int32 or int64), cut to [0, L]; int32."""
    return tl.maximum(tl.minimum(bound, L), 0).to(tl.int32)
