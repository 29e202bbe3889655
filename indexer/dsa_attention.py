"""The whole layer: index, select, and attend to the selected latent rows, over paged caches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from ..kernels.slots import indices_to_slots
from ..kernels.sparse_mla_attention import sparse_mla_attention
from .buffer import TopkIndicesBuffer
from .dsa_config import DSAConfig
from .index_k_cache import IndexKCache
from .latent_cache import LatentCache
from .lightning_indexer import LightningIndexer
from .rope import RopeTables, apply_rope

#: Runs a function of rows on rows: `rowwise(f, *tensors)` is `f(*tensors)`.
Rowwise = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class DSACache:
    """What a layer keeps of every token: latents, and index keys where it selects for itself."""

    latent: LatentCache
    index_k: IndexKCache | None

    @classmethod
    def make(
        cls,
        config: DSAConfig,
        role: str,
        num_pages: int,
        *,
        page_size: int = 64,
        dtype: torch.dtype = torch.bfloat16,
        index_k_dtype: torch.dtype = torch.float8_e4m3fn,
        device: torch.device | str | None = None,
    ) -> DSACache:
        """Empty caches of a layer of this role.

        `dtype` is the latents', `index_k_dtype` the keys'; float8_e4m3fn is fp8 with scales.
        """
        latent = LatentCache(
            num_pages, config.latent_size, page_size=page_size, dtype=dtype, device=device
        )
        index_k = None
        if role == "full":
            dim = config.indexer.index_head_dim
            index_k = IndexKCache(
                num_pages, dim, page_size=page_size, dtype=index_k_dtype, device=device
            )
        return cls(latent, index_k)


class DSAAttention(nn.Module):
    """DeepSeek sparse attention: low-rank queries, one latent row a token, selected keys only.

        o = Σ_s softmax_s(scale·(q_nope·(W_kb c_s) + q_rope·r_s))·(W_vb c_s),  s over the selection

    Run absorbed: q_nope·W_kb meets the cached latent c directly, and W_vb is applied after the sum.
    Checkpoint names are DeepSeek's: `q_a_proj`, `q_a_layernorm`, `q_b_proj`, `kv_a_proj_with_mqa`,
    `kv_a_layernorm`, `kv_b_proj`, `o_proj`, `indexer`.

    Args:
        config: sizes, RoPE styles and scale.
        role: "full" has an indexer, "shared" reads the rows that the layer before left in `buffer`.
        buffer: the selection buffer of the model this layer belongs to.
        linear: makes the projections, `nn.Linear` or a runtime's own.
        rowwise: runs what is computed row by row between the kernels; a runtime whose rows must
            have the same bits in every batch gives one that sees to it.

    Guarantees: the kernels' (a row depends on no other row); as far as `linear` and `rowwise` do
    likewise, a row's output has the same bits whatever else is in the batch. Never synchronises.

    Source: DeepSeek-V2 (absorbed latent attention) and DeepSeek-V3.2-Exp (selection) reports.
    """

    def __init__(
        self,
        config: DSAConfig,
        role: str,
        buffer: TopkIndicesBuffer,
        *,
        linear: Callable[..., nn.Module] = nn.Linear,
        rowwise: Rowwise = lambda compute, *rows: compute(*rows),
    ) -> None:
        super().__init__()
        if role not in ("full", "shared"):
            raise ValueError(f"role must be full or shared, got {role!r}")
        self.config, self.buffer, self.rowwise = config, buffer, rowwise
        heads, hidden, q_rank = (
            config.num_attention_heads,
            config.indexer.hidden_size,
            config.indexer.q_lora_rank,
        )
        self.q_a_proj = linear(hidden, q_rank, bias=False)
        self.q_a_layernorm = nn.RMSNorm(q_rank, eps=config.rms_norm_eps)
        self.q_b_proj = linear(q_rank, heads * config.qk_head_dim, bias=False)
        self.kv_a_proj_with_mqa = linear(hidden, config.latent_size, bias=False)
        self.kv_a_layernorm = nn.RMSNorm(config.kv_lora_rank, eps=config.rms_norm_eps)
        self.kv_b_proj = nn.Linear(
            config.kv_lora_rank, heads * (config.qk_nope_head_dim + config.v_head_dim), bias=False
        )
        self.o_proj = linear(heads * config.v_head_dim, hidden, bias=False)
        self.indexer = (
            LightningIndexer(config.indexer, buffer, linear=linear) if role == "full" else None
        )
        self.rope_tables = (  # the indexer's serve both
            RopeTables(
                config.indexer.max_position_embeddings,
                config.qk_rope_head_dim,
                config.indexer.rope_theta,
            )
            if self.indexer is None
            else self.indexer.rope_tables
        )

    def query_residual(self, x: torch.Tensor) -> torch.Tensor:
        """The compressed query [..., q_lora_rank] that attention and indexer share."""
        return self.q_a_layernorm(self.q_a_proj(x))

    def query(
        self, q_resid: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """q_nope [..., heads, nope] and rotated q_rope [..., heads, rope] from q_resid."""
        config = self.config
        q = self.q_b_proj(q_resid).unflatten(-1, (config.num_attention_heads, -1))
        nope, rope = q.split([config.qk_nope_head_dim, config.qk_rope_head_dim], dim=-1)
        return nope, apply_rope(rope, cos.unsqueeze(-2), sin.unsqueeze(-2), config.rope_style)

    def latent(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """The row [..., latent_size] to cache: normalised kv, then the rotated shared key."""
        config = self.config
        kv, rope = self.kv_a_proj_with_mqa(x).split(
            [config.kv_lora_rank, config.qk_rope_head_dim], dim=-1
        )
        return torch.cat(
            [self.kv_a_layernorm(kv), apply_rope(rope, cos, sin, config.rope_style)], dim=-1
        )

    def up_projections(self) -> tuple[torch.Tensor, torch.Tensor]:
        """W_kb [heads, nope, kv_lora_rank] and W_vb [heads, v, kv_lora_rank]."""
        config = self.config
        weight = self.kv_b_proj.weight.unflatten(0, (config.num_attention_heads, -1))
        w_kb, w_vb = weight.split([config.qk_nope_head_dim, config.v_head_dim], dim=1)
        return w_kb, w_vb

    def forward(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        *,
        cache: DSACache,
        slot_mapping: torch.Tensor,
        block_table: torch.Tensor,
        row_to_request: torch.Tensor,
        context_lens: torch.Tensor,
        max_context_len: int,
        rope: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Attention output [T, hidden_size] of normed rows; their cache rows are written first.

        Args:
            x: [T, hidden_size].
            positions: [T] positions of the rows in their sequences.
            cache: this layer's.
            slot_mapping: [T] slot of each row, −1 to write none.
            block_table: [R, pages] int32.
            row_to_request: [T] int32, the block-table row of each row; −1 attends to nothing.
            context_lens: [T] int32 keys each row sees, itself included; 0 selects nothing.
            max_context_len: no context_lens is greater.
            rope: cos, sin [T, qk_rope_head_dim/2] tables instead of the built-in plain RoPE.

        Returns:
            [T, hidden_size]; a row that attends to nothing is `o_proj` of 0.

        Raises:
            ValueError: when the buffer has fewer than T rows, the config needs `rope`, or a full
                layer's cache has no index keys.
        """
        cos, sin = self._rope(positions, rope)
        q_resid = self.rowwise(self.query_residual, x)
        cache.latent.write(self.rowwise(self.latent, x, cos, sin), slot_mapping)
        selection = self.buffer.rows(x.shape[0])
        if self.indexer is not None:
            if cache.index_k is None:
                raise ValueError("cache must have index keys for a full layer, got index_k=None")
            selection = self.indexer(
                x,
                q_resid,
                positions,
                cache=cache.index_k,
                slot_mapping=slot_mapping,
                block_table=block_table,
                row_to_request=row_to_request,
                context_lens=context_lens,
                max_context_len=max_context_len,
                rope=rope,
            )
        slots = indices_to_slots(selection, block_table, row_to_request, cache.latent.page_size)
        rows = cache.latent.rows
        query = self.rowwise(self._absorbed_query, q_resid, cos, sin)
        query = query.to(x.dtype if cache.latent.quantized else rows.dtype)
        mixed, _ = sparse_mla_attention(
            query, rows, slots, self.config.softmax_scale, self.config.kv_lora_rank
        )
        return self.rowwise(self._output, mixed.to(x.dtype))

    def _absorbed_query(
        self, q_resid: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        """[T, heads, latent_size]: what is multiplied with a latent row."""
        nope, rope = self.query(q_resid, cos, sin)
        w_kb, _ = self.up_projections()
        return torch.cat([torch.einsum("thn,hnl->thl", nope, w_kb), rope], dim=-1)

    def _output(self, mixed: torch.Tensor) -> torch.Tensor:
        """[T, hidden_size] from the latents that the heads have mixed, [T, heads, kv_lora_rank]."""
        _, w_vb = self.up_projections()
        return self.o_proj(torch.einsum("thl,hvl->thv", mixed, w_vb).flatten(1))

    def _rope(
        self, positions: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor] | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if rope is not None:
            return rope
        if self.config.indexer.external_rope:
            raise ValueError("rope must be given: the config scales RoPE, got None")
        return self.rope_tables(positions)
