"""What `write_index_k` compiles: each key dtype, each kind of cache, each conversion's code."""

from __future__ import annotations

from ..kernels.backend import Target, triton
from ..kernels.quantize import E4M3_MAX, MIN_AMAX
from ..kernels.write_index_k import SCAN_TILE, TILE, _write_index_k_kernel
from .case import CompileCase, Work

PAGE_SIZE = 64
KEYS = 8192
_BYTES = {"u8": 1, "bf16": 2, "fp16": 2, "fp32": 4}


def cases(target: Target) -> list[CompileCase]:
    """Contiguous keys and pages, as engines have them; the code is the same on every target."""
    return [
        _case("bf16", "u8", 128, "i64"),
        _case("fp32", "u8", 128, "i32", ue8m0=True),
        _case("fp16", "u8", 100, "i64"),
        _case("bf16", "bf16", 128, "i64"),
        _case("bf16", "fp16", 32, "i64"),
        _case("fp32", "bf16", 128, "i64"),
        _case("fp16", "fp32", 128, "i64"),
    ]


def _case(k: str, cache: str, head_dim: int, slots: str, ue8m0: bool = False) -> CompileCase:
    block_d = triton.next_power_of_2(head_dim)
    block_n = max(TILE // block_d, 1)
    block_s = max(SCAN_TILE // block_n, 1)
    later = (KEYS + block_n) / 2  # slots from a program's first key to the last, on average
    work = Work(
        unit="key",
        shape={"n": KEYS, "D": head_dim},
        units=block_n,
        programs=triton.cdiv(KEYS, block_n),
        bytes=(_BYTES[k] + _BYTES[cache]) * head_dim
        + (4 if cache == "u8" else 0)
        + (8 if slots == "i64" else 4) * (1 + later / block_n),
        trips={"_last_writer": later / block_s},
    )
    signature = {
        "values_ptr": f"*{cache}",
        "stride_vp": "i32",
        "stride_vt": "i32",
        "k_ptr": f"*{k}",
        "stride_kn": "i32",
        "slots_ptr": f"*{slots}",
        "n": "i32",
        "capacity": "i32",
    }
    constexprs = {
        "stride_vd": 1,
        "scales_ptr": None,
        "stride_sp": 0,
        "stride_st": 0,
        "stride_kd": 1,
        "stride_s": 1,
        "D": head_dim,
        "PAGE_SIZE": PAGE_SIZE,
        "UE8M0": ue8m0,
        "E4M3_MAX": E4M3_MAX,
        "MIN_AMAX": MIN_AMAX,
        "BLOCK_N": block_n,
        "BLOCK_D": block_d,
        "BLOCK_S": block_s,
    }
    divisible = ["values_ptr", "stride_vp", "k_ptr", "slots_ptr", "capacity"]
    if head_dim % 16 == 0:
        divisible += ["stride_vt", "stride_kn"]
    if cache == "u8":
        del constexprs["scales_ptr"], constexprs["stride_sp"]
        signature |= {"scales_ptr": "*fp32", "stride_sp": "i32"}
        constexprs["stride_st"] = 1
        divisible += ["scales_ptr", "stride_sp"]
    return CompileCase(
        "write_index_k",
        f"{k}→{cache} D={head_dim}{' ue8m0' if ue8m0 else ''}",
        _write_index_k_kernel,
        signature,
        constexprs,
        divisible=tuple(divisible),
        dtype="fp8" if cache == "u8" else cache,
        work=(work,),
    )
