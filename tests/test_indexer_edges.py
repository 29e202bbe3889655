"""Limits on their accepted side, and defaults that others build on, of the indexer's parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_indexer.indexer.block_table import BlockTable
from lightning_indexer.indexer.buffer import SelectionKind, SelectionState, TopkIndicesBuffer
from lightning_indexer.indexer.config import IndexerConfig
from lightning_indexer.indexer.dsa_attention import DSAAttention, DSACache
from lightning_indexer.indexer.dsa_config import DSAConfig
from lightning_indexer.indexer.index_k_cache import IndexKCache
from lightning_indexer.indexer.latent_cache import LatentCache
from lightning_indexer.indexer.layer_plan import layer_roles
from lightning_indexer.speculator.config import SpeculatorConfig

pytestmark = pytest.mark.once

INDEXER: dict[str, Any] = {
    "hidden_size": 12,
    "q_lora_rank": 10,
    "index_n_heads": 2,
    "index_head_dim": 8,
    "index_topk": 4,
    "qk_rope_head_dim": 4,
}
ATTENTION: dict[str, Any] = {
    "num_attention_heads": 3,
    "kv_lora_rank": 6,
    "qk_nope_head_dim": 5,
    "v_head_dim": 7,
}
HF = INDEXER | ATTENTION | {"model_type": "deepseek_v32"}


def _indexer(**changes: Any) -> IndexerConfig:
    return IndexerConfig(**(INDEXER | {"rope_style": "half_split"} | changes))


def test_whatever_has_pages_has_pages_of_64_tokens_by_default():
    attention = DSAConfig(**ATTENTION, indexer=_indexer())
    cache = DSACache.make(attention, "full", 1)
    assert cache.index_k is not None
    limits = ("num_speculative_steps", "max_num_reqs", "max_num_tokens", "max_model_len")
    made = (
        BlockTable(1, 1, num_pages=1),
        IndexKCache(1, 8),
        LatentCache(1, 8),
        cache.latent,
        cache.index_k,
        SpeculatorConfig(**dict.fromkeys(limits, 1), hidden_size=1),
    )
    assert [paged.page_size for paged in made] == [64] * len(made)


def test_defaults_of_an_indexer_are_those_of_the_configs_it_reads():
    for config in (_indexer(), IndexerConfig.from_hf(HF)):
        assert (config.rope_theta, config.max_position_embeddings) == (10000.0, 4096)
        assert config.k_norm_eps == 1e-6
        assert (config.external_rope, config.hadamard, config.fp8_queries) == (False,) * 3
    assert DSAConfig.from_hf(HF).rms_norm_eps == 1e-6


@pytest.mark.parametrize("name", sorted(set(INDEXER) - {"qk_rope_head_dim"}))
def test_an_indexer_takes_sizes_from_1_on(name):
    assert getattr(_indexer(**{"qk_rope_head_dim": 0, name: 1}), name) == 1
    with pytest.raises(ValueError, match=f"^{name} must be at least 1, got 0$"):
        _indexer(**{"qk_rope_head_dim": 0, name: 0})


@pytest.mark.parametrize("name", sorted(ATTENTION))
def test_attention_takes_sizes_from_1_on(name):
    assert getattr(DSAConfig(**(ATTENTION | {name: 1}), indexer=_indexer()), name) == 1
    with pytest.raises(ValueError, match=f"^{name} must be at least 1, got 0$"):
        DSAConfig(**(ATTENTION | {name: 0}), indexer=_indexer())


def test_rope_rotates_from_nothing_to_the_whole_head():
    for rotary in (0, 2, 8):
        assert _indexer(qk_rope_head_dim=rotary).qk_rope_head_dim == rotary
    for rotary in (-2, 7, 10):
        with pytest.raises(ValueError, match="even and at most index_head_dim=8"):
            _indexer(qk_rope_head_dim=rotary)


def test_hadamard_takes_every_power_of_two_and_nothing_else():
    for dim in range(1, 70):
        options = {"index_head_dim": dim, "qk_rope_head_dim": 0, "hadamard": True}
        if bin(dim).count("1") == 1:
            assert _indexer(**options).index_head_dim == dim
        else:
            with pytest.raises(ValueError, match=f"power of two for index_head_dim, got {dim}$"):
                _indexer(**options)


def test_attention_has_the_parameters_of_a_checkpoint_and_no_others():
    config = DSAConfig(**ATTENTION, indexer=_indexer())
    layer = DSAAttention(config, "shared", TopkIndicesBuffer(4, config.indexer.index_topk))
    norms, linears = ("q_a", "kv_a"), ("q_a", "q_b", "kv_b", "o")
    names = {f"{name}_layernorm.weight" for name in norms}
    names |= {f"{name}_proj.weight" for name in linears} | {"kv_a_proj_with_mqa.weight"}
    assert set(layer.state_dict()) == names


def test_a_role_for_a_layer_after_the_last_is_refused():
    config = {"num_hidden_layers": 3, "index_topk_pattern": "FSS"}
    assert layer_roles(config) == ("full", "shared", "shared")
    assert layer_roles(config | {"num_nextn_predict_layers": 1})[3:] == ("full",)
    longer = config | {"index_topk_pattern": "FSSS"}
    assert layer_roles(longer | {"num_nextn_predict_layers": 1})[:3] == layer_roles(config)
    with pytest.raises(ValueError, match="must name a role for each of 3 layers, got 4"):
        layer_roles(longer)


def test_an_empty_block_table_has_page_minus_1_everywhere():
    table = BlockTable(2, 5, num_pages=4, page_size=2)
    assert table.table.tolist() == [[-1] * 3] * 2


def test_a_buffer_begins_without_rows_positions_and_rounds():
    buffer = TopkIndicesBuffer(3, 2)
    assert buffer.state == SelectionState(SelectionKind.UNTRACKED, num_rows=0, generation=0)
    assert buffer.anchor_positions.tolist() == [-1] * 3
    buffer.track()
    assert buffer.state == SelectionState(SelectionKind.EMPTY, num_rows=0, generation=0)
    buffer.new_generation()
    buffer.clear()
    assert buffer.state == SelectionState(SelectionKind.EMPTY, num_rows=0, generation=1)


def test_position_0_can_be_appended_and_minus_1_cannot():
    buffer = TopkIndicesBuffer(3, 3, append_columns=2)
    buffer.append(torch.tensor([0, -1, 1]), torch.tensor([-1, -1, -1]))
    assert buffer.indices.tolist() == [[-1, 0, -1], [-1, -1, -1], [-1, -1, 1]]


@pytest.mark.parametrize(("pages", "width", "page_size"), [(1, 1, 1), (2, 3, 4), (1, 5, 3)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_latent_cache_has_a_row_for_every_slot_and_none_for_slot_minus_1(
    pages, width, page_size, dtype
):
    cache = LatentCache(pages, width, page_size=page_size, dtype=torch.float32)
    slots = pages * page_size
    assert cache.rows.shape == cache.state_tensors()["latent"].shape == (slots, width)
    rows = torch.arange(1.0, slots * width + 1).reshape(slots, width)
    cache.write(rows, torch.arange(slots, dtype=dtype))
    cache.write(rows[:1] + 100, torch.tensor([-1], dtype=dtype))
    assert torch.equal(cache.rows, rows)


@pytest.mark.parametrize("name", ["num_pages", "width", "page_size"])
def test_a_latent_cache_without_pages_or_width_is_refused(name):
    sizes = {"num_pages": 2, "width": 3, "page_size": 4} | {name: 0}
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        LatentCache(**sizes)
