"""`DSAConfig`: its limits, and reading it from Hugging Face configs."""

from __future__ import annotations

import pytest

from lightning_indexer.indexer.dsa_config import DSAConfig

pytestmark = pytest.mark.once

HF = {
    "model_type": "deepseek_v32",
    "hidden_size": 64,
    "q_lora_rank": 32,
    "index_n_heads": 4,
    "index_head_dim": 16,
    "index_topk": 8,
    "qk_rope_head_dim": 8,
    "num_attention_heads": 2,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "rms_norm_eps": 1e-5,
}


def test_every_size_is_read() -> None:
    config = DSAConfig.from_hf(HF)
    own = ("num_attention_heads", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim", "rms_norm_eps")
    assert [getattr(config, name) for name in own] == [HF[name] for name in own]
    assert (config.qk_head_dim, config.latent_size) == (20, 32)
    assert config.softmax_scale == 20**-0.5
    assert (config.rope_style, config.indexer.rope_style) == ("interleaved", "half_split")


@pytest.mark.parametrize(
    ("interleave", "style"), [(None, "interleaved"), (True, "interleaved"), (False, "half_split")]
)
def test_attention_and_indexer_have_rope_styles_of_their_own(interleave, style) -> None:
    config = DSAConfig.from_hf(HF | {"rope_interleave": interleave})
    assert config.rope_style == style
    assert config.indexer.rope_style == "half_split"
    other = DSAConfig.from_hf(HF, indexer_rope_style="interleaved")
    assert other.indexer.rope_style == "interleaved"


@pytest.mark.parametrize("name", sorted(HF.keys() - {"rms_norm_eps"}))
def test_missing_field_is_named(name) -> None:
    wanted = "rope_style" if name == "model_type" else name
    with pytest.raises(ValueError, match=wanted):
        DSAConfig.from_hf({key: value for key, value in HF.items() if key != name})


def test_scaled_rope_needs_a_scale() -> None:
    yarn = HF | {"rope_parameters": {"rope_type": "yarn", "factor": 40, "rope_theta": 1e4}}
    with pytest.raises(ValueError, match="scale must be given"):
        DSAConfig.from_hf(yarn)
    assert DSAConfig.from_hf(yarn, scale=0.1).softmax_scale == 0.1


@pytest.mark.parametrize(
    "change", [{"num_attention_heads": 0}, {"kv_lora_rank": -1}, {"v_head_dim": 0}]
)
def test_sizes_below_one_are_refused(change) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(change))} must be at least 1"):
        DSAConfig.from_hf(HF | change)
