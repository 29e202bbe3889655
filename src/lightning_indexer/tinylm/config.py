"""Sizes of the demo model, named as in a Hugging Face DeepSeek config."""

from __future__ import annotations

from dataclasses import dataclass

from ..indexer.config import IndexerConfig
from ..indexer.dsa_config import DSAConfig
from ..indexer.layer_plan import layer_roles


@dataclass(frozen=True, kw_only=True)
class TinyConfig:
    """A byte-level language model with sparse attention and one multi-token-prediction layer.

    `indexer_types` gives the hidden layers' roles; a "shared" layer reuses the selection of the
    layer before it. `max_model_len` is also the context the model was trained with: beyond it the
    drafts stop being accepted, so nothing may run longer.
    """

    vocab_size: int = 256
    hidden_size: int = 128
    intermediate_size: int = 256
    num_hidden_layers: int = 3
    num_nextn_predict_layers: int = 1
    num_attention_heads: int = 4
    q_lora_rank: int = 96
    kv_lora_rank: int = 64
    qk_nope_head_dim: int = 16
    qk_rope_head_dim: int = 16
    v_head_dim: int = 32
    index_n_heads: int = 4
    index_head_dim: int = 32
    index_topk: int = 16
    indexer_types: tuple[str, ...] = ("full", "shared", "full")
    index_share_for_mtp_iteration: bool = True
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    max_model_len: int = 256

    def __post_init__(self) -> None:
        if self.num_nextn_predict_layers != 1:
            raise ValueError(
                f"num_nextn_predict_layers must be 1, got {self.num_nextn_predict_layers}"
            )

    @property
    def roles(self) -> tuple[str, ...]:
        """Role of every hidden layer, then of the MTP layer: full or shared."""
        return layer_roles(self)

    @property
    def attention(self) -> DSAConfig:
        """The configuration of every layer's attention."""
        return DSAConfig(
            num_attention_heads=self.num_attention_heads,
            kv_lora_rank=self.kv_lora_rank,
            qk_nope_head_dim=self.qk_nope_head_dim,
            v_head_dim=self.v_head_dim,
            indexer=self.indexer,
            rms_norm_eps=self.rms_norm_eps,
        )

    @property
    def indexer(self) -> IndexerConfig:
        """The configuration of every "full" layer's indexer."""
        return IndexerConfig(
            hidden_size=self.hidden_size,
            q_lora_rank=self.q_lora_rank,
            index_n_heads=self.index_n_heads,
            index_head_dim=self.index_head_dim,
            index_topk=self.index_topk,
            qk_rope_head_dim=self.qk_rope_head_dim,
            rope_style="half_split",
            rope_theta=self.rope_theta,
            max_position_embeddings=self.max_model_len,
        )


#: Small enough to train a few steps of, or to try many random ones of, in a test.
MINIATURE = TinyConfig(
    vocab_size=128,
    hidden_size=32,
    intermediate_size=64,
    num_attention_heads=2,
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    v_head_dim=16,
    index_n_heads=2,
    index_head_dim=16,
    index_topk=4,
    max_model_len=64,
)
