"""The indexer layer: projections, scores, selection, and the flag that skips them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from einops import rearrange
from torch import nn

from ..kernels.compact import compact_topk_indices
from ..kernels.prepare_index_k import prepare_index_k
from ..kernels.prepare_index_q import prepare_index_q
from ..kernels.select_topk import paged_select_topk
from .buffer import TopkIndicesBuffer
from .config import IndexerConfig
from .index_k_cache import IndexKCache
from .rope import RopeTables, apply_rope

#: Positions (None: a table row a token), cos and sin, as the ops take them.
_Rope = tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]


class LightningIndexer(nn.Module):
    """Selects the index_topk cached positions that each query should attend to.

        score(t, s) = Σ_h w[t,h]·relu(q[t,h]·k[s]),  w = weights_proj(x)·H^-0.5·D^-0.5
        q = rope(wq_b(q_resid)),  k = rope(k_norm(wk(x)))

    Checkpoint names are those of DeepSeek-V3.2 and GLM: `wq_b`, `wk`, `k_norm`, `weights_proj`.
    With `skip_topk` set, `forward` does no work at all and hands out the rows of the shared
    buffer as an earlier step (compacted to one a request) left them; only with
    `writes_skipped_index_k` it still caches the rows' keys.

    Args:
        config: sizes, RoPE style and base.
        buffer: where selections are written and read; several layers may share one.
        linear: makes the projections, `nn.Linear` or a runtime's own.

    Guarantees: for given inputs a row's selection has the same bits whatever else is in the batch,
    as far as `linear` computes rows independently; the buffer's bytes do not change while
    `skip_topk` is set; `forward` never synchronises.

    Source: DeepSeek-V3.2-Exp technical report, section 2.1; skip_topk from vLLM's MTP sharing.
    """

    def __init__(
        self,
        config: IndexerConfig,
        buffer: TopkIndicesBuffer,
        *,
        linear: Callable[..., nn.Module] = nn.Linear,
    ) -> None:
        super().__init__()
        if not isinstance(buffer, TopkIndicesBuffer):
            raise TypeError(f"buffer must be a TopkIndicesBuffer, got {type(buffer).__name__}")
        if buffer.width - buffer.append_columns < config.index_topk:
            raise ValueError(
                f"buffer must be at least index_topk={config.index_topk} wide, got {buffer.width}"
                f" of which {buffer.append_columns} are for appended positions"
            )
        self.config = config
        self.buffer = buffer
        self.skip_topk = False
        self.writes_skipped_index_k = False
        heads, dim = config.index_n_heads, config.index_head_dim
        self.wq_b = linear(config.q_lora_rank, heads * dim, bias=False)
        self.wk = linear(config.hidden_size, dim, bias=False)
        self.k_norm = nn.LayerNorm(dim, eps=config.k_norm_eps)
        self.weights_proj = linear(config.hidden_size, heads, bias=False)
        self.rope_tables = RopeTables(
            config.max_position_embeddings, config.qk_rope_head_dim, config.rope_theta
        )

    def set_skip_topk(self, skip: bool) -> None:
        """Turns reuse of the buffer's rows on or off."""
        self.skip_topk = skip

    def set_write_skipped_index_k(self, write: bool) -> None:
        """With True, skipping forwards still cache their keys, for a selection later on."""
        self.writes_skipped_index_k = write

    def compact_topk_indices(self, rows: torch.Tensor) -> None:
        """Row i of the buffer becomes its old row rows[i]: one row per request, in place."""
        compact_topk_indices(self.buffer.indices, rows)

    def query(self, q_resid: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """q [..., H, D] from q_resid [..., q_lora_rank] at positions [...], differentiably."""
        q = rearrange(self.wq_b(q_resid), "... (h d) -> ... h d", h=self.config.index_n_heads)
        cos, sin = self.rope_tables(positions)
        return apply_rope(q, cos.unsqueeze(-2), sin.unsqueeze(-2), self.config.rope_style)

    def key(self, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """k [..., D] from hidden [..., hidden_size] at positions [...], differentiably."""
        cos, sin = self.rope_tables(positions)
        return apply_rope(self.k_norm(self.wk(hidden)), cos, sin, self.config.rope_style)

    def head_weights(self, hidden: torch.Tensor) -> torch.Tensor:
        """w [..., H], the scale H^-0.5·D^-0.5 folded in, differentiably."""
        heads, dim = self.config.index_n_heads, self.config.index_head_dim
        return self.weights_proj(hidden) * (heads**-0.5 * dim**-0.5)

    def forward(
        self,
        hidden: torch.Tensor,
        q_resid: torch.Tensor,
        positions: torch.Tensor,
        *,
        cache: IndexKCache,
        slot_mapping: torch.Tensor,
        block_table: torch.Tensor,
        row_to_request: torch.Tensor,
        context_lens: torch.Tensor,
        max_context_len: int,
        rope: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Writes the rows' keys to the cache, then selects for each row.

        Args:
            hidden: [T, hidden_size].
            q_resid: [T, q_lora_rank], the layer's compressed query.
            positions: [T] positions of the rows in their sequences.
            cache: index keys of this layer.
            slot_mapping: [T] slot of each row's key, −1 to write none.
            block_table: [R, pages] int32.
            row_to_request: [T] int32, the block-table row of each query row; −1 selects nothing.
            context_lens: [T] int32 keys each row sees, itself included; 0 selects nothing.
            max_context_len: no context_lens is greater.
            rope: cos, sin [T, qk_rope_head_dim/2] tables instead of the built-in plain RoPE.

        Returns:
            A view [T, W] int32 of the buffer: positions ascending, then −1.

        Raises:
            ValueError: when the buffer has fewer than T rows, or the config needs `rope`.
        """
        rows = self.buffer.rows(hidden.shape[0])
        if self.skip_topk and not self.writes_skipped_index_k:
            return rows
        tables = self._rope(positions, rope)
        self._write_keys(hidden, tables, cache, slot_mapping)
        if self.skip_topk:
            return rows
        q, weights = self._queries(hidden, q_resid, tables, cache)
        paged_select_topk(
            q.unsqueeze(1),
            cache.data,
            weights,
            context_lens,
            block_table,
            self.config.index_topk,
            max_context_len=max_context_len,
            row_to_request=row_to_request,
            page_size=cache.page_size,
            out=rows[:, : self.config.index_topk],
        )
        return rows

    def _write_keys(
        self, hidden: torch.Tensor, tables: _Rope, cache: IndexKCache, slots: torch.Tensor
    ) -> None:
        norm = self.k_norm
        prepare_index_k(
            at_most_fp32(self.wk(hidden)),
            at_most_fp32(norm.weight),
            at_most_fp32(norm.bias),
            *tables,
            cache.data,
            slots,
            eps=norm.eps,
            rope_style=self.config.rope_style,
            hadamard=self.config.hadamard,
            page_size=cache.page_size,
            scale_format=cache.scale_format,
        )

    def _queries(
        self, hidden: torch.Tensor, q_resid: torch.Tensor, tables: _Rope, cache: IndexKCache
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """q [T, H, D], in e4m3 if it is to be, and weights [T, H] with every factor."""
        q = rearrange(self.wq_b(q_resid), "t (h d) -> t h d", h=self.config.index_n_heads)
        quantize = self.config.fp8_queries and cache.quantized
        return prepare_index_q(
            at_most_fp32(q),
            at_most_fp32(self.weights_proj(hidden)),
            *tables,
            rope_style=self.config.rope_style,
            hadamard=self.config.hadamard,
            scale_format=cache.scale_format if quantize else None,
        )

    def _rope(
        self, positions: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor] | None
    ) -> _Rope:
        if rope is not None:
            return None, rope[0].to(torch.float32), rope[1].to(torch.float32)
        if self.config.external_rope:
            raise ValueError("rope must be given: the config scales RoPE, got None")
        return positions, self.rope_tables.cos, self.rope_tables.sin


def at_most_fp32(x: torch.Tensor) -> torch.Tensor:
    """x, in fp32 if it is float64: kernels compute in fp32."""
    return x.to(torch.float32) if x.dtype == torch.float64 else x
