"""Selection for one batch of vLLM, from the metadata of its DeepseekV32 indexer backend.

Works on what vLLM's `DeepseekV32IndexerMetadata` holds and imports nothing of vLLM.
"""

from __future__ import annotations

from typing import Any

import torch

from ..kernels.read_index_k import read_index_k
from ..kernels.select_topk import paged_select_topk, select_topk


def select_batch(
    metadata: Any,
    cache: torch.Tensor,
    q: torch.Tensor,
    weights: torch.Tensor,
    topk_indices: torch.Tensor,
    *,
    max_context_len: int,
) -> None:
    """topk_indices[t] ← positions in its request that token t attends to, ascending, then −1.

    Args:
        metadata: of the batch; decode tokens come before prefill tokens.
        cache: [P, S, D+4] uint8 pages, the batch's own keys among them.
        q: [≥ tokens, H, D] e4m3fn.
        weights: [≥ tokens, H] fp32, q's scales and all other factors folded in.
        topk_indices: [≥ tokens, k] int32. Rows of no token keep what they hold.
        max_context_len: no decode token sees more keys.

    Guarantees: a row's bits do not depend on which of the paths below took it. Never synchronises.
    """
    if metadata.num_decodes:
        rows = slice(0, metadata.num_decode_tokens)
        out = topk_indices[rows]
        _select_decodes(metadata.decode, cache, q[rows], weights[rows], out, max_context_len)
    if metadata.num_prefills:
        _select_prefills(metadata.prefill, cache, q, weights, topk_indices)


def _select_decodes(
    decode: Any,
    cache: torch.Tensor,
    q: torch.Tensor,
    weights: torch.Tensor,
    out: torch.Tensor,
    max_context_len: int,
) -> None:
    """A uniform batch as it is, [requests, N] rows; any other as rows that name their request."""
    lengths, table, page_size = decode.seq_lens, decode.block_table, cache.shape[1]
    requests, next_n = lengths.shape
    row_to_request = None
    if decode.requires_padding or requests * next_n != q.shape[0]:
        lengths, row_to_request = ragged_decodes(lengths, decode.decode_lens, q.shape[0])
        requests, next_n = q.shape[0], 1
    paged_select_topk(
        q.view(requests, next_n, *q.shape[1:]),
        cache,
        weights,
        lengths,
        table,
        out.shape[1],
        max_context_len=min(max_context_len, table.shape[1] * page_size),
        row_to_request=row_to_request,
        page_size=page_size,
        out=out,
    )


def ragged_decodes(
    lengths: torch.Tensor, decode_lens: torch.Tensor, tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys that each of `tokens` rows sees, and its request, both [tokens] int32.

    Args:
        lengths: [B, N] keys seen by the last N tokens of each request.
        decode_lens: [B] tokens of each request, one request after another.
        tokens: rows; those past Σ decode_lens are padding and get request B, which no table has.
    """
    ends = decode_lens.cumsum(0)
    row = torch.arange(tokens, device=ends.device)
    request = torch.searchsorted(ends, row, right=True)
    own = request.clamp(max=ends.shape[0] - 1)
    from_here = ends[own] - row  # tokens of the request from this one on
    seen = lengths[own, -1] - from_here + 1
    return seen.to(torch.int32), request.to(torch.int32)


def _select_prefills(
    prefill: Any,
    cache: torch.Tensor,
    q: torch.Tensor,
    weights: torch.Tensor,
    topk_indices: torch.Tensor,
) -> None:
    """Chunk by chunk: the keys of its requests side by side, a window of them for each row."""
    keys: torch.Tensor | None = None
    scales: torch.Tensor | None = None
    for chunk in prefill.chunks:
        if keys is None or not chunk.skip_kv_gather:  # else further rows of the same requests
            keys, scales = read_index_k(
                cache,
                chunk.block_table,
                chunk.cu_seq_lens.diff(),
                page_size=cache.shape[1],
                head_dim=q.shape[-1],
                total=chunk.total_seq_lens,
            )
        rows = slice(chunk.token_start, chunk.token_end)
        select_topk(
            q[rows],
            keys,
            weights[rows],
            chunk.cu_seqlen_ks,
            chunk.cu_seqlen_ke,
            topk_indices.shape[1],
            k_scale=scales,
            out=topk_indices[rows],
        )
