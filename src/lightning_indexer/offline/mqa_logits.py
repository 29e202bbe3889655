"""What `mqa_logits` compiles: every dtype at H=64, D=128, and the corners of the tile table."""

from __future__ import annotations

from typing import Any

import torch

from ..kernels.backend import Target
from ..kernels.mqa_logits import _mqa_logits_kernel
from ..kernels.score_queries import _encode_queries_kernel
from ..kernels.score_tile import tile_constants
from .case import CompileCase, Work

#: By Triton type ("u8": e4m3fn): the torch type that ops see, its name in reports, bytes.
DTYPES = {
    "u8": (torch.uint8, "fp8", 1),
    "bf16": (torch.bfloat16, "bf16", 2),
    "fp16": (torch.float16, "fp16", 2),
    "fp32": (torch.float32, "fp32", 4),
}
_T, _L = 4096, 65536


def cases(target: Target) -> list[CompileCase]:
    """Contiguous tensors with `k_scale`, as engines have them."""
    scoring = [
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
    encoding = [] if target.has_fp8_dot else [_encoding_case(target)]
    return scoring + encoding


def tensor_op(target: Target, query: str) -> str | None:
    """The tensor-core instruction that must come out for queries of that type."""
    if query == "fp32":
        return None
    if target.backend == "hip":
        return "v_mfma"
    return {90: "wgmma", 100: "tcgen05.mma"}.get(int(target.arch), "mma.sync")


def query_pointer(target: Target, query: str) -> str:
    """What the kernels are given for queries of that type: fp8 may have been encoded."""
    if query != "u8" or target.has_fp8_dot or target.arch == "gfx942":
        return f"*{query}"
    return "*fp16"


def score_constants(
    target: Target, query: str, key: str, heads: int, head_dim: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Compile-time constants, and the fields of a case that limit its threads and registers."""
    dtypes = DTYPES[query][0], DTYPES[key][0]
    constants = dict(tile_constants(target, *dtypes, heads, head_dim))
    return constants, {
        "num_warps": constants.pop("num_warps"),
        "num_stages": constants.pop("num_stages"),
        "max_registers": constants.pop("maxnreg", None),
    }


def row_bytes(constants: dict[str, Any], query_type: str) -> int:
    """Bytes of one row's query and weights, as the kernels read them."""
    size = {"*u8": 1, "*fp32": 4}.get(query_type, 2)
    return int(constants["H"] * (constants["D"] * size + 4))


def score_trips(kernel: str, rows: int, constants: dict[str, Any]) -> dict[str, float]:
    """Iterations of a kernel's row loop, and of the loop over slices of D."""
    return {kernel: rows, "score_row#2": -(-constants["D"] // constants["CHUNK_D"])}


def _case(target: Target, query: str, key: str, heads: int, head_dim: int) -> CompileCase:
    constants, limits = score_constants(target, query, key, heads, head_dim)
    unit_strides = ("qd", "kd", "scale", "wh", "starts", "ends", "ol")
    constants |= {f"stride_{name}": 1 for name in unit_strides} | {"HAS_SCALE": True}
    pointers = {
        "q_ptr": query_pointer(target, query),
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
        **limits,
        divisible=(*pointers, *(name for name, stride in strides.items() if stride % 16 == 0)),
        tensor_op=tensor_op(target, query),
        dtype=DTYPES[query][1],
        work=(_prefill(constants, pointers["q_ptr"], DTYPES[key][2]),),
    )


def _prefill(constants: dict[str, Any], query_type: str, key_size: int) -> Work:
    """Full windows: every tile is scored."""
    rows, keys = constants["BLOCK_ROWS"], constants["BLOCK_KEYS"]
    heads, head_dim = constants["H"], constants["D"]
    # windows and queries of each row, keys and scales of each tile, and the scores
    moved = rows * (8 + row_bytes(constants, query_type)) + keys * (head_dim * key_size + 4)
    return Work(
        unit="query x key",
        shape={"T": _T, "L": _L, "H": heads, "D": head_dim},
        units=rows * keys,
        programs=_T // rows * (_L // keys),
        bytes=moved / (rows * keys) + 4,
        flops=2 * heads * head_dim,
        trips=score_trips("_mqa_logits_kernel#1", rows, constants) | {"_mqa_logits_kernel#2": 0},
    )


def _encoding_case(target: Target) -> CompileCase:
    """The pass over fp8 queries that goes before where fp8 is not multiplied as it is."""
    heads, head_dim, block = 64, 128, 1024
    to_fnuz = target.arch == "gfx942"
    constants = {"H": heads, "D": head_dim, "TO_FNUZ": to_fnuz, "BLOCK": block, "stride_qd": 1}
    pointers = {"q_ptr": "*u8", "out_ptr": "*u8" if to_fnuz else "*fp16"}
    signature = {
        name: pointers.get(name, "i32")
        for name in _encode_queries_kernel.arg_names
        if name not in constants
    }
    return CompileCase(
        "encode_queries",
        f"q u8, H={heads} D={head_dim}",
        _encode_queries_kernel,
        signature,
        constants,
        divisible=(*pointers, "stride_qb", "stride_qn", "stride_qh"),
        work=(
            Work(
                unit="element",
                shape={"T": _T, "H": heads, "D": head_dim},
                units=block,
                programs=_T * heads * head_dim // block,
                bytes=2 if to_fnuz else 3,
            ),
        ),
    )
