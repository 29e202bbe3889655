"""Multi-head latent attention over the positions that a lightning indexer selected."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from ..indexer.buffer import TopkIndicesBuffer
from ..indexer.index_k_cache import IndexKCache
from ..indexer.lightning_indexer import LightningIndexer
from ..indexer.rope import apply_rope, rope_tables
from ..kernels.slots import indices_to_slots
from ..speculator.batch import StepBatch
from .config import TinyConfig
from .linear import RowBlockLinear, in_row_blocks


class LatentCache:
    """Paged latent rows [num_pages·S + 1, latent_size] of one layer.

    The last row takes what slot −1 would have written, so that a write needs no data-dependent
    shape; nothing ever reads it.
    """

    def __init__(self, num_slots: int, width: int, dtype: torch.dtype) -> None:
        self.num_slots = num_slots
        self.rows = torch.zeros((num_slots + 1, width), dtype=dtype)

    def write(self, latent: torch.Tensor, slots: torch.Tensor) -> None:
        """Stores latent [T, width] at slots [T]; slot −1 stores nothing."""
        self.rows.index_copy_(0, torch.where(slots < 0, self.num_slots, slots), latent)

    def gather(self, slots: torch.Tensor) -> torch.Tensor:
        """Rows [T, W, width] of slots [T, W]; zeros for −1."""
        return self.rows[slots.clamp_min(0)].masked_fill((slots < 0).unsqueeze(-1), 0.0)


@dataclass(frozen=True)
class LayerCache:
    """What a layer keeps of every token: latents, and index keys where it selects for itself."""

    latent: LatentCache
    index_k: IndexKCache | None


class SparseAttention(nn.Module):
    """DeepSeek's attention: low-rank queries, one latent row a token, selected keys only.

        o = Σ_s softmax_s(q_nope·(W_kb c_s) + q_rope·r_s)·(W_vb c_s),  s over the selection

    Run absorbed: q_nope·W_kb meets the cached latent c directly, and W_vb is applied after the sum.

    Args:
        config: sizes.
        role: "full" has an indexer, "shared" reads the rows that the layer before left in `buffer`.
        buffer: the selection buffer of the model this layer belongs to.
    """

    rope_cos: torch.Tensor
    rope_sin: torch.Tensor

    def __init__(self, config: TinyConfig, role: str, buffer: TopkIndicesBuffer) -> None:
        super().__init__()
        self.config = config
        self.buffer = buffer
        heads, qk = config.num_attention_heads, config.qk_nope_head_dim + config.qk_rope_head_dim
        self.scale = qk**-0.5
        self.q_a_proj = RowBlockLinear(config.hidden_size, config.q_lora_rank, bias=False)
        self.q_a_layernorm = nn.RMSNorm(config.q_lora_rank, eps=config.rms_norm_eps)
        self.q_b_proj = RowBlockLinear(config.q_lora_rank, heads * qk, bias=False)
        self.kv_a_proj_with_mqa = RowBlockLinear(config.hidden_size, config.latent_size, bias=False)
        self.kv_a_layernorm = nn.RMSNorm(config.kv_lora_rank, eps=config.rms_norm_eps)
        self.kv_b_proj = nn.Linear(
            config.kv_lora_rank, heads * (config.qk_nope_head_dim + config.v_head_dim), bias=False
        )
        self.o_proj = RowBlockLinear(heads * config.v_head_dim, config.hidden_size, bias=False)
        self.indexer = (
            LightningIndexer(config.indexer, buffer, linear=RowBlockLinear)
            if role == "full"
            else None
        )
        cos, sin = rope_tables(config.max_model_len, config.qk_rope_head_dim, config.rope_theta)
        self.register_buffer("rope_cos", cos.to(torch.get_default_dtype()), persistent=False)
        self.register_buffer("rope_sin", sin.to(torch.get_default_dtype()), persistent=False)

    def query(
        self, q_resid: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """q_nope [..., heads, nope] and rotated q_rope [..., heads, rope] from q_resid."""
        config = self.config
        q = self.q_b_proj(q_resid).unflatten(-1, (config.num_attention_heads, -1))
        nope, rope = q.split([config.qk_nope_head_dim, config.qk_rope_head_dim], dim=-1)
        return nope, apply_rope(rope, cos.unsqueeze(-2), sin.unsqueeze(-2), "interleaved")

    def query_residual(self, x: torch.Tensor) -> torch.Tensor:
        """The compressed query [..., q_lora_rank] that attention and indexer share."""
        return self.q_a_layernorm(self.q_a_proj(x))

    def latent(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """The row [..., latent_size] to cache: normalised kv, then the rotated shared key."""
        kv, rope = self.kv_a_proj_with_mqa(x).split(
            [self.config.kv_lora_rank, self.config.qk_rope_head_dim], dim=-1
        )
        return torch.cat(
            [self.kv_a_layernorm(kv), apply_rope(rope, cos, sin, "interleaved")], dim=-1
        )

    def up_projections(self) -> tuple[torch.Tensor, torch.Tensor]:
        """W_kb [heads, nope, kv_lora_rank] and W_vb [heads, v, kv_lora_rank]."""
        config = self.config
        weight = self.kv_b_proj.weight.unflatten(0, (config.num_attention_heads, -1))
        w_kb, w_vb = weight.split([config.qk_nope_head_dim, config.v_head_dim], dim=1)
        return w_kb, w_vb

    def forward(
        self, x: torch.Tensor, batch: StepBatch, context_lens: torch.Tensor, cache: LayerCache
    ) -> torch.Tensor:
        """Attention output [T, hidden_size] of normed rows x [T, hidden_size].

        Args:
            x: one row a token of `batch`.
            batch: positions, slots and block table of the rows.
            context_lens: [T] int32, `batch.context_lens()`.
            cache: this layer's; the rows' latents (and index keys) are written to it.
        """
        cos, sin = self.rope_cos[batch.positions], self.rope_sin[batch.positions]
        q_resid = in_row_blocks(self.query_residual, x)
        cache.latent.write(in_row_blocks(self.latent, x, cos, sin), batch.slot_mapping)
        selection = self._select(x, q_resid, batch, context_lens, cache)
        slots = indices_to_slots(
            selection, batch.block_table, batch.row_to_request, batch.page_size
        )

        def attend(
            q_resid: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, slots: torch.Tensor
        ) -> torch.Tensor:
            return self._attend(*self.query(q_resid, cos, sin), cache.latent.gather(slots), slots)

        return in_row_blocks(attend, q_resid, cos, sin, slots)

    def _select(
        self,
        x: torch.Tensor,
        q_resid: torch.Tensor,
        batch: StepBatch,
        context_lens: torch.Tensor,
        cache: LayerCache,
    ) -> torch.Tensor:
        if self.indexer is None or cache.index_k is None:
            return self.buffer.rows(x.shape[0])
        return self.indexer(
            x,
            q_resid,
            batch.positions,
            cache=cache.index_k,
            slot_mapping=batch.slot_mapping,
            block_table=batch.block_table,
            row_to_request=batch.row_to_request,
            context_lens=context_lens,
            max_context_len=batch.max_context_len,
        )

    def _attend(
        self,
        q_nope: torch.Tensor,
        q_rope: torch.Tensor,
        keys: torch.Tensor,
        slots: torch.Tensor,
    ) -> torch.Tensor:
        """One block of rows: q [R, heads, ·] over keys [R, W, latent_size] → [R, hidden_size]."""
        w_kb, w_vb = self.up_projections()
        q_latent = torch.einsum("rhn,hnl->rhl", q_nope, w_kb)
        scores = torch.cat([q_latent, q_rope], dim=-1) @ keys.transpose(1, 2) * self.scale
        hidden = (slots < 0).unsqueeze(1)
        # A finite fill: a row that selected nothing must give 0, not softmax's NaN.
        probs = scores.masked_fill(hidden, torch.finfo(scores.dtype).min).softmax(dim=-1)
        probs = probs.masked_fill(hidden, 0.0)
        context = probs @ keys[..., : self.config.kv_lora_rank]
        return self.o_proj(torch.einsum("rhl,hvl->rhv", context, w_vb).flatten(1))
