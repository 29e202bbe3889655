"""What `indices_to_slots` compiles."""

from __future__ import annotations

from ..kernels.backend import Target, triton
from ..kernels.slots import BLOCK_W, _indices_to_slots_kernel
from .case import CompileCase


def cases(target: Target) -> list[CompileCase]:
    """Rows of 2048 positions and of few; pages of 64 tokens, of an odd size and of one."""
    return [
        _case(2048, 64, "i32"),
        _case(2048, 48, "i64"),
        _case(16, 1, "i64"),
    ]


def _case(width: int, page_size: int, slots: str) -> CompileCase:
    return CompileCase(
        "indices_to_slots",
        f"W={width} S={page_size} {slots}",
        _indices_to_slots_kernel,
        signature={
            "indices_ptr": "*i32",
            "stride_it": "i32",
            "table_ptr": "*i32",
            "stride_tb": "i32",
            "request_ptr": "*i32",
            "out_ptr": f"*{slots}",
            "stride_ot": "i32",
            "W": "i32",
            "B": "i32",
            "pages": "i32",
        },
        constexprs={
            "stride_iw": 1,
            "stride_tp": 1,
            "stride_r": 1,
            "stride_ow": 1,
            "PAGE_SIZE": page_size,
            "BLOCK_W": min(BLOCK_W, triton.next_power_of_2(width)),
        },
        divisible=(
            *("indices_ptr", "table_ptr", "request_ptr", "out_ptr"),
            *("stride_it", "stride_ot", "W"),
        ),
    )
