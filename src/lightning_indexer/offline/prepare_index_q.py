"""What `prepare_index_q` compiles: RoPE styles, the transform, quantised or not."""

from __future__ import annotations

from ..kernels.backend import Target, triton
from ..kernels.prepare_index_q import TILE, _prepare_index_q_kernel, num_warps
from ..kernels.quantize import E4M3_MAX, MIN_AMAX
from .case import CompileCase, Work

ROWS = 4096
_BYTES = {"u8": 1, "bf16": 2, "fp16": 2, "fp32": 4}


def cases(target: Target) -> list[CompileCase]:
    """Contiguous queries and tables, half of D rotated, as DeepSeek-V3.2 and GLM have them."""
    return [
        _case(target, "bf16", "u8", 64, "half_split", ue8m0=True, hadamard=True),
        _case(target, "bf16", "u8", 64, "half_split", ue8m0=True),
        _case(target, "bf16", "u8", 64, "half_split"),
        _case(target, "bf16", "u8", 32, "interleaved", ue8m0=True, hadamard=True),
        _case(target, "bf16", "u8", 32, "interleaved"),
        _case(target, "bf16", "bf16", 64, "half_split"),
        _case(target, "fp32", "fp32", 4, "interleaved", head_dim=32, positions="i64"),
        _case(target, "fp16", "fp16", 33, "half_split", head_dim=100, rope_first=False),
    ]


def _case(
    target: Target,
    q: str,
    out: str,
    heads: int,
    rope_style: str,
    *,
    head_dim: int = 128,
    rope_first: bool = True,
    positions: str = "i32",
    ue8m0: bool = False,
    hadamard: bool = False,
) -> CompileCase:
    block_d = triton.next_power_of_2(head_dim)
    block_h = min(triton.next_power_of_2(heads), max(TILE // block_d, 1))
    blocks = triton.cdiv(heads, block_h)
    rope_dims = head_dim // 4 * 2
    work = Work(
        unit="element",
        shape={"T": ROWS, "H": heads, "D": head_dim},
        units=heads * head_dim / blocks,
        programs=ROWS * blocks,
        bytes=_BYTES[q] + _BYTES[out],
    )
    signature = {
        "q_ptr": f"*{q}",
        "stride_qt": "i32",
        "stride_qh": "i32",
        "weights_ptr": f"*{q}",
        "stride_wt": "i32",
        "positions_ptr": f"*{positions}",
        "cos_ptr": "*fp32",
        "stride_cp": "i32",
        "sin_ptr": "*fp32",
        "stride_sp": "i32",
        "known": "i32",
        "out_ptr": f"*{out}",
        "stride_ot": "i32",
        "stride_oh": "i32",
        "out_weights_ptr": "*fp32",
        "stride_owt": "i32",
        "scale": "fp32",
        "H": "i32",
    }
    units = ["stride_qd", "stride_wh", "stride_p", "stride_cd", "stride_sd"]
    units += ["stride_od", "stride_owh"]
    constexprs = {
        **dict.fromkeys(units, 1),
        "D": head_dim,
        "ROPE_START": 0 if rope_first else head_dim - rope_dims,
        "ROPE_DIMS": rope_dims,
        "INTERLEAVED": rope_style == "interleaved",
        "HADAMARD": head_dim**-0.5 if hadamard else None,
        "UE8M0": ue8m0,
        "E4M3_MAX": E4M3_MAX,
        "MIN_AMAX": MIN_AMAX,
        "FP8_UNITS": target.has_fp8_dot,
        "BLOCK_H": block_h,
        "BLOCK_D": block_d,
    }
    divisible = ["q_ptr", "weights_ptr", "positions_ptr", "cos_ptr", "sin_ptr"]
    divisible += ["out_ptr", "out_weights_ptr", "known"]
    if rope_dims % 32 == 0:
        divisible += ["stride_cp", "stride_sp"]
    if heads % 16 == 0:
        divisible += ["H", "stride_wt", "stride_owt"]
    if head_dim % 16 == 0:
        divisible += ["stride_qt", "stride_qh", "stride_ot", "stride_oh"]
    label = f"{q}→{out} H={heads} D={head_dim} {rope_style}"
    label += " ue8m0" * ue8m0 + " hadamard" * hadamard
    return CompileCase(
        "prepare_index_q",
        label,
        _prepare_index_q_kernel,
        signature,
        constexprs,
        num_warps=num_warps(block_h * block_d),
        fp_fusion=False,
        divisible=tuple(divisible),
        dtype="fp32",
        work=(work,),
    )
