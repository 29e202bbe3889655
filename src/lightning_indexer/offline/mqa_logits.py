"""What `mqa_logits` compiles: every dtype at H=64, D=128, and the corners of the tile table."""

from __future__ import annotations

import torch

from ..kernels.backend import Target
from ..kernels.mqa_logits import _mqa_logits_kernel
from ..kernels.score_tile import tile_constants
from .case import CompileCase

_DTYPES = {
    "u8": torch.uint8,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
}


def cases(target: Target) -> list[CompileCase]:
    """Contiguous tensors with `k_scale`, as engines have them."""
    return [
        _case(target, query, key, heads, head_dim)
        for query, key, heads, head_dim in (
            ("u8", "u8", 64, 128),
            ("bf16", "bf16", 64, 128),
            ("bf16", "u8", 64, 128),
            ("fp16", "fp16", 64, 128),
            ("fp32", "fp32", 64, 128),
            ("fp32", "bf16", 64, 128),
            ("u8", "u8", 32, 128),
            ("bf16", "bf16", 32, 128),
            ("fp32", "fp32", 4, 32),
            ("u8", "u8", 24, 96),
            ("bf16", "bf16", 24, 96),
            ("u8", "u8", 128, 128),
            ("bf16", "bf16", 64, 256),
        )
    ]


def tensor_op(target: Target, query: str) -> str | None:
    """The tensor-core instruction that must come out for queries of that type."""
    if query == "fp32":
        return None
    if target.backend == "hip":
        return "v_mfma"
    return {90: "wgmma", 100: "tcgen05.mma"}.get(int(target.arch), "mma.sync")


def score_constants(
    target: Target, query: str, heads: int, head_dim: int
) -> tuple[dict[str, object], int, int]:
    """Compile-time constants, warps and stages that the launcher uses."""
    constants = dict(tile_constants(target, _DTYPES[query], heads, head_dim))
    warps, stages = constants.pop("num_warps"), constants.pop("num_stages")
    return constants, warps, stages


def _case(target: Target, query: str, key: str, heads: int, head_dim: int) -> CompileCase:
    constants, warps, stages = score_constants(target, query, heads, head_dim)
    unit_strides = ("qd", "kd", "scale", "wh", "starts", "ends", "ol")
    constants |= {f"stride_{name}": 1 for name in unit_strides} | {"HAS_SCALE": True}
    pointers = {
        "q_ptr": f"*{query}",
        "k_ptr": f"*{key}",
        "scale_ptr": "*fp32",
        "w_ptr": "*fp32",
        "starts_ptr": "*i32",
        "ends_ptr": "*i32",
        "out_ptr": "*fp32",
    }
    signature = {
        name: pointers.get(name, "i32")
        for name in _mqa_logits_kernel.arg_names
        if name not in constants
    }
    strides = {
        "stride_qt": heads * head_dim,
        "stride_qh": head_dim,
        "stride_kl": head_dim,
        "stride_wt": heads,
        "stride_ot": 16,  # the usual context length
    }
    return CompileCase(
        "mqa_logits",
        f"q {query}, k {key}, H={heads} D={head_dim}",
        _mqa_logits_kernel,
        signature,
        constants,
        num_warps=warps,
        num_stages=stages,
        divisible=(*pointers, *(name for name, stride in strides.items() if stride % 16 == 0)),
        tensor_op=tensor_op(target, query),
    )
