"""What `prepare_index_k` and `prepare_ragged_index_k` compile: norms, styles, destinations."""

from __future__ import annotations

from ..kernels.backend import Target, triton
from ..kernels.prepare_k_kernel import MAX_REGISTERS, NUM_WARPS, _prepare_index_k_kernel, key_blocks
from ..kernels.quantize import E4M3_MAX, MIN_AMAX
from .case import CompileCase, Work

PAGE_SIZE = 64
KEYS = 4096
_BYTES = {"u8": 1, "bf16": 2, "fp16": 2, "fp32": 4}


def cases(target: Target) -> list[CompileCase]:
    """Contiguous keys, tables and pages, half of D rotated; ragged keys are their own slots."""
    return [
        _case(target, "bf16", "u8", "half_split", ue8m0=True, hadamard=True),
        _case(target, "bf16", "u8", "half_split", ue8m0=True),
        _case(target, "bf16", "u8", "interleaved"),
        _case(target, "fp16", "u8", "half_split", head_dim=100, rope_first=False),
        _case(target, "bf16", "bf16", "half_split", bias=False),
        _case(target, "fp32", "fp32", "interleaved", head_dim=32),
        _case(target, "bf16", "u8", "half_split", ue8m0=True, hadamard=True, ragged=True),
        _case(target, "bf16", "bf16", "interleaved", ragged=True),
    ]


def _case(
    target: Target,
    k: str,
    out: str,
    rope_style: str,
    *,
    head_dim: int = 128,
    rope_first: bool = True,
    bias: bool = True,
    ue8m0: bool = False,
    hadamard: bool = False,
    ragged: bool = False,
) -> CompileCase:
    blocks = key_blocks(head_dim)
    block_n = blocks["BLOCK_N"]
    rope_dims = head_dim // 4 * 2
    later = 0.0 if ragged else (KEYS + block_n) / 2  # slots from a program's first key to the last
    work = Work(
        unit="key",
        shape={"n": KEYS, "D": head_dim},
        units=block_n,
        programs=triton.cdiv(KEYS, block_n),
        bytes=(_BYTES[k] + _BYTES[out]) * head_dim
        + (4 if out == "u8" else 0)
        + 4  # its position, and both tables' rows
        + 4 * rope_dims
        + 8 * later / block_n,
        trips={} if ragged else {"_last_writer": later / blocks["BLOCK_S"]},
    )
    signature = {
        "k_ptr": f"*{k}",
        "stride_kn": "i32",
        "weight_ptr": "*bf16",
        "positions_ptr": "*i32",
        "cos_ptr": "*fp32",
        "stride_cp": "i32",
        "sin_ptr": "*fp32",
        "stride_sp": "i32",
        "known": "i32",
        "values_ptr": f"*{out}",
        "stride_vp": "i32",
        "stride_vt": "i32",
        "eps": "fp32",
        "n": "i32",
        "capacity": "i32",
    }
    units = ("stride_kd", "stride_w", "stride_p", "stride_cd", "stride_sd", "stride_vd")
    constexprs = {
        **dict.fromkeys(units, 1),
        "bias_ptr": None,
        "stride_b": 0,
        "scales_ptr": None,
        "stride_scp": 0,
        "stride_sct": 0,
        "slots_ptr": None,
        "stride_s": 0,
        "D": head_dim,
        "ROPE_START": 0 if rope_first else head_dim - rope_dims,
        "ROPE_DIMS": rope_dims,
        "INTERLEAVED": rope_style == "interleaved",
        "HADAMARD": head_dim**-0.5 if hadamard else None,
        "PAGE_SIZE": 1 if ragged else PAGE_SIZE,
        "UE8M0": ue8m0,
        "E4M3_MAX": E4M3_MAX,
        "MIN_AMAX": MIN_AMAX,
        "FP8_UNITS": target.has_fp8_dot,
        **blocks,
    }
    divisible = ["k_ptr", "weight_ptr", "positions_ptr", "cos_ptr", "sin_ptr", "values_ptr"]
    divisible += ["known", "capacity"]
    if rope_dims % 32 == 0:
        divisible += ["stride_cp", "stride_sp"]
    if head_dim % 16 == 0:
        divisible += ["stride_kn", "stride_vp", "stride_vt"]
    optional = {"bias_ptr": "*bf16", "stride_b": 1} if bias else {}
    if out == "u8":
        optional |= {"scales_ptr": "*fp32", "stride_scp": 1 if ragged else "i32", "stride_sct": 1}
    if not ragged:
        optional |= {"slots_ptr": "*i64", "stride_s": 1}
    for name, kind in optional.items():
        if isinstance(kind, str):
            constexprs.pop(name, None)
            signature[name] = kind
            divisible += [name] * (name.endswith("ptr"))
        else:
            constexprs[name] = kind
    return CompileCase(
        "prepare_ragged_index_k" if ragged else "prepare_index_k",
        f"{k}→{out} D={head_dim} {rope_style}{' ue8m0' if ue8m0 else ''}"
        f"{' hadamard' if hadamard else ''}{'' if bias else ' no bias'}",
        _prepare_index_k_kernel,
        signature,
        constexprs,
        num_warps=NUM_WARPS,
        max_registers=MAX_REGISTERS if target.backend == "cuda" else None,
        fp_fusion=False,
        divisible=tuple(divisible),
        dtype="fp32",
        work=(work,),
    )
