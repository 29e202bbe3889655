"""What `paged_mqa_logits` compiles: fp8 and float caches, drafts and the ragged form."""

from __future__ import annotations

from ..kernels.backend import Target
from ..kernels.paged_mqa_kernel import _paged_mqa_logits_kernel
from .case import CompileCase
from .mqa_logits import score_constants, tensor_op

PAGE_SIZE = 64


def cases(target: Target) -> list[CompileCase]:
    """Contiguous tensors over a cache of 64-token pages."""
    return [
        _case(target, "u8", "u8", 64, 128),
        _case(target, "u8", "u8", 64, 128, ragged=True),
        _case(target, "bf16", "u8", 64, 128),
        _case(target, "bf16", "bf16", 64, 128),
        _case(target, "fp16", "fp16", 64, 128),
        _case(target, "fp32", "fp32", 64, 128),
        _case(target, "u8", "u8", 32, 128),
        _case(target, "fp32", "fp32", 4, 32),
        _case(target, "u8", "u8", 24, 96),
        _case(target, "u8", "u8", 128, 128),
        _case(target, "bf16", "bf16", 64, 256),
    ]


def _case(
    target: Target, query: str, cache: str, heads: int, head_dim: int, ragged: bool = False
) -> CompileCase:
    constants, warps, stages = score_constants(target, query, heads, head_dim)
    unit_strides = ("qd", "kd", "scale_s", "wh", "lens_b", "tp", "requests", "ol")
    constants |= {f"stride_{name}": 1 for name in unit_strides} | {
        "stride_lens_n": 0,
        "PAGE_SIZE": PAGE_SIZE,
        "OWN_LENGTHS": False,
        "HAS_SCALE": cache == "u8",
        "HAS_REQUESTS": ragged,
    }
    pointers = {
        "q_ptr": f"*{query}",
        "k_ptr": f"*{cache}",
        "scale_ptr": "*fp32",
        "w_ptr": "*fp32",
        "lens_ptr": "*i32",
        "block_table_ptr": "*i32",
        "requests_ptr": "*i32",
        "out_ptr": "*fp32",
    }
    signature = {
        name: pointers.get(name, "i32")
        for name in _paged_mqa_logits_kernel.arg_names
        if name not in constants
    }
    strides = {
        "stride_qb": heads * head_dim,
        "stride_qn": heads * head_dim,
        "stride_qh": head_dim,
        "stride_kp": PAGE_SIZE * head_dim,
        "stride_ks": head_dim,
        "stride_scale_p": PAGE_SIZE * (head_dim + 4) // 4,
        "stride_wt": heads,
        "stride_ot": 16,  # the usual context length
    }
    return CompileCase(
        "paged_mqa_logits",
        f"q {query}, cache {cache}, H={heads} D={head_dim}{' ragged' if ragged else ''}",
        _paged_mqa_logits_kernel,
        signature,
        constants,
        num_warps=warps,
        num_stages=stages,
        divisible=(*pointers, *(name for name, stride in strides.items() if stride % 16 == 0)),
        tensor_op=tensor_op(target, query),
    )
