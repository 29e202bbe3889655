"""What `compact_topk_indices` compiles."""

from __future__ import annotations

from ..kernels.backend import Target, triton
from ..kernels.compact import MAX_ROWS_IN_PLACE, NUM_WARPS, _compact_kernel, slice_shape
from .case import CompileCase, Work

WIDTH = 2048


def cases(target: Target) -> list[CompileCase]:
    """From one request to the most rows that stay in registers; one buffer and four."""
    return [
        _case(1, 1, "i32"),
        _case(64, 1, "i32"),
        _case(64, 4, "i32"),
        _case(500, 1, "i64"),
        _case(MAX_ROWS_IN_PLACE, 1, "i32"),
        _case(MAX_ROWS_IN_PLACE, 1, "i64"),
    ]


def _case(n: int, buffers: int, rows: str) -> CompileCase:
    block_n, block_w = slice_shape(n)
    work = Work(
        unit="element",
        shape={"n": n, "W": WIDTH, "buffers": buffers},
        # The code holds a slice for each buffer; a program runs one. Count a program for all.
        units=n * block_w * buffers,
        programs=triton.cdiv(WIDTH, block_w),
        bytes=4 + 4 + (8 if rows == "i64" else 4) / block_w,
    )
    return CompileCase(
        "compact_topk_indices",
        f"n={n} buffers={buffers} rows {rows}",
        _compact_kernel,
        signature={
            "buffer_ptrs": ("*i32",) * buffers,
            "strides_bm": ("i32",) * buffers,
            "strides_bw": ("i32",) * buffers,
            "widths": ("i32",) * buffers,
            "rows_ptr": f"*{rows}",
            "n": "i32",
            "num_rows": "i32",
        },
        constexprs={"stride_rn": 1, "BLOCK_N": block_n, "BLOCK_W": block_w},
        num_warps=NUM_WARPS,
        divisible=("rows_ptr",),
        dtype="int32",
        work=(work,),
    )
