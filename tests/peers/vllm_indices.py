"""vLLM's selection, index conversion and compaction of shared indices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from lightning_indexer.testing import CompactContract, SlotsContract, TopkContract

from .interpreter import interpreted
from .peer import Peer, Probe
from .torch_selection import stricter

TILE = 128  # the conversion takes widths of a multiple of it


@cache
def selection() -> Callable[..., torch.Tensor]:
    """The decode top-k of the sparse indexer, by its PyTorch backend."""
    module = import_module("vllm.model_executor.layers.indexer_topk").SparseIndexerTopk("torch")

    def indexer_topk(
        logits: torch.Tensor, k: int, row_starts: None, row_ends: torch.Tensor
    ) -> torch.Tensor:
        rows, length = logits.shape
        chosen = torch.empty((rows, k), dtype=torch.int32)
        module(logits, row_ends.to(torch.int32), 1, chosen, k, length)
        return chosen

    return indexer_topk


def conversion() -> Callable[..., torch.Tensor]:
    """The Triton kernel from positions of a request to slots; rows padded to whole tiles."""
    home = import_module("vllm.v1.attention.backends.mla.sparse_utils")

    @interpreted
    def convert(
        indices: torch.Tensor,
        block_table: torch.Tensor,
        row_to_request: torch.Tensor,
        page_size: int,
    ) -> torch.Tensor:
        rows, width = indices.shape
        padded = torch.full((rows, -(-width // TILE) * TILE), -1, dtype=torch.int32)
        padded[:, :width] = indices
        slots = home.triton_convert_req_index_to_global_index(
            row_to_request,
            block_table,
            padded,
            BLOCK_SIZE=page_size,
            NUM_TOPK_TOKENS=padded.shape[1],
            BLOCK_N=TILE,
        )
        return slots[:, :width]

    return convert


def _attention(buffer: torch.Tensor) -> Any:
    """A layer's attention as far as compaction looks at it."""
    found = SimpleNamespace(topk_indices_buffer=buffer, skip_topk=False)
    found.mla_attn = found
    return SimpleNamespace(self_attn=found)


def compaction(module: str, name: str, *, one_buffer: bool) -> Callable[..., None]:
    """`compact_topk_indices` of a model, which gets a layer for each buffer and nothing else."""
    method = getattr(import_module(module), name).compact_topk_indices

    def compact(buffers: list[torch.Tensor], rows: torch.Tensor) -> None:
        if one_buffer:
            method(SimpleNamespace(topk_indices_buffer=buffers), rows)
            return
        layers = {str(i): nn.Module() for i in range(len(buffers))}
        for layer, buffer in zip(layers.values(), buffers, strict=True):
            layer.mtp_block = _attention(buffer)
        method(SimpleNamespace(layers=layers), rows)

    return compact


SELECTION = TopkContract(
    order="any",
    tie_rule="any",
    nan="absent",
    neg_inf="absent",
    windows=("ends",),
    k_past_length=False,
    dtypes=(torch.float32,),
    deterministic=False,
    empty_sizes=False,
)
SLOTS = SlotsContract(garbage=False, request_dtypes=(torch.int32,))
COMPACT = CompactContract(
    repeats=False, num_rows=False, orders=("random", "reversed", "shifted", "last of each")
)


def _compact_peer(module: str, name: str, *, one_buffer: bool = False) -> Peer:
    contract = replace(COMPACT, several=not one_buffer)
    unknown = replace(contract, orders=("wild",))
    probes = (Probe("unknown row ids give rows of −1", unknown, ("wild",)),)
    if not one_buffer:
        twice = replace(contract, repeats=True)
        probes += (Probe("a buffer that two layers share moves once", twice, ("together",)),)
    return Peer(
        name=f"{name}.compact_topk_indices",
        package="vllm",
        source=f"docstring, {module.replace('.', '/')}.py",
        promises="the rows at `slot_ids` are gathered to the front of the buffer"
        + ("" if one_buffer else " of each MTP layer"),
        op="compact",
        load=lambda: compaction(module, name, one_buffer=one_buffer),
        contract=contract,
        probes=probes,
        triton=True,
    )


PEERS = (
    Peer(
        name='SparseIndexerTopk("torch")',
        package="vllm",
        source="`SparseIndexerTopk.forward`, vllm/model_executor/layers/indexer_topk.py",
        promises="int32, −1 fill for rows shorter than k; order, ties, NaN and −inf are not"
        " mentioned (debug reference; the other backends need a GPU)",
        op="topk",
        load=selection,
        contract=SELECTION,
        probes=(
            *stricter(SELECTION, "the smaller position of equal scores", "ascending positions"),
            Probe(
                "−inf within the row is never selected",
                replace(SELECTION, neg_inf="skipped"),
                ("infinite",),
            ),
            Probe(
                "−inf within the row is the least score",
                replace(SELECTION, neg_inf="least"),
                ("infinite",),
            ),
            Probe("NaN is never selected", replace(SELECTION, nan="skipped"), ("nan",)),
            Probe("k > L: −1 past the row", replace(SELECTION, k_past_length=True), ("of normal",)),
        ),
        triton=True,
    ),
    Peer(
        name="triton_convert_req_index_to_global_index",
        package="vllm",
        source="docstring, vllm/v1/attention/backends/mla/sparse_utils.py",
        promises="page·size + offset; −1 for −1 and where the page is past the table",
        op="slots",
        load=conversion,
        contract=SLOTS,
        probes=(
            Probe(
                "−1 for unknown requests and pages that were never assigned",
                replace(SLOTS, garbage=True),
                ("garbage",),
            ),
        ),
        triton=True,
    ),
    _compact_peer("vllm.model_executor.models.deepseek_mtp", "DeepSeekMultiTokenPredictor"),
    _compact_peer("vllm.models.deepseek_v32.nvidia.mtp", "DeepseekV32MultiTokenPredictor"),
    _compact_peer("vllm.models.hy_v4.nvidia.mtp", "HYV4MultiTokenPredictor", one_buffer=True),
)
