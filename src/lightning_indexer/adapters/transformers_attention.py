"""The forward pass of DSA attention of transformers, over the selected keys alone."""

from __future__ import annotations

from typing import Any

import torch

from ..kernels.slots import indices_to_slots
from ..kernels.sparse_mla_attention import sparse_mla_attention
from .transformers_indexer import Embeddings, rotate


def attention_forward(
    attention: Any,
    hidden_states: torch.Tensor,
    position_embeddings: Embeddings,
    attention_mask: torch.Tensor,
    cache: Any = None,
    position_ids: torch.Tensor | None = None,
    prev_topk_indices: torch.Tensor | None = None,
    *,
    passes_indices: bool,
    **kwargs: Any,
) -> tuple[torch.Tensor | None, ...]:
    """(output [B, S, hidden], None), and the indices [B, S, k] where layers pass them on.

    Keys and values stay compressed: kv_b_proj's key half is folded into the query and its value
    half applied to the result, so that nothing of the size of S·T or of T·heads is made. Scores
    and sums are fp32, for fp64 models too.
    """
    batch, rows = hidden_states.shape[:2]
    q_resid = attention.q_a_layernorm(attention.q_a_proj(hidden_states))
    query = _latent_query(attention, q_resid, position_embeddings)
    latent, rope = _new_keys(attention, hidden_states, position_embeddings)
    _check_inference(attention, query, latent, rope, attention.kv_b_proj.weight)
    if cache is not None:
        latent, rope = cache.update(latent, rope, attention.layer_idx, kwargs=kwargs)
    indices = prev_topk_indices  # of the last full layer, for a shared one
    if attention.indexer is not None:
        indices = attention.indexer(
            hidden_states,
            q_resid,
            position_embeddings,
            attention_mask[:, 0],
            position_ids,
            cache=cache,
        )
    if indices is None:
        raise ValueError(
            f"layer {attention.layer_idx} shares the selection of an earlier full layer: call it"
            " with prev_topk_indices"
        )
    keys = torch.cat([latent, rope], dim=-1).flatten(0, 2)  # [B·T, lora + rope]
    out = _attend(query, keys, _slots(indices, latent.shape[2]), attention)
    value_weight = _latent_weights(attention)[:, attention.qk_nope_head_dim :]
    heads = torch.einsum("thl,hvl->thv", out, value_weight)
    output = attention.o_proj(heads.reshape(batch, rows, -1))
    return (output, None, indices) if passes_indices else (output, None)


def _check_inference(attention: Any, *inputs: torch.Tensor) -> None:
    """Raises, before a cache is written, where the result would lack a gradient or dropout."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs):
        raise ValueError(
            "model was patched with attention=True, which has no backward: call it under"
            " torch.no_grad(), or patch it with attention=False"
        )
    if attention.training and attention.attention_dropout:
        raise ValueError(
            "model was patched with attention=True, which has no dropout: call model.eval(), or"
            f" set attention_dropout to 0 (got {attention.attention_dropout})"
        )


def _latent_weights(attention: Any) -> torch.Tensor:
    """kv_b_proj's weight by head: [heads, nope + value, lora], keys' rows first."""
    width = attention.qk_nope_head_dim + attention.v_head_dim
    return attention.kv_b_proj.weight.view(-1, width, attention.kv_lora_rank)


def _latent_query(
    attention: Any, q_resid: torch.Tensor, position_embeddings: Embeddings
) -> torch.Tensor:
    """[B·S, heads, lora + rope]: what a cached row is multiplied by."""
    nope = attention.qk_nope_head_dim
    q = attention.q_b_proj(q_resid).unflatten(-1, (-1, attention.qk_head_dim))  # [B, S, H, qk]
    cos, sin = position_embeddings
    q_rope = rotate(q[..., nope:], cos.unsqueeze(2), sin.unsqueeze(2), "interleaved")
    key_weight = _latent_weights(attention)[:, :nope]
    q_latent = torch.einsum("bshn,hnl->bshl", q[..., :nope], key_weight)
    return torch.cat([q_latent, q_rope], dim=-1).flatten(0, 1)


def _new_keys(
    attention: Any, hidden_states: torch.Tensor, position_embeddings: Embeddings
) -> tuple[torch.Tensor, torch.Tensor]:
    """The parts of the new rows as a cache takes them: [B, 1, S, lora] and [B, 1, S, rope]."""
    compressed = attention.kv_a_proj_with_mqa(hidden_states)
    latent = attention.kv_a_layernorm(compressed[..., : attention.kv_lora_rank])
    rope = rotate(compressed[..., attention.kv_lora_rank :], *position_embeddings, "interleaved")
    return latent.unsqueeze(1), rope.unsqueeze(1)


def _slots(indices: torch.Tensor, length: int) -> torch.Tensor:
    """Rows [B·S, k] of the keys of all sequences, one page of `length` a sequence; −1 stays."""
    batch, rows, _ = indices.shape
    sequence = torch.arange(batch, dtype=torch.int32, device=indices.device)
    return indices_to_slots(
        indices.flatten(0, 1), sequence.unsqueeze(1), sequence.repeat_interleave(rows), length
    )


def _attend(
    query: torch.Tensor, keys: torch.Tensor, slots: torch.Tensor, attention: Any
) -> torch.Tensor:
    """[B·S, heads, lora] of the query's dtype."""
    dtype = query.dtype
    if dtype == torch.float64:
        query, keys = query.float(), keys.float()
    scale, width = float(attention.scaling), attention.kv_lora_rank
    return sparse_mla_attention(query, keys, slots, scale, width)[0].to(dtype)
