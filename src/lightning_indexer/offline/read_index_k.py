"""What `read_index_k` compiles: each payload width, few and many requests."""

from __future__ import annotations

from ..kernels.backend import Target, triton
from ..kernels.read_index_k import TILE, _read_index_k_kernel
from .case import CompileCase, Work

_FILL = {"u8": 0, "i16": 0x7FC0, "i32": 0x7FC00000}
_DTYPES = {"u8": "fp8", "i16": "bf16", "i32": "fp32"}
PAGE_SIZE = 64
KEYS = 2**20


def cases(target: Target) -> list[CompileCase]:
    """Contiguous pages and outputs; floats are copied as integers of their width."""
    return [
        _case("u8", 128, requests=512),
        _case("u8", 100, requests=1),
        _case("i16", 128, requests=64),
        _case("i32", 32, requests=64),
    ]


def _case(payload: str, head_dim: int, requests: int) -> CompileCase:
    block_d = triton.next_power_of_2(head_dim)
    block_n = max(TILE // block_d, 1)
    size = {"u8": 1, "i16": 2, "i32": 4}[payload]
    searched = 8 * (requests.bit_length() + 1)  # the ends of requests that a key looks at
    work = Work(
        unit="key",
        shape={"keys": KEYS, "B": requests, "D": head_dim},
        units=block_n,
        programs=triton.cdiv(KEYS, block_n),
        bytes=2 * size * head_dim + (8 if payload == "u8" else 0) + 4 + searched,
    )
    signature = {
        "values_ptr": f"*{payload}",
        "stride_vp": "i32",
        "stride_vt": "i32",
        "table_ptr": "*i32",
        "stride_tb": "i32",
        "ends_ptr": "*i64",
        "out_ptr": f"*{payload}",
        "stride_on": "i32",
        "total": "i32",
        "B": "i32",
        "blocks": "i32",
        "P": "i32",
    }
    constexprs = {
        "stride_vd": 1,
        "scales_ptr": None,
        "stride_sp": 0,
        "stride_st": 0,
        "stride_tp": 1,
        "stride_od": 1,
        "out_scales_ptr": None,
        "stride_os": 0,
        "D": head_dim,
        "PAGE_SIZE": PAGE_SIZE,
        "FILL": _FILL[payload],
        "STEPS": requests.bit_length(),
        "BLOCK_N": block_n,
        "BLOCK_D": block_d,
    }
    divisible = ["values_ptr", "stride_vp", "table_ptr", "ends_ptr", "out_ptr"]
    if head_dim % 16 == 0:
        divisible += ["stride_vt", "stride_on"]
    if payload == "u8":
        for name in ("scales_ptr", "stride_sp", "out_scales_ptr"):
            del constexprs[name]
        signature |= {"scales_ptr": "*fp32", "stride_sp": "i32", "out_scales_ptr": "*fp32"}
        constexprs |= {"stride_st": 1, "stride_os": 1}
        divisible += ["scales_ptr", "stride_sp", "out_scales_ptr"]
    return CompileCase(
        "read_index_k",
        f"{payload} D={head_dim} B={requests}",
        _read_index_k_kernel,
        signature,
        constexprs,
        divisible=tuple(divisible),
        dtype=_DTYPES[payload],
        work=(work,),
    )
