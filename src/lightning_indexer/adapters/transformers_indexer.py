"""The forward pass of a DSA indexer of transformers, with our scores and our selection."""

from __future__ import annotations

from typing import Any

import torch

from ..indexer.config import RopeStyle
from ..indexer.rope import apply_rope
from ..kernels.select_topk import select_topk

Embeddings = tuple[torch.Tensor, torch.Tensor]  # cos and sin, [B, S, rotary_dim] each


@torch.no_grad()
def indexer_forward(
    indexer: Any,
    hidden_states: torch.Tensor,
    q_resid: torch.Tensor,
    position_embeddings: Embeddings,
    attention_mask: torch.Tensor,
    position_ids: torch.Tensor | None = None,
    cache: Any = None,
    *,
    rope_style: RopeStyle,
    fill: bool,
) -> torch.Tensor:
    """Positions [B, S, min(index_topk, T)] int32 that each query attends to, from T cached keys.

    Rows of fewer candidates end in −1; with `fill`, in positions that the mask hides, as the stock
    indexer's do: its callers scatter every entry, and a kernel that gathers them counts each once.
    """
    q, k, weights = queries_keys_weights(
        indexer, hidden_states, q_resid, position_embeddings, rope_style
    )
    if cache is not None:
        k = cache.update_indexer(k, indexer.layer_idx)
    if k.dtype == torch.float64:  # stock scores in fp32 too
        q, k = q.float(), k.float()
    starts, ends = visible_windows(attention_mask.expand(q.shape[0], -1, -1))
    topk = min(indexer.index_topk, k.shape[1])
    indices = torch.empty((*q.shape[:2], topk), dtype=torch.int32, device=q.device)
    for own, keys, weight, start, end, out in zip(
        q, k, weights, starts, ends, indices, strict=True
    ):
        select_topk(own, keys, weight, start, end, topk, out=out)
    chosen = indices >= 0
    indices = torch.where(chosen, indices + starts.unsqueeze(-1), -1)
    return _fill_rows(indices, starts, ends) if fill else indices


def queries_keys_weights(
    indexer: Any,
    hidden_states: torch.Tensor,
    q_resid: torch.Tensor,
    position_embeddings: Embeddings,
    style: RopeStyle,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q [B, S, H, D], the new keys [B, S, D] as the cache keeps them, weights [B, S, H] fp32."""
    q = indexer.wq_b(q_resid).unflatten(-1, (indexer.n_heads, indexer.head_dim))
    k = indexer.k_norm(indexer.wk(hidden_states))
    cos, sin = position_embeddings
    weights = indexer.weights_proj(hidden_states.to(indexer.weights_proj.weight.dtype)).float()
    return (
        rotate(q, cos.unsqueeze(2), sin.unsqueeze(2), style),
        rotate(k, cos, sin, style),
        weights * (indexer.n_heads**-0.5 * indexer.softmax_scale),
    )


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, style: RopeStyle) -> torch.Tensor:
    """RoPE of the first dimensions of x, with the bits and in the order of transformers.

    It moves interleaved pairs apart, into halves, and its caches hold them so. cos and sin repeat
    their first half.
    """
    rotary_dim = cos.shape[-1]
    if style == "interleaved":
        pairs, rest = x[..., :rotary_dim], x[..., rotary_dim:]
        x = torch.cat([pairs[..., 0::2], pairs[..., 1::2], rest], dim=-1)
    half = rotary_dim // 2
    return apply_rope(x, cos[..., :half], sin[..., :half], "half_split")


def visible_windows(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """First visible position, and the one past the last, of each row: [B, S] int32 each.

    Args:
        mask: [B, S, T]; bool, True where a key is visible, or float, 0 there and the dtype's least
            value (or −inf) elsewhere. Rows that see nothing are [0, 0).

    Raises:
        ValueError: a row sees keys on both sides of a hidden one, or a value that only biases
            scores. Asked unless a graph is being traced or captured, and costs a synchronisation.
    """
    visible = mask if mask.dtype == torch.bool else mask == 0
    ones = visible.view(torch.uint8)  # sums of bools would be taken in int64: 25 times slower
    starts = ones.argmax(-1).to(torch.int32)
    ends = starts + ones.sum(-1, dtype=torch.int32)
    if _may_look(mask):
        begins = (ones[..., 1:] > ones[..., :-1]).view(torch.uint8).sum(-1, dtype=torch.int32)
        if bool((begins + ones[..., 0] > 1).any()):
            _refuse_hole(visible)
        _check_biases(mask, visible)
    return starts, ends


def _may_look(tensor: torch.Tensor) -> bool:
    if torch.compiler.is_compiling():
        return False
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def _refuse_hole(visible: torch.Tensor) -> None:
    """Raises ValueError naming the first hidden position between two visible ones."""
    before = visible.cumsum(-1, dtype=torch.int32)
    hole = ~visible & (before > 0) & (before < before[..., -1:])
    batch, row, column = hole.nonzero()[0].tolist()
    raise ValueError(
        "attention_mask must let each query see one run of positions (left and right padding"
        f" do), got position {column} hidden between those of query {row}, sequence {batch}"
    )


def _check_biases(mask: torch.Tensor, visible: torch.Tensor) -> None:
    if mask.dtype != torch.bool:
        hidden = mask <= torch.finfo(mask.dtype).min
        if not bool((visible | hidden).all()):
            value = mask[~(visible | hidden)][0].item()
            raise ValueError(f"attention_mask must be 0 or hide a position, got a bias of {value}")


def _fill_rows(indices: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """−1 → the row's hidden positions in ascending order, each once.

    Such a row has selected its whole window, so entry j is number j − (end − start) of the others;
    min(index_topk, T) entries never run out of them.
    """
    starts, ends = starts.unsqueeze(-1), ends.unsqueeze(-1)
    entry = torch.arange(indices.shape[-1], dtype=torch.int32, device=indices.device)
    number = entry - (ends - starts)
    hidden = torch.where(number < starts, number, number - starts + ends)
    return torch.where(indices < 0, hidden, indices)
