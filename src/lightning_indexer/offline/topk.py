"""What `topk_indices` compiles."""

from __future__ import annotations

from ..kernels.backend import Target
from ..kernels.topk_kernel import (
    MAX_STEP,
    MIN_SAMPLES,
    _topk_kernel,
    block_size,
    list_capacity,
    num_warps,
)
from .case import CompileCase


def cases(target: Target) -> list[CompileCase]:
    """Long rows (with a list) and short ones, in every dtype; a transposed and a padded view."""
    return [
        *(_case(target, 65536, 2048, dtype) for dtype in ("fp32", "fp16", "bf16")),
        *(_case(target, 8192, 2048, dtype) for dtype in ("fp32", "fp16", "bf16")),
        _case(target, 65537, 512, "fp32", contiguous=False),
        _case(target, 777, 100, "fp32"),
        _case(target, 128, 16, "fp32"),
    ]


def _case(
    target: Target, length: int, k: int, dtype: str, *, contiguous: bool = True
) -> CompileCase:
    capacity = list_capacity(k, length)
    signature = {
        "x_ptr": f"*{dtype}",
        "stride_xt": "i32",
        "stride_xl": "i32",
        "starts_ptr": "*i32",
        "stride_starts": "i32",
        "ends_ptr": "*i32",
        "stride_ends": "i32",
        "out_ptr": "*i32",
        "stride_ot": "i32",
        "stride_ok": "i32",
        "lists_ptr": "*i32",
        "L": "i32",
        "k": "i32",
    }
    constexprs: dict[str, int | None] = {
        "stride_starts": 1,
        "stride_ends": 1,
        "CAPACITY": capacity,
        "MIN_SAMPLES": MIN_SAMPLES,
        "MAX_STEP": MAX_STEP,
        "BLOCK": block_size(length, capacity),
    }
    pointers = ("x_ptr", "starts_ptr", "ends_ptr", "out_ptr")
    sizes = {"stride_xt": length, "L": length, "stride_ot": k, "k": k}
    divisible = [*pointers, *(name for name, size in sizes.items() if size % 16 == 0)]
    if contiguous:
        constexprs |= {"stride_xl": 1, "stride_ok": 1}
    if capacity:
        divisible.append("lists_ptr")
    else:
        constexprs["lists_ptr"] = None
    return CompileCase(
        "topk_indices",
        f"{dtype} L={length} k={k}" + ("" if contiguous else " strided"),
        _topk_kernel,
        signature={name: kind for name, kind in signature.items() if name not in constexprs},
        constexprs=constexprs,
        num_warps=num_warps(block_size(length, capacity), target),
        divisible=tuple(divisible),
    )
