"""What `paged_mqa_logits` compiles: fp8 and float caches, drafts and the ragged form."""

from __future__ import annotations

from typing import Any

from ..kernels.backend import Target
from ..kernels.paged_mqa_kernel import _paged_mqa_logits_kernel
from .case import CompileCase, Work
from .mqa_logits import DTYPES, query_pointer, row_bytes, score_constants, score_trips, tensor_op

PAGE_SIZE = 64
_KERNEL = "_paged_mqa_logits_kernel"
_B, _T, _L = 64, 4096, 65536


def cases(target: Target) -> list[CompileCase]:
    """Contiguous tensors over a cache of 64-token pages."""
    return [
        _case(target, "u8", "u8", 64, 128),
        _case(target, "u8", "u8", 64, 128, ragged=True),
        _case(target, "u8", "u8", 32, 128, ragged=True),
        _case(target, "bf16", "bf16", 64, 128, ragged=True),
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
    constants, limits = score_constants(target, query, cache, heads, head_dim)
    lens = "lens_n" if ragged else "lens_b"
    unit_strides = ("qd", "kd", "scale_s", "wh", "tp", "requests", "ol", lens)
    constants |= {f"stride_{name}": 1 for name in unit_strides} | {
        "PAGE_SIZE": PAGE_SIZE,
        "OWN_LENGTHS": ragged,
        "HAS_SCALE": cache == "u8",
        "HAS_REQUESTS": ragged,
    }
    if not ragged:
        constants["stride_lens_n"] = 0
    pointers = {
        "q_ptr": query_pointer(target, query),
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

    sizes = constants, pointers["q_ptr"], head_dim * DTYPES[cache][2] + 4 * (cache == "u8")
    return CompileCase(
        "paged_mqa_logits",
        f"q {query}, cache {cache}, H={heads} D={head_dim}{' ragged' if ragged else ''}",
        _paged_mqa_logits_kernel,
        signature,
        constants,
        **limits,
        divisible=(*pointers, *(name for name, stride in strides.items() if stride % 16 == 0)),
        tensor_op=tensor_op(target, query),
        dtype=DTYPES[query][1],
        work=(_prefill(*sizes),) if ragged else (_decode(*sizes, rows=1), _decode(*sizes, rows=4)),
    )


def _prefill(constants: dict[str, Any], query_type: str, key_bytes: int) -> Work:
    """Rows of one request in the ragged form that all see the whole context."""
    rows = constants["BLOCK_ROWS"]
    units = rows * constants["BLOCK_KEYS"]
    return Work(
        unit="query x key",
        shape={"T": _T, "L": _L, "H": constants["H"], "D": constants["D"]},
        units=units,
        programs=_T // rows * (_L // constants["BLOCK_KEYS"]),
        bytes=_program_bytes(constants, query_type, key_bytes, rows) / units,
        flops=2 * constants["H"] * constants["D"],
        trips=_trips(constants, rows),
    )


def _decode(constants: dict[str, Any], query_type: str, key_bytes: int, rows: int) -> Work:
    """`rows` drafts a request; a unit is a key, read once for all of them."""
    keys = constants["BLOCK_KEYS"]
    return Work(
        unit="key",
        shape={"B": _B, "N": rows, "L": _L, "H": constants["H"], "D": constants["D"]},
        units=keys,
        programs=_B * (_L // keys),
        bytes=_program_bytes(constants, query_type, key_bytes, rows) / keys,
        flops=2 * constants["H"] * constants["D"] * rows,
        trips=_trips(constants, rows),
    )


def _trips(constants: dict[str, Any], rows: int) -> dict[str, float]:
    """The loop over runs finds one, as its rows are of one request; no tile is unseen."""
    runs = {f"{_KERNEL}#1": 1, f"{_KERNEL}#3": 0}
    return runs | score_trips(f"{_KERNEL}#2", rows, constants)


def _program_bytes(constants: dict[str, Any], query_type: str, key_bytes: int, rows: int) -> float:
    """Keys and pages once, queries, weights and lengths of each row, and the scores."""
    keys = constants["BLOCK_KEYS"]
    tile = keys * (key_bytes + 4 / PAGE_SIZE)
    return tile + rows * (row_bytes(constants, query_type) + 4 + 4 * keys)
