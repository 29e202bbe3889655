"""Training's forward: whole windows at once, selections as masks, losses beside the output."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ..indexer.dsa_attention import DSAAttention
from ..indexer.lightning_indexer import LightningIndexer
from .layers import DecoderLayer


@dataclass(frozen=True)
class Keys:
    """What later steps may reuse of an attention: latents [B, S, ·] and mask [B, T, S]."""

    latent: torch.Tensor
    mask: torch.Tensor

    def of_first(self, rows: int) -> Keys:
        """The same for the first `rows` queries alone."""
        return Keys(self.latent, self.mask[:, :rows])


@dataclass(frozen=True)
class WindowOutput:
    """Rows [B, T, hidden_size], the keys they attended to, and the indexer's loss if it ran."""

    rows: torch.Tensor
    keys: Keys
    index_loss: torch.Tensor | None


def run_layer(
    layer: DecoderLayer,
    x: torch.Tensor,
    positions: torch.Tensor,
    *,
    sparse: bool,
    learn_index: bool,
    mask: torch.Tensor | None = None,
    keys: Keys | None = None,
) -> WindowOutput:
    """One layer over windows.

    Args:
        layer: a hidden layer or the MTP layer's decoder part.
        x: [B, T, hidden_size].
        positions: [T].
        sparse: attend to the indexer's selection; False attends to everything before (the dense
            warm-up, in which the indexer only learns).
        learn_index: compute the indexer's loss.
        mask: [B, T, T] of the layer before, for a "shared" layer.
        keys: of an earlier draft step; then this step adds no keys and selects nothing, as when
            `skip_topk` is set.
    """
    normed = layer.input_layernorm(x)
    attended = _attend(layer.self_attn, normed, positions, sparse, learn_index, mask, keys)
    return WindowOutput(layer.feed_forward(x + attended.rows), attended.keys, attended.index_loss)


def _attend(
    attention: DSAAttention,
    x: torch.Tensor,
    positions: torch.Tensor,
    sparse: bool,
    learn_index: bool,
    mask: torch.Tensor | None,
    keys: Keys | None,
) -> WindowOutput:
    cos, sin = attention.rope_tables(positions)
    q_resid = attention.query_residual(x)
    q = torch.cat(attention.query(q_resid, cos, sin), dim=-1).transpose(1, 2)  # [B, H, T, ·]
    scores = None
    if keys is None:
        if mask is None:
            causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
            mask = causal.expand(x.shape[0], -1, -1)
            if attention.indexer is not None and (sparse or learn_index):
                scores = index_scores(attention.indexer, x.detach(), q_resid.detach(), positions)
                scores = scores.masked_fill(~mask, float("-inf"))
                mask = (
                    select_top(scores, attention.config.indexer.index_topk) & mask
                    if sparse
                    else mask
                )
        keys = Keys(attention.latent(x, cos, sin), mask)
    k, v = _expand(attention, keys.latent)
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=keys.mask.unsqueeze(1))
    out = attention.o_proj(mixed.transpose(1, 2).flatten(2))
    loss = _index_loss(q, k, scores, keys.mask) if learn_index and scores is not None else None
    return WindowOutput(out, keys, loss)


def index_scores(
    indexer: LightningIndexer, x: torch.Tensor, q_resid: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Differentiable index scores [B, T, T] of every position against every other."""
    q, k = indexer.query(q_resid, positions), indexer.key(x, positions)
    heads = (q.flatten(1, 2) @ k.mT).relu().unflatten(1, q.shape[1:3])  # [B, T, H, T]
    return (indexer.head_weights(x).unsqueeze(-2) @ heads).squeeze(-2)


def select_top(scores: torch.Tensor, k: int) -> torch.Tensor:
    """Mask of each row's k greatest scores, ties to the smaller position as in the kernels."""
    scores = scores.detach()
    threshold = scores.topk(min(k, scores.shape[-1]), dim=-1).values[..., -1:]
    above, ties = scores > threshold, scores == threshold
    room = k - above.sum(dim=-1, keepdim=True)
    return above | (ties & (ties.cumsum(dim=-1) <= room))


def _expand(attention: DSAAttention, latent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys [B, H, S, nope+rope] and values [B, H, S, v]: the absorbed product, multiplied out."""
    w_kb, w_vb = attention.up_projections()
    kv, rope = latent.split(
        [attention.config.kv_lora_rank, attention.config.qk_rope_head_dim], dim=-1
    )
    nope = torch.einsum("bsl,hnl->bhsn", kv, w_kb)
    rope = rope.unsqueeze(1).expand(-1, nope.shape[1], -1, -1)
    return torch.cat([nope, rope], dim=-1), torch.einsum("bsl,hvl->bhsv", kv, w_vb)


def _index_loss(
    q: torch.Tensor, k: torch.Tensor, scores: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """Cross-entropy of the index distribution to the heads' mean attention, over the mask."""
    with torch.no_grad():
        logits = (q @ k.mT) * q.shape[-1] ** -0.5
        target = logits.masked_fill(~mask.unsqueeze(1), float("-inf")).softmax(-1).mean(1)
    log_index = scores.masked_fill(~mask, float("-inf")).log_softmax(-1)
    return -(target * log_index.masked_fill(~mask, 0.0)).sum(-1).mean()
