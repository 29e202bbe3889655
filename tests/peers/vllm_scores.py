"""vLLM's indexer scores over fp8 keys: PyTorch references, and the Triton kernel for ROCm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace
from unittest import mock

import torch

from lightning_indexer.testing import MqaLogitsContract, PagedMqaLogitsContract
from lightning_indexer.testing.contracts import ScoreContract

from .interpreter import interpreted
from .peer import Peer, Probe

HOME = "vllm.v1.attention.ops.rocm_aiter_mla_sparse"
FILE = HOME.replace(".", "/") + ".py"
FP8 = torch.float8_e4m3fn
#: The workspace holds what the call before left there.
LEFT_BEHIND = 12345.0


def ragged_torch() -> Callable[..., torch.Tensor]:
    """fp8_mqa_logits_torch."""
    home = import_module(HOME)

    def fp8_mqa_logits_torch(q, k, weights, row_starts, row_ends, k_scale):
        return home.fp8_mqa_logits_torch(q, (k, k_scale), weights, row_starts, row_ends)

    return fp8_mqa_logits_torch


def paged_torch() -> Callable[..., torch.Tensor]:
    """fp8_paged_mqa_logits_torch, over a whole number of pages."""
    home = import_module(HOME)

    def fp8_paged_mqa_logits_torch(
        q, cache, weights, context_lens, block_table, *, max_context_len, page_size
    ):
        lengths = context_lens.to(torch.int32)
        whole = -(-max_context_len // page_size) * page_size
        scores = home.fp8_paged_mqa_logits_torch(q, cache, weights, lengths, block_table, whole)
        return scores[:, :max_context_len]

    return fp8_paged_mqa_logits_torch


def paged_torch_repacked() -> Callable[..., torch.Tensor]:
    """The same; for next_n > 1 the bytes of a page are put token by token first."""
    score = paged_torch()

    def fp8_paged_mqa_logits_torch(q, cache, *args, **kwargs):
        if q.shape[1] > 1:
            cache = _token_by_token(cache, q.shape[3])
        return score(q, cache, *args, **kwargs)

    return fp8_paged_mqa_logits_torch


def _token_by_token(cache: torch.Tensor, dim: int) -> torch.Tensor:
    """From all values of a page and then its scales to each token's values, then its scale."""
    pages, size = cache.shape[:2]
    flat = cache.reshape(pages, -1)
    values = flat[:, : size * dim].view(pages, size, dim)
    scales = flat[:, size * dim :].view(pages, size, 4)
    return torch.cat([values, scales], dim=2).unsqueeze(2)


def paged_triton() -> Callable[..., torch.Tensor]:
    """rocm_fp8_paged_mqa_logits_triton, with a workspace and a device of two compute units."""
    home = import_module(HOME)

    def used(*specs: tuple[tuple[int, ...], torch.dtype]) -> list[torch.Tensor]:
        return [torch.full(shape, LEFT_BEHIND, dtype=dtype) for shape, dtype in specs]

    @interpreted
    def rocm_fp8_paged_mqa_logits_triton(
        q,
        cache,
        weights,
        context_lens,
        block_table,
        *,
        max_context_len,
        page_size,
    ):
        workspace = SimpleNamespace(get_simultaneous=used)
        with mock.patch.multiple(
            home, current_workspace_manager=lambda: workspace, _decode_cu_count=lambda: 2
        ):
            lengths = context_lens.to(torch.int32)
            return home.rocm_fp8_paged_mqa_logits_triton(
                q, cache, weights, lengths, block_table, max_context_len
            )

    return rocm_fp8_paged_mqa_logits_triton


RAGGED = MqaLogitsContract(
    dtypes=("fp8",),
    scaled=(True,),
    batch_invariant=False,
    rounding=2.0**-13,  # q·k is rounded to bf16, by 2^-8 of it: less than (32+1+3)·2^-13
    special_values=False,
    heads=(1, 4, 16),
    head_dims=(32, 64, 128),
    empty_sizes=False,
)
PAGED = PagedMqaLogitsContract(
    calls=(("nominal 4-D", FP8),),
    forms=("drafts", "own lengths"),
    page_sizes=(16, 64),
    heads=(16, 32, 64),
    head_dims=(32, 128),
    max_next_n=1,
    batch_invariant=False,
    special_values=False,
    garbage=False,
    layouts=("contiguous",),
    empty_sizes=False,
)
TRITON = replace(PAGED, outside="anything", page_sizes=(64,), max_next_n=2, max_length=130)
NORMAL = ("scores normal", "scores ties")


def _special(contract: ScoreContract) -> Probe:
    return Probe(
        "NaN in a key reaches its scores, and no others",
        replace(contract, special_values=True),
        ("scores nan", "scores infinite"),
    )


PEERS = (
    Peer(
        name="fp8_mqa_logits_torch",
        package="vllm",
        source=f"docstring, {FILE}",
        promises="fp32 scores of fp8 queries and keys with a scale a key in windows [start, end),"
        " −inf outside; q·k is a product of bf16",
        op="mqa_logits",
        load=ragged_torch,
        contract=RAGGED,
        probes=(
            _special(RAGGED),
            Probe(
                "fp32 throughout",
                replace(RAGGED, rounding=2.0**-24),
                ("scores normal", "scores spread"),
            ),
            Probe(
                "a score's bits depend on its query and key alone",
                replace(RAGGED, batch_invariant=True),
                ("split over two calls", "move with"),
            ),
        ),
        triton=True,
    ),
    Peer(
        name="fp8_paged_mqa_logits_torch",
        package="vllm",
        source=f"docstring of its caller `rocm_fp8_paged_mqa_logits`, {FILE}",
        promises="fp32 scores over a paged cache [P, S, 1, D+4] of bytes, lengths [B] or"
        " [B, next_n]; judged with next_n = 1 and −inf past a row's length",
        op="paged_mqa_logits",
        load=paged_torch,
        contract=PAGED,
        probes=(
            _special(PAGED),
            Probe("next_n of 2 over the same bytes", replace(PAGED, max_next_n=2), NORMAL),
            Probe(
                "pages and lengths out of range score −inf",
                replace(PAGED, garbage=True),
                ("garbage",),
            ),
            Probe(
                "strided queries, weights and tables", replace(PAGED, layouts=("strided",)), NORMAL
            ),
        ),
        triton=True,
    ),
    Peer(
        name="fp8_paged_mqa_logits_torch: next_n > 1",
        package="vllm",
        source=f"code, {FILE}",
        promises="the same for next_n > 1, of pages that hold each token's values, then its scale",
        op="paged_mqa_logits",
        load=paged_torch_repacked,
        contract=replace(PAGED, max_next_n=3),
        triton=True,
    ),
    Peer(
        name="rocm_fp8_paged_mqa_logits_triton",
        package="vllm",
        source=f"docstring and comments, {FILE}",
        promises='"matches the torch ref", for pages of 64 tokens and any next_n; what is past a'
        " row's length is not mentioned",
        op="paged_mqa_logits",
        load=paged_triton,
        contract=TRITON,
        probes=(
            _special(TRITON),
            Probe("−inf past a row's length", replace(TRITON, outside="-inf"), NORMAL),
            Probe(
                "pages and lengths out of range score −inf",
                replace(TRITON, garbage=True),
                ("garbage",),
            ),
            Probe(
                "strided queries, weights and tables", replace(TRITON, layouts=("strided",)), NORMAL
            ),
            Probe(
                "a score's bits depend on its query and key alone",
                replace(TRITON, batch_invariant=True),
                ("page map", "both forms"),
            ),
        ),
        triton=True,
    ),
)
