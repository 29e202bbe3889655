"""Decoder and multi-token-prediction layers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from ..indexer.buffer import TopkIndicesBuffer
from ..indexer.dsa_attention import DSAAttention, DSACache
from ..speculator.batch import StepBatch
from .config import TinyConfig
from .linear import RowBlockLinear, in_row_blocks


class GatedMLP(nn.Module):
    """down_proj(silu(gate_proj(x))·up_proj(x))."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        hidden, wide = config.hidden_size, config.intermediate_size
        self.gate_proj = RowBlockLinear(hidden, wide, bias=False)
        self.up_proj = RowBlockLinear(hidden, wide, bias=False)
        self.down_proj = RowBlockLinear(wide, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., hidden_size] → the same shape."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """Pre-norm sparse attention, then a gated MLP, both residual."""

    def __init__(self, config: TinyConfig, role: str, buffer: TopkIndicesBuffer) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = DSAAttention(
            config.attention, role, buffer, linear=RowBlockLinear, rowwise=in_row_blocks
        )
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = GatedMLP(config)

    def feed_forward(self, x: torch.Tensor) -> torch.Tensor:
        """x + mlp(norm(x))."""
        return x + self.mlp(self.post_attention_layernorm(x))

    def forward(
        self, x: torch.Tensor, batch: StepBatch, context_lens: torch.Tensor, cache: DSACache
    ) -> torch.Tensor:
        """Rows x [T, hidden_size] → [T, hidden_size]; their cache rows are written.

        Args:
            x: one row a token of `batch`.
            batch: positions, slots and block table of the rows.
            context_lens: [T] int32, `batch.context_lens()`.
            cache: this layer's.
        """
        attended = self.self_attn(
            in_row_blocks(self.input_layernorm, x),
            batch.positions,
            cache=cache,
            slot_mapping=batch.slot_mapping,
            block_table=batch.block_table,
            row_to_request=batch.row_to_request,
            context_lens=context_lens,
            max_context_len=batch.max_context_len,
        )
        x = x + attended
        return in_row_blocks(self.feed_forward, x)


class SharedHead(nn.Module):
    """The norm in front of the output head; the head itself is the target's."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)


class MTPLayer(DecoderLayer):
    """Predicts one token further from a hidden state and the token that followed it.

    Source: DeepSeek-V3 technical report, section 2.2; here applied to its own output again.
    """

    def __init__(self, config: TinyConfig, buffer: TopkIndicesBuffer) -> None:
        super().__init__(config, "full", buffer)
        self.enorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.hnorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.eh_proj = RowBlockLinear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.shared_head = SharedHead(config)

    def combine(self, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """The layer's input from the next token's embedding and the hidden state before it."""
        return self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], dim=-1))
