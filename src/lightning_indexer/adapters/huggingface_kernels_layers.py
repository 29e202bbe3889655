"""Layers that Hugging Face `kernels` puts in the place of a transformers model's own.

`kernels` takes `forward` from here and binds it to the model's module: a layer has no constructor,
no state and no other members, and its forward takes the arguments of the one that it replaces.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .transformers_indexer import Embeddings, indexer_forward


class DeepseekV32Indexer(nn.Module):
    """For `DeepseekV32Indexer` of transformers: rotates halves."""

    can_torch_compile = True
    has_backward = True  # positions have no gradient, in the stock layer neither

    def forward(
        self,
        hidden_states: torch.Tensor,
        q_resid: torch.Tensor,
        position_embeddings: Embeddings,
        attention_mask: torch.Tensor,
        position_ids: torch.Tensor | None,
        cache: Any = None,
    ) -> torch.Tensor:
        """Positions [B, S, min(index_topk, T)] int32, as the stock attention takes them."""
        return indexer_forward(
            self,
            hidden_states,
            q_resid,
            position_embeddings,
            attention_mask,
            position_ids,
            cache,
            rope_style="half_split",
            fill=True,
        )


class GlmMoeDsaIndexer(nn.Module):
    """For `GlmMoeDsaIndexer` of transformers: rotates interleaved pairs."""

    can_torch_compile = True
    has_backward = True

    def forward(
        self,
        hidden_states: torch.Tensor,
        q_resid: torch.Tensor,
        position_embeddings: Embeddings,
        attention_mask: torch.Tensor,
        position_ids: torch.Tensor | None,
        cache: Any = None,
    ) -> torch.Tensor:
        """Positions [B, S, min(index_topk, T)] int32, as the stock attention takes them."""
        return indexer_forward(
            self,
            hidden_states,
            q_resid,
            position_embeddings,
            attention_mask,
            position_ids,
            cache,
            rope_style="interleaved",
            fill=True,
        )
