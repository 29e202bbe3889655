"""Target and draft over paged caches, as the speculator drives them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from ..indexer import sharing
from ..indexer.buffer import TopkIndicesBuffer
from ..indexer.dsa_attention import DSACache
from ..speculator.batch import StepBatch
from .layers import DecoderLayer
from .linear import in_row_blocks
from .model import TinyLM


class TinyTarget(nn.Module):
    """The target: rows of tokens in, final-norm hidden states out, caches kept.

    Guarantees: a row's hidden state and logits have the same bits whatever else is in the batch;
    a forward never synchronises, and its shapes depend on num_tokens_padded alone.

    Args:
        lm: weights; its buffers bound the rows of a forward.
        num_pages: pages of every layer's caches.
        page_size: S, tokens a page.
        index_k_dtype: of the index keys, e4m3 by default.
    """

    def __init__(
        self,
        lm: TinyLM,
        *,
        num_pages: int,
        page_size: int = 64,
        index_k_dtype: torch.dtype = torch.float8_e4m3fn,
    ) -> None:
        super().__init__()
        self.config = lm.config
        self.embed_tokens = lm.model.embed_tokens
        self.layers = nn.ModuleList(lm.hidden_layers)
        self.norm = lm.model.norm
        self.lm_head = lm.lm_head
        self.caches = _layer_caches(lm.hidden_layers, num_pages, page_size, index_k_dtype)

    @property
    def topk_buffers(self) -> list[TopkIndicesBuffer]:
        """The selection buffers of the layers: one."""
        return sharing.topk_buffers_of(self)

    def forward(self, batch: StepBatch) -> torch.Tensor:
        """Hidden states [Tp, hidden_size] of the batch's tokens; writes their cache rows."""
        hidden = self.embed_tokens(batch.input_ids)
        context_lens = batch.context_lens()
        for layer, cache in zip(self.layers, self.caches, strict=True):
            hidden = layer(hidden, batch, context_lens, cache)
        return in_row_blocks(self.norm, hidden)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [n, vocab_size] of hidden states [n, hidden_size]."""
        return self.lm_head(hidden)


class TinyDraft(nn.Module):
    """The draft: one recurrent MTP layer with its own indexer, caches and selection buffer.

    Guarantees and Args: those of `TinyTarget`, whose embedding and head it shares.
    """

    def __init__(
        self,
        lm: TinyLM,
        *,
        num_pages: int,
        page_size: int = 64,
        index_k_dtype: torch.dtype = torch.float8_e4m3fn,
    ) -> None:
        super().__init__()
        self.config = lm.config
        self.embed_tokens = lm.model.embed_tokens
        self.layer = lm.mtp_layer
        self.lm_head = lm.lm_head
        (self.cache,) = _layer_caches([lm.mtp_layer], num_pages, page_size, index_k_dtype)

    @property
    def topk_buffers(self) -> list[TopkIndicesBuffer]:
        """The selection buffers that draft steps may share: one."""
        return sharing.topk_buffers_of(self)

    def set_skip_topk(self, skip: bool) -> None:
        """Turns reuse of the buffer's rows on or off."""
        sharing.set_skip_topk(self, skip)

    def set_write_skipped_index_k(self, write: bool) -> None:
        """Turns caching of index keys in skipping forwards on or off."""
        sharing.set_write_skipped_index_k(self, write)

    def compact_topk_indices(self, rows: torch.Tensor) -> None:
        """Row i of the buffer becomes its old row rows[i]."""
        sharing.compact_topk_indices(self, rows)

    def forward(self, batch: StepBatch) -> torch.Tensor:
        """Hidden states [Tp, hidden_size], from which the next token's logits follow.

        Args:
            batch: input_ids are the tokens after `positions`; hidden is the target's output at
                `positions`, or this layer's own of the step before.
        """
        embedded = self.embed_tokens(batch.input_ids)
        x = in_row_blocks(self.layer.combine, embedded, batch.hidden)
        x = self.layer(x, batch, batch.context_lens(), self.cache)
        return in_row_blocks(self.layer.shared_head.norm, x)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [n, vocab_size] of hidden states [n, hidden_size]."""
        return self.lm_head(hidden)


def build(
    lm: TinyLM,
    *,
    num_pages: int,
    max_num_tokens: int,
    page_size: int = 64,
    dtype: torch.dtype = torch.float32,
    index_k_dtype: torch.dtype = torch.float8_e4m3fn,
    append_columns: int = 0,
) -> tuple[TinyTarget, TinyDraft]:
    """A target and its draft with copies of `lm`'s weights and empty caches.

    Args:
        lm: weights.
        num_pages: pages of every cache; target and draft use the same page ids.
        max_num_tokens: the most rows a forward may have, padding included.
        page_size: S, tokens a page.
        dtype: of weights and activations, float32 or float64; latents are float32.
        index_k_dtype: of the cached index keys.
        append_columns: columns of the draft's selection beyond index_topk, for a speculator
            that appends new positions (K − 1).
    """
    own = TinyLM(lm.config, max_rows=max_num_tokens, append_columns=append_columns)
    own.load_state_dict(lm.state_dict())
    own = own.to(dtype).eval().requires_grad_(False)
    target = TinyTarget(own, num_pages=num_pages, page_size=page_size, index_k_dtype=index_k_dtype)
    draft = TinyDraft(own, num_pages=num_pages, page_size=page_size, index_k_dtype=index_k_dtype)
    return target, draft


def _layer_caches(
    layers: Iterable[DecoderLayer], num_pages: int, page_size: int, index_k_dtype: torch.dtype
) -> list[DSACache]:
    caches = []
    for layer in layers:
        attention = layer.self_attn
        weights = attention.kv_b_proj.weight.dtype
        caches.append(
            DSACache.make(
                attention.config,
                "shared" if attention.indexer is None else "full",
                num_pages,
                page_size=page_size,
                dtype=torch.float32 if weights == torch.float64 else weights,
                index_k_dtype=index_k_dtype,
            )
        )
    return caches
