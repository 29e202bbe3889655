"""`IndexerConfig`: its limits, and reading it from Hugging Face configs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from lightning_indexer.indexer.config import IndexerConfig

pytestmark = pytest.mark.once

SIZES = {
    "hidden_size": 64,
    "q_lora_rank": 32,
    "index_n_heads": 4,
    "index_head_dim": 16,
    "index_topk": 8,
    "qk_rope_head_dim": 8,
}


@pytest.mark.parametrize("wrap", [dict, lambda config: SimpleNamespace(**config)])
@pytest.mark.parametrize(
    ("model_type", "style"), [("deepseek_v32", "half_split"), ("glm_moe_dsa", "interleaved")]
)
def test_model_type_tells_the_rope_style(model_type, style, wrap):
    config = IndexerConfig.from_hf(wrap(SIZES | {"model_type": model_type}))
    assert config.rope_style == style
    assert {name: getattr(config, name) for name in SIZES} == SIZES


def test_interleave_flag_beats_model_type_and_argument_beats_both():
    hf = SIZES | {"model_type": "deepseek_v32", "indexer_rope_interleave": True}
    assert IndexerConfig.from_hf(hf).rope_style == "interleaved"
    assert IndexerConfig.from_hf(hf, rope_style="half_split").rope_style == "half_split"
    assert IndexerConfig.from_hf(hf | {"indexer_rope_interleave": False}).rope_style == "half_split"


def test_unknown_model_type_needs_a_style():
    with pytest.raises(ValueError, match="rope_style must be given for model_type 'llama'"):
        IndexerConfig.from_hf(SIZES | {"model_type": "llama"})


@pytest.mark.parametrize("name", sorted(SIZES))
def test_missing_field_is_named(name):
    hf = {k: v for k, v in SIZES.items() if k != name} | {"model_type": "deepseek_v32"}
    with pytest.raises(ValueError, match=name):
        IndexerConfig.from_hf(hf)


@pytest.mark.parametrize(
    ("fields", "theta", "external"),
    [
        ({}, 10000.0, False),
        ({"rope_theta": 5e5}, 5e5, False),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 8e6}}, 8e6, False),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, 1e4, True),
        ({"rope_scaling": {"type": "yarn", "factor": 40}, "rope_theta": 1e4}, 1e4, True),
        ({"rope_scaling": {"rope_type": "default"}}, 10000.0, False),
        ({"rope_scaling": None}, 10000.0, False),
    ],
)
def test_rope_fields_old_and_new(fields, theta, external):
    config = IndexerConfig.from_hf(SIZES | {"model_type": "deepseek_v32"} | fields)
    assert config.rope_theta == theta
    assert config.external_rope == external


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"index_topk": 0}, "index_topk must be at least 1, got 0"),
        ({"hidden_size": -1}, "hidden_size must be at least 1"),
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim must be even"),
        ({"qk_rope_head_dim": 18}, "at most index_head_dim=16, got 18"),
        ({"rope_style": "neox"}, "rope_style must be one of"),
    ],
)
def test_bad_value_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        IndexerConfig(**(SIZES | {"rope_style": "half_split"} | change))
    with pytest.raises(TypeError, match="rope_style"):
        IndexerConfig(**SIZES)  # there is no default style
