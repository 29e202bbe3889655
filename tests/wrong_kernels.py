"""Kernels each with one fault that real ones have had. The conformance suites must find it."""

from __future__ import annotations

import torch

from lightning_indexer.testing import MqaLogitsContract, PagedMqaLogitsContract
from right_kernels import NEG_INF, mqa_logits


def _row_windows(logits, row_starts, row_ends):
    for t, row in enumerate(logits.float()):
        start = 0 if row_starts is None else max(int(row_starts[t]), 0)
        end = len(row) if row_ends is None else max(int(row_ends[t]), start)
        window = row[start:end]
        usable = (~window.isnan() & (window != NEG_INF)).nonzero().flatten()
        yield t, window, usable


def topk_ties_to_the_larger(logits, k, row_starts=None, row_ends=None):
    """Sorts the row from its end, so that the last of equal scores comes first."""
    out = torch.full((logits.shape[0], k), -1, dtype=torch.int32)
    for t, window, usable in _row_windows(logits, row_starts, row_ends):
        usable = usable.flip(0)
        order = window[usable].sort(descending=True, stable=True).indices[:k]
        chosen = usable[order].sort().values
        out[t, : len(chosen)] = chosen.to(torch.int32)
    return out


def topk_with_a_capacity(logits, k, row_starts=None, row_ends=None):
    """Ranks only the first 128 candidates of the histogram bin that holds the k-th score."""
    out = torch.full((logits.shape[0], k), -1, dtype=torch.int32)
    for t, window, usable in _row_windows(logits, row_starts, row_ends):
        scores = window[usable]
        coarse = scores.to(torch.float16).float()
        if len(scores) > k:
            edge = coarse.sort(descending=True).values[k - 1]
            above, at = coarse > edge, (coarse == edge).nonzero().flatten()
            kept = torch.cat([above.nonzero().flatten(), at[: max(128, k - int(above.sum()))]])
            kept = kept.sort().values
            usable, scores = usable[kept], scores[kept]
        order = scores.sort(descending=True, stable=True).indices[:k]
        chosen = usable[order].sort().values
        out[t, : len(chosen)] = chosen.to(torch.int32)
    return out


def mqa_logits_with_the_end(q, k, weights, row_starts, row_ends, k_scale=None):
    """The key at row_ends is seen: ≤ where < is meant."""
    return mqa_logits(q, k, weights, row_starts, row_ends + (row_ends > row_starts), k_scale)


mqa_logits_with_the_end.lightning_indexer_contract = MqaLogitsContract(batch_invariant=False)


def paged_mqa_logits_interleaved(
    q, cache, weights, context_lens, block_table, *, max_context_len, page_size
):
    """Takes the declared shape for the layout: each token's values, then its scale."""
    requests, next_n, _, dim = q.shape
    out = torch.full((requests * next_n, max_context_len), NEG_INF)
    tokens = cache.flatten(1)[:, : page_size * (dim + 4)].reshape(-1, page_size, dim + 4)
    for b in range(requests):
        mine = tokens[block_table[b].long()].flatten(0, 1)
        keys = mine[:, :dim].contiguous().view(torch.float8_e4m3fn).float()
        scales = mine[:, dim:].contiguous().view(torch.float32).flatten()
        for j in range(next_n):
            t, seen = b * next_n + j, int(context_lens[b]) - next_n + 1 + j
            if seen > 0:
                dots = torch.relu(q[b, j].float() @ keys[:seen].T)
                out[t, :seen] = weights[t] @ dots * scales[:seen]
    return out


paged_mqa_logits_interleaved.lightning_indexer_contract = PagedMqaLogitsContract(
    calls=(("nominal 4-D", torch.float8_e4m3fn),),
    forms=("drafts",),
    batch_invariant=False,
    garbage=False,
)


def compact_forward(buffers, rows, *, num_rows=None):
    """Copies row after row in place: a row may have been overwritten before it is read."""
    for buffer in buffers:
        limit = buffer.shape[0] if num_rows is None else num_rows
        for i, row in enumerate(rows.tolist()):
            buffer[i] = buffer[row] if 0 <= row < limit else -1


def slots_of_page_zero(indices, block_table, row_to_request, page_size):
    """Right, but for −1: it is clamped to position 0, whose slot is a live one."""
    indices = torch.where(indices == -1, 0, indices)
    block = torch.div(indices, page_size, rounding_mode="floor")
    requests = row_to_request.long()[:, None].expand_as(block)
    known = (block >= 0) & (block < block_table.shape[1])
    known &= (requests >= 0) & (requests < len(block_table))
    page = block_table[torch.where(known, requests, 0), torch.where(known, block, 0).long()]
    return torch.where(known & (page >= 0), page * page_size + indices % page_size, -1)


def sparse_attention_base_2(q, kv, indices, scale, v_dim):
    """Right, but for an lse that is the binary logarithm."""
    known = (indices >= 0) & (indices < kv.shape[0])
    keys = torch.where(known[..., None], kv[indices.clamp(0, kv.shape[0] - 1).long()].float(), 0.0)
    scores = torch.einsum("thd,twd->thw", q.float(), keys) * scale
    scores = scores.masked_fill(~known[:, None], NEG_INF)
    share = torch.where(known.any(1)[:, None, None], torch.softmax(scores, dim=2), 0.0)
    out = torch.einsum("thw,twd->thd", share, keys[..., :v_dim]).to(q.dtype)
    return out, scores.logsumexp(dim=2) / torch.log(torch.tensor(2.0))
