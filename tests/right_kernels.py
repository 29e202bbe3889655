"""Kernels of other hands: PyTorch alone, written from the formulas, with promises of their own."""

from __future__ import annotations

import torch

from lightning_indexer.testing import (
    CompactContract,
    MqaLogitsContract,
    PagedMqaLogitsContract,
    SlotsContract,
    SparseAttentionContract,
    TopkContract,
)

NEG_INF = float("-inf")


def torch_topk(logits: torch.Tensor, k: int) -> torch.Tensor:
    """What torch.topk promises: best first, any of equal scores, NaN greatest, no short rows."""
    return torch.topk(logits, k, dim=1).indices


torch_topk.lightning_indexer_contract = TopkContract(
    order="score",
    tie_rule="any",
    nan="greatest",
    neg_inf="least",
    padding=None,
    windows=("none",),
    index_dtype=torch.int64,
)


def topk_set(
    logits: torch.Tensor, k: int, row_starts: torch.Tensor | None, row_ends: torch.Tensor
) -> torch.Tensor:
    """A set: any order, padding anywhere, any of equal scores, columns for positions."""
    rows, length = logits.shape
    places = torch.arange(length)
    starts = torch.zeros(rows, 1) if row_starts is None else row_starts[:, None]
    seen = (places >= starts) & (places < row_ends[:, None]) & ~logits.isnan()
    scores = torch.where(seen, logits.float(), NEG_INF)
    got = torch.full((rows, k), -1, dtype=torch.int32)
    best = scores.flip(1).topk(min(k, length), dim=1, sorted=False)
    found = torch.where(best.values == NEG_INF, -1, length - 1 - best.indices)
    got[:, k - found.shape[1] :] = found.to(torch.int32)
    return got


topk_set.lightning_indexer_contract = TopkContract(
    order="any", tie_rule="any", positions="absolute", windows=("ends", "both")
)


def topk_by_sorting(
    logits: torch.Tensor,
    k: int,
    row_starts: torch.Tensor | None = None,
    row_ends: torch.Tensor | None = None,
    *,
    out: torch.Tensor,
) -> None:
    """All that this package promises, into `out`, by a stable sort of every row."""
    out.fill_(-1)
    for t, row in enumerate(logits.float()):
        start = 0 if row_starts is None else max(int(row_starts[t]), 0)
        end = len(row) if row_ends is None else max(int(row_ends[t]), start)
        window = row[start:end]
        usable = (~window.isnan() & (window != NEG_INF)).nonzero().flatten()
        order = window[usable].sort(descending=True, stable=True).indices[:k]
        chosen = usable[order].sort().values
        out[t, : len(chosen)] = chosen.to(torch.int32)


topk_by_sorting.lightning_indexer_contract = TopkContract(takes_out=True)


def mqa_logits(q, k, weights, row_starts, row_ends, k_scale=None):
    """One einsum: its bits depend on the shapes."""
    dots = torch.einsum("thd,ld->thl", q.float(), k.float()).clamp(min=0)
    dots = torch.where(dots.isnan(), torch.nan, dots)
    scores = torch.einsum("thl,th->tl", dots, weights)
    if k_scale is not None:
        scores = scores * k_scale
    places = torch.arange(k.shape[0])
    seen = (places >= row_starts[:, None]) & (places < row_ends[:, None])
    return torch.where(seen, scores, NEG_INF)


mqa_logits.lightning_indexer_contract = MqaLogitsContract(batch_invariant=False)


def mqa_logits_in_bf16(q, k, weights, row_starts, row_ends):
    """Heads are added in bf16, and what lies outside the windows is left as it comes."""
    total = torch.zeros(q.shape[0], k.shape[0], dtype=torch.bfloat16)
    for h in range(q.shape[1]):
        dots = torch.relu(q[:, h].float() @ k.float().T)
        total += (dots * weights[:, h : h + 1]).to(torch.bfloat16)
    return total.float()


mqa_logits_in_bf16.lightning_indexer_contract = MqaLogitsContract(
    batch_invariant=False,
    outside="anything",
    special_values=False,
    scaled=(False,),
    rounding=2.0**-8,
    heads=(1, 2, 4, 8),
    head_dims=(8, 32),
    windows=("full", "causal"),
    dtypes=("bf16", "fp16"),
    layouts=("contiguous",),
    empty_sizes=False,
)


def paged_mqa_logits(
    q, cache, weights, context_lens, block_table, *, max_context_len, page_size
) -> torch.Tensor:
    """Pages of the quantised cache, one request and one row at a time."""
    requests, next_n, _, dim = q.shape
    out = torch.full((requests * next_n, max_context_len), NEG_INF)
    raw = cache.flatten(1)
    for b in range(requests):
        pages = raw[block_table[b].long()]
        values = pages[:, : page_size * dim].contiguous().view(torch.float8_e4m3fn)
        keys = values.float().view(-1, dim)
        scales = pages[:, page_size * dim : page_size * (dim + 4)].contiguous()
        scales = scales.view(torch.float32).flatten()
        for j in range(next_n):
            t, seen = b * next_n + j, int(context_lens[b]) - next_n + 1 + j
            if seen > 0:
                dots = torch.relu(q[b, j].float() @ keys[:seen].T)
                out[t, :seen] = weights[t] @ dots * scales[:seen]
    return out


paged_mqa_logits.lightning_indexer_contract = PagedMqaLogitsContract(
    calls=(("nominal 4-D", torch.float8_e4m3fn), ("padded flat pages", torch.bfloat16)),
    forms=("drafts",),
    batch_invariant=False,
    garbage=False,
)


def compact(buffer: torch.Tensor, rows: torch.Tensor) -> None:
    """One buffer, known rows only, through a copy."""
    buffer[: len(rows)] = buffer.clone()[rows.long()]


compact.lightning_indexer_contract = CompactContract(
    several=False, num_rows=False, orders=("random", "reversed", "last of each")
)


def to_slots(
    indices: torch.Tensor, block_table: torch.Tensor, row_to_request: torch.Tensor, page_size: int
) -> torch.Tensor:
    """Trusts its inputs but for the position −1."""
    pages = block_table[row_to_request.long()].gather(1, indices.clamp(min=0).long() // page_size)
    return torch.where(indices < 0, -1, pages * page_size + indices % page_size)


to_slots.lightning_indexer_contract = SlotsContract(garbage=False)


def sparse_attention(q, kv, indices, scale, v_dim):
    """Gathers, masks, softmax in fp32; no lse."""
    known = (indices >= 0) & (indices < kv.shape[0])
    keys = torch.where(known[..., None], kv[indices.clamp(0, kv.shape[0] - 1).long()].float(), 0.0)
    scores = torch.einsum("thd,twd->thw", q.float(), keys) * scale
    scores = scores.masked_fill(~known[:, None], NEG_INF)
    share = torch.softmax(scores, dim=2)
    share = torch.where(known.any(1)[:, None, None], share, 0.0)  # no softmax of an empty row
    return torch.einsum("thw,twd->thd", share, keys[..., :v_dim]).to(q.dtype)


sparse_attention.lightning_indexer_contract = SparseAttentionContract(caches=("floats",), lse=False)
