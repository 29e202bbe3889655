"""What `indices_to_slots` compiles."""

from __future__ import annotations

from ..kernels.backend import Target, triton
from ..kernels.slots import BLOCK_W, NUM_WARPS, _indices_to_slots_kernel
from .case import CompileCase, Work

ROWS = 4096


def cases(target: Target) -> list[CompileCase]:
    """Rows of whole blocks and one with a tail; pages of 64 tokens, 48 and one."""
    return [
        _case(2048, 64, "i32"),
        _case(2048, 64, "i64"),
        _case(2000, 64, "i32"),
        _case(2048, 48, "i32"),
        _case(2048, 1, "i64"),
    ]


def _case(width: int, page_size: int, slots: str) -> CompileCase:
    block_w = min(BLOCK_W, triton.next_power_of_2(width))
    programs = triton.cdiv(width, block_w)
    work = Work(
        unit="index",
        shape={"T": ROWS, "W": width, "page_size": page_size},
        units=width / programs,
        programs=ROWS * programs,
        bytes=4 + 4 + (8 if slots == "i64" else 4),  # the index, its page, the slot
    )
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
            "positions": "i32",
        },
        constexprs={
            "stride_iw": 1,
            "stride_tp": 1,
            "stride_r": 1,
            "stride_ow": 1,
            "PAGE_SIZE": page_size,
            "BLOCK_W": block_w,
            "WHOLE_BLOCKS": width % block_w == 0,
        },
        divisible=(
            *("indices_ptr", "table_ptr", "request_ptr", "out_ptr"),
            *("stride_it", "stride_ot", "W"),
        ),
        num_warps=NUM_WARPS,
        dtype="int32",
        work=(work,),
    )
