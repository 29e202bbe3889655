"""What an indexer layer needs to know, and how to read it from a Hugging Face config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

RopeStyle = Literal["half_split", "interleaved"]

#: The style each model family was trained with. There is no default: the wrong one still runs,
#: and merely selects the wrong keys.
ROPE_STYLES: dict[str, RopeStyle] = {"deepseek_v32": "half_split", "glm_moe_dsa": "interleaved"}


def read_field(config: Any, name: str, default: Any = None) -> Any:
    """`name` of a config object or mapping; `default` where it is absent or None."""
    got = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
    return default if got is None else got


@dataclass(frozen=True, kw_only=True)
class IndexerConfig:
    """Sizes and conventions of one lightning indexer.

    Args:
        hidden_size: width of the layer's input.
        q_lora_rank: width of the compressed query that `wq_b` expands.
        index_n_heads: index heads H.
        index_head_dim: width D of an index head.
        index_topk: keys kept for every query, k.
        qk_rope_head_dim: how many leading dimensions of a head RoPE rotates (even, ≤ D).
        rope_style: "half_split" (DeepSeek-V3.2) or "interleaved" (GLM). Required.
        rope_theta: RoPE base.
        max_position_embeddings: positions the built-in RoPE table covers.
        external_rope: the checkpoint scales RoPE (YaRN, …); `LightningIndexer` then insists on
            tables from the caller.
        k_norm_eps: epsilon of the key's layer norm.
        hadamard: queries and keys are transformed before they are cached or quantised, as in
            DeepSeek's own code: scores are the same but for rounding, and e4m3 loses less.
        fp8_queries: queries are quantised to e4m3 where the cache's keys are, which the fastest
            kernels take; otherwise they keep the model's dtype.

    Raises:
        ValueError: for a size below 1, an odd or too wide rotary part, an unknown style, or
            `hadamard` with an index_head_dim that is no power of two.
    """

    hidden_size: int
    q_lora_rank: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    qk_rope_head_dim: int
    rope_style: RopeStyle
    rope_theta: float = 10000.0
    max_position_embeddings: int = 4096
    external_rope: bool = False
    k_norm_eps: float = 1e-6
    hadamard: bool = False
    fp8_queries: bool = False

    def __post_init__(self) -> None:
        for name in ("hidden_size", "q_lora_rank", "index_n_heads", "index_head_dim", "index_topk"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        rotary = self.qk_rope_head_dim
        if rotary % 2 or not 0 <= rotary <= self.index_head_dim:
            raise ValueError(
                f"qk_rope_head_dim must be even and at most index_head_dim={self.index_head_dim},"
                f" got {rotary}"
            )
        if self.rope_style not in get_args(RopeStyle):
            raise ValueError(
                f"rope_style must be one of {get_args(RopeStyle)}, got {self.rope_style!r}"
            )
        if self.hadamard and self.index_head_dim & (self.index_head_dim - 1):
            raise ValueError(
                f"hadamard needs a power of two for index_head_dim, got {self.index_head_dim}"
            )

    @classmethod
    def from_hf(cls, config: Any, *, rope_style: RopeStyle | None = None) -> IndexerConfig:
        """Reads a DeepSeek-V3.2 or GLM-5 style config (object or mapping).

        Args:
            config: has hidden_size, q_lora_rank, index_n_heads, index_head_dim, index_topk and
                qk_rope_head_dim; RoPE from `rope_parameters`, `rope_scaling` and `rope_theta`.
            rope_style: overrides what `indexer_rope_interleave` or `model_type` say.

        Raises:
            ValueError: when a field is missing, or nothing tells the RoPE style.
        """
        required = (
            "hidden_size",
            "q_lora_rank",
            "index_n_heads",
            "index_head_dim",
            "index_topk",
            "qk_rope_head_dim",
        )
        fields = {name: read_field(config, name) for name in required}
        missing = [name for name, value in fields.items() if value is None]
        if missing:
            raise ValueError(f"config must have {', '.join(missing)}, got none")
        rope = read_field(config, "rope_parameters", {}) or {}
        scaling = read_field(config, "rope_scaling", {}) or {}
        kind = rope.get("rope_type", scaling.get("rope_type", scaling.get("type", "default")))
        return cls(
            **fields,
            rope_style=rope_style or _rope_style_of(config),
            rope_theta=float(rope.get("rope_theta", read_field(config, "rope_theta", 10000.0))),
            max_position_embeddings=read_field(config, "max_position_embeddings", 4096),
            external_rope=kind != "default",
        )


def _rope_style_of(config: Any) -> RopeStyle:
    interleave = read_field(config, "indexer_rope_interleave")
    if interleave is not None:
        return "interleaved" if interleave else "half_split"
    model_type = read_field(config, "model_type")
    if model_type not in ROPE_STYLES:
        raise ValueError(
            f"rope_style must be given for model_type {model_type!r};"
            f" known are {', '.join(ROPE_STYLES)}"
        )
    return ROPE_STYLES[model_type]
