"""What `sparse_mla_attention` compiles: DeepSeek's rows for 1 to 128 heads, and other widths."""

from __future__ import annotations

from typing import Any

from ..kernels.backend import Target, triton
from ..kernels.sparse_mla_kernel import _merge_chunks_kernel, _sparse_mla_attention_kernel
from ..kernels.sparse_mla_launch import kernel_constants, merge_constants
from .case import CompileCase, Work
from .mqa_logits import DTYPES

_OP = "sparse_mla_attention"
_KERNEL = "_sparse_mla_attention_kernel"
#: The loop over keys. Where most of its lines lie in one of the unrolled loops inside it (in fp32,
#: without tensor cores), that one stands for it.
_LOOPS = (f"{_KERNEL}#1", "_add_products#1", "_add_weighted#1", "_load_slices#1")
_B, _W = 64, 2048
_DIM, _V_DIM, _ROW_BYTES = 576, 512, 656


def cases(target: Target) -> list[CompileCase]:
    """Contiguous tensors, as engines have them, at the decode batch of the floors in the docs."""
    found = [
        _case(target, q, kv, heads)
        for q, kv, heads in (
            ("bf16", "bf16", 1),
            ("bf16", "bf16", 16),
            ("bf16", "bf16", 32),
            ("bf16", "bf16", 128),
            ("bf16", "u8", 16),
            ("bf16", "u8", 32),
            ("bf16", "u8", 128),
            ("fp16", "fp16", 16),
            ("fp16", "fp16", 128),
            ("fp16", "u8", 128),
            ("fp32", "fp32", 16),
        )
    ]
    found += [
        _case(target, "bf16", "bf16", 128, width=64),
        _case(target, "bf16", "u8", 16, width=64, index="i64"),
        _case(target, "bf16", "bf16", 16, dim=192, v_dim=128),
        _case(target, "fp16", "fp16", 24, dim=100, v_dim=100),
        _case(target, "fp32", "fp32", 4, dim=40, v_dim=32),
    ]
    return [*found, _merge_case(target, 128, _V_DIM, "bf16"), _merge_case(target, 16, 100, "fp32")]


def _case(
    target: Target,
    q: str,
    kv: str,
    heads: int,
    *,
    dim: int = _DIM,
    v_dim: int = _V_DIM,
    width: int = _W,
    index: str = "i32",
) -> CompileCase:
    dtypes = DTYPES[q][0], DTYPES[kv][0]
    constants = kernel_constants(target, *dtypes, heads, dim, v_dim)
    limits = {
        "num_warps": constants.pop("num_warps"),
        "num_stages": constants.pop("num_stages"),
        "max_registers": constants.pop("maxnreg", None),
    }
    splits = triton.cdiv(width, constants["CHUNK"])
    unit_strides = ("qd", "vd", "rd", "iw", "od", "lh")
    constants |= {f"stride_{name}": 1 for name in unit_strides}
    if kv != "u8":
        constants |= {"factors_ptr": None, "stride_fs": 0}
    if splits == 1:
        constants |= {"sums_ptr": None, "states_ptr": None, "splits": 1}
    pointers = {
        "q_ptr": f"*{q}",
        "values_ptr": f"*{kv}",
        "factors_ptr": "*fp32",
        "rest_ptr": "*bf16" if kv == "u8" else f"*{kv}",
        "indices_ptr": f"*{index}",
        "out_ptr": f"*{q}",
        "lse_ptr": "*fp32",
        "sums_ptr": "*fp32",
        "states_ptr": "*fp32",
    }
    types = {**pointers, "scale": "fp32"}
    signature = {
        name: types.get(name, "i32")
        for name in _sparse_mla_attention_kernel.arg_names
        if name not in constants
    }
    row = _ROW_BYTES if kv == "u8" else dim  # of values; factors and RoPE lie apart in other units
    strides = {
        "stride_qt": heads * dim,
        "stride_qh": dim,
        "stride_vs": row,
        "stride_fs": row // 4,
        "stride_rs": row // 2 if kv == "u8" else row,
        "stride_it": width,
        "stride_ot": heads * v_dim,
        "stride_oh": v_dim,
        "stride_lt": heads,
        "W": width,
        "slots": 64,
    }
    offsets = {"rest_ptr": (512 + 16 if kv == "u8" else v_dim * DTYPES[kv][2]), "factors_ptr": 512}
    divisible = [name for name in pointers if offsets.get(name, 0) % 16 == 0]
    divisible += [name for name, stride in strides.items() if stride % 16 == 0]
    return CompileCase(
        _OP,
        f"q {q}, kv {kv}, H={heads} {dim}/{v_dim}{'' if width == _W else f' W={width}'}",
        _sparse_mla_attention_kernel,
        signature,
        constants,
        **limits,
        divisible=tuple(name for name in divisible if name in signature),
        tensor_op=_tensor_op(target, q, constants["BLOCK_H"]),
        dtype=DTYPES[q][1],
        work=(_decode(constants, q, kv, dim, v_dim, width, index),),
    )


def _tensor_op(target: Target, query: str, block_h: int) -> str | None:
    """The tensor-core instruction that must come out: the big ones take 64 rows or more."""
    if query == "fp32":
        return None
    if target.backend == "hip":
        return "v_mfma"
    large = {90: "wgmma", 100: "tcgen05.mma"} if block_h >= 64 else {}
    return large.get(int(target.arch), "mma.sync")


def _decode(
    constants: dict[str, Any], q: str, kv: str, dim: int, v_dim: int, width: int, index: str
) -> Work:
    """One query row a request, every index a slot; a unit is a selected key, with all heads."""
    heads, chunk, keys = constants["H"], constants["CHUNK"], constants["BLOCK_KEYS"]
    tiles, splits = triton.cdiv(heads, constants["BLOCK_H"]), triton.cdiv(width, chunk)
    row = _ROW_BYTES if kv == "u8" else dim * DTYPES[kv][2]
    held = min(width, chunk)
    results = heads * (v_dim + 2) * 4 if splits > 1 else heads * (v_dim * DTYPES[q][2] + 4)
    moved = held * tiles * (row + 2 * (8 if index == "i64" else 4)) + heads * dim * DTYPES[q][2]
    return Work(
        unit="key",
        shape={"B": _B, "W": width, "H": heads, "Dqk": dim, "v_dim": v_dim},
        units=held / tiles,
        programs=_B * splits * tiles,
        bytes=(moved + results) / held,
        flops=2 * heads * (dim + v_dim),
        trips=dict.fromkeys(_LOOPS, held / keys),
    )


def _merge_case(target: Target, heads: int, v_dim: int, out: str) -> CompileCase:
    constants = merge_constants(target, heads, v_dim)
    warps = constants.pop("num_warps")
    constants |= {"FIXED_SPLITS": None, "stride_od": 1, "stride_lh": 1}
    pointers = {
        "out_ptr": f"*{out}",
        "lse_ptr": "*fp32",
        "sums_ptr": "*fp32",
        "states_ptr": "*fp32",
    }
    signature = {
        name: pointers.get(name, "i32")
        for name in _merge_chunks_kernel.arg_names
        if name not in constants
    }
    strides = {"stride_ot": heads * v_dim, "stride_oh": v_dim, "stride_lt": heads}
    splits = 4
    size = DTYPES[out][2]
    return CompileCase(
        _OP,
        f"merge to {out}, H={heads} v_dim={v_dim}",
        _merge_chunks_kernel,
        signature,
        constants,
        num_warps=warps,
        divisible=(*pointers, *(name for name, stride in strides.items() if stride % 16 == 0)),
        dtype="fp32",
        work=(
            Work(
                unit="partial sum",
                shape={"B": _B, "splits": splits, "H": heads, "v_dim": v_dim},
                units=constants["BLOCK_H"] * v_dim * splits,
                programs=_B * triton.cdiv(heads, constants["BLOCK_H"]),
                bytes=4 + (4 * 3 * splits + v_dim * size + 4) / (v_dim * splits),
                trips={"_merge_chunks_kernel#1": splits, "_merge_chunks_kernel#2": splits},
            ),
        ),
    )
