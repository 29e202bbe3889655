"""vLLM's Triton kernels of attention over selected slots: for XPU, and for prefill on ROCm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import Any
from unittest import mock

import torch

from lightning_indexer.testing import SparseAttentionContract

from .interpreter import interpreted
from .peer import Peer, Probe

XPU = "vllm.v1.attention.ops.xpu_mla_sparse"
ROCM = "vllm.v1.attention.ops.rocm_aiter_mla_sparse"
TILE = 16  # the XPU kernel takes widths of a multiple of it


def xpu() -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """triton_bf16_mla_sparse_interface; rows padded to whole tiles with −1."""
    home = import_module(XPU)

    @interpreted
    def triton_bf16_mla_sparse_interface(
        q,
        kv,
        indices,
        scale,
        v_dim,
    ):
        rows, width = indices.shape
        padded = torch.full((rows, 1, -(-width // TILE) * TILE), -1, dtype=torch.int32)
        padded[:, 0, :width] = indices
        out, _, lse = home.triton_bf16_mla_sparse_interface(
            q.contiguous(), kv.unsqueeze(1).contiguous(), padded, scale, d_v=v_dim
        )
        return out, lse

    return triton_bf16_mla_sparse_interface


def without_lse(load: Callable[[], Callable[..., tuple]]) -> Callable[[], Callable[..., object]]:
    """Of a function's results the first."""

    def loaded() -> Callable[..., object]:
        fn = load()

        def out_alone(*args: object) -> object:
            return fn(*args)[0]

        return out_alone

    return loaded


def _listed(home: Any, indices: torch.Tensor, slots: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The slots of all rows side by side, and where each row begins, as its backends make them."""
    lengths = torch.full((len(indices),), indices.shape[1], dtype=torch.int32)
    return home.build_ragged_indices_from_dense(indices, lengths, num_rows=slots)


def rocm(name: str, **options: object) -> Callable[[], Callable[..., torch.Tensor]]:
    """A launcher of ROCm's that takes ragged indices; it is told that no tensor is on a CPU."""

    def loaded() -> Callable[..., torch.Tensor]:
        home = import_module(ROCM)

        @interpreted
        def attend(q, kv, indices, scale, v_dim):
            flat, starts = _listed(home, indices, len(kv))
            out = torch.empty((*q.shape[:2], v_dim), dtype=q.dtype)
            given = {"ragged_indices": flat, "ragged_indptr": starts, "attn_sink": None}
            sizes = {"head_dim": q.shape[2], "nope_head_dim": v_dim}
            with mock.patch.object(torch.Tensor, "is_cpu", False):
                getattr(home, name)(
                    q=q,
                    kv=kv.unsqueeze(1),
                    scale=scale,
                    output=out,
                    rope_head_dim=q.shape[2] - v_dim,
                    **given,
                    **sizes,
                    **options,
                )
            return out

        return attend

    return loaded


#: Latents of 512 and 64 rotary elements, bf16; weights are rounded to bf16 before the product.
WIDE = SparseAttentionContract(
    caches=("floats",),
    dims=((576, 512),),
    dtypes=(torch.bfloat16,),
    heads=(1, 3, 16),
    operand=2.0**-8,
    lse=False,
    batch_invariant=False,
    layouts=("contiguous",),
    max_rows=2,
    max_width=40,
    empty_sizes=False,
)
RAGGED = SparseAttentionContract(
    caches=("floats",),
    dtypes=(torch.bfloat16, torch.float32),
    operand=2.0**-8,
    lse=False,
    batch_invariant=False,
    layouts=("contiguous", "padded", "odd offset"),
    empty_sizes=False,
)
SPLIT = replace(
    RAGGED,
    dims=((16, 16), (32, 16), (128, 64)),
    heads=(1, 3, 17),
    layouts=("contiguous",),
    max_rows=2,
    max_width=40,
)


def _bits(contract: SparseAttentionContract) -> Probe:
    return Probe(
        "−1 appended to a row changes none of its bits",
        replace(contract, batch_invariant=True),
        ("appended",),
    )


PEERS = (
    Peer(
        name="triton_bf16_mla_sparse_interface",
        package="vllm",
        source=f"docstring and comments, {XPU.replace('.', '/')}.py",
        promises="bf16 attention over listed rows of 576, values of 512; indices below 0 or past"
        " the pool are masked, leading ones too",
        op="sparse_attention",
        load=without_lse(xpu),
        contract=WIDE,
        probes=(_bits(WIDE),),
        triton=True,
    ),
    Peer(
        name="triton_bf16_mla_sparse_interface: lse",
        package="vllm",
        source=f"docstring, {XPU.replace('.', '/')}.py",
        promises="the natural logarithm of the sum of exponentials, beside the output; here of rows"
        " that list slots",
        op="sparse_attention",
        load=xpu,
        contract=replace(WIDE, lse=True, empty_rows=False),
        probes=(
            Probe(
                "an empty row has the lse −inf",
                replace(WIDE, lse=True),
                ("with normal",),
            ),
        ),
        triton=True,
    ),
    Peer(
        name="rocm_sparse_attn_prefill",
        package="vllm",
        source=f"comments in `build_ragged_indices_from_dense`, {ROCM.replace('.', '/')}.py",
        promises="attention over listed rows; −1 anywhere and rows past the pool are dropped"
        " before; no lse",
        op="sparse_attention",
        load=rocm("rocm_sparse_attn_prefill", indices=None, topk_length=None),
        contract=RAGGED,
        probes=(
            _bits(RAGGED),
            Probe(
                "index rows of any stride",
                replace(RAGGED, layouts=("strided",)),
                ("with normal",),
            ),
        ),
        triton=True,
    ),
    Peer(
        name="rocm_sparse_attn_decode_bf16",
        package="vllm",
        source=f"docstrings, {ROCM.replace('.', '/')}.py",
        promises="the same over an unquantized cache; a row's slots are split over 3 workgroups,"
        " and their partial results combined",
        op="sparse_attention",
        load=rocm("rocm_sparse_attn_decode_bf16", num_splits=3),
        contract=SPLIT,
        probes=(_bits(SPLIT),),
        triton=True,
    ),
)
