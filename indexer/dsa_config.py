"""What a sparse-attention layer needs to know, and how to read it from a Hugging Face config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_args

from .config import IndexerConfig, RopeStyle, read_field


@dataclass(frozen=True, kw_only=True)
class DSAConfig:
    """Sizes and conventions of one layer of DeepSeek sparse attention.

    Args:
        num_attention_heads: query heads, at most 128.
        kv_lora_rank: width of the compressed key-value, the values of a latent row.
        qk_nope_head_dim: dimensions of a head without RoPE.
        v_head_dim: dimensions of a head's value.
        indexer: the indexer's; hidden_size, q_lora_rank, qk_rope_head_dim and the RoPE tables are
            the attention's too.
        rope_style: of the attention; the indexer has its own.
        scale: factor of the dot products (default: head dimension^-0.5; YaRN corrects it).
        rms_norm_eps: epsilon of both norms.

    Raises:
        ValueError: for a size below 1 or an unknown style.
    """

    num_attention_heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    v_head_dim: int
    indexer: IndexerConfig
    rope_style: RopeStyle = "interleaved"
    scale: float | None = None
    rms_norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        for name in ("num_attention_heads", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.rope_style not in get_args(RopeStyle):
            raise ValueError(
                f"rope_style must be one of {get_args(RopeStyle)}, got {self.rope_style!r}"
            )

    @property
    def qk_rope_head_dim(self) -> int:
        """Rotary dimensions of a head, the same as the indexer's."""
        return self.indexer.qk_rope_head_dim

    @property
    def qk_head_dim(self) -> int:
        """Dimensions of a query head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_size(self) -> int:
        """Width of a latent cache row: the compressed key-value, then the rotated key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """`scale`, or its default."""
        return self.qk_head_dim**-0.5 if self.scale is None else self.scale

    @classmethod
    def from_hf(
        cls, config: Any, *, indexer_rope_style: RopeStyle | None = None, scale: float | None = None
    ) -> DSAConfig:
        """Reads a DeepSeek-V3.2 or GLM-5 style config (object or mapping).

        Args:
            config: what `IndexerConfig.from_hf` reads, and num_attention_heads, kv_lora_rank,
                qk_nope_head_dim and v_head_dim; `rope_interleave` (True) and `rms_norm_eps`.
            indexer_rope_style: overrides what the config says.
            scale: of scores, where the config scales RoPE: YaRN multiplies the default by the
                square of its mscale.

        Raises:
            ValueError: when a field is missing, or RoPE is scaled and `scale` is not given.
        """
        required = ("num_attention_heads", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim")
        fields = {name: read_field(config, name) for name in required}
        missing = [name for name, value in fields.items() if value is None]
        if missing:
            raise ValueError(f"config must have {', '.join(missing)}, got none")
        indexer = IndexerConfig.from_hf(config, rope_style=indexer_rope_style)
        if indexer.external_rope and scale is None:
            raise ValueError("scale must be given: the config scales RoPE, got None")
        interleaved = read_field(config, "rope_interleave", True)
        return cls(
            **fields,
            indexer=indexer,
            rope_style="interleaved" if interleaved else "half_split",
            scale=scale,
            rms_norm_eps=read_field(config, "rms_norm_eps", 1e-6),
        )
