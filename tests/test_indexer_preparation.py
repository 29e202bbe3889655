"""How `LightningIndexer` prepares queries and keys: transform, e4m3 queries, fp32 tables."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lightning_indexer.indexer import lightning_indexer
from lightning_indexer.indexer.block_table import BlockTable
from lightning_indexer.indexer.buffer import TopkIndicesBuffer
from lightning_indexer.indexer.config import IndexerConfig
from lightning_indexer.indexer.index_k_cache import IndexKCache
from lightning_indexer.indexer.lightning_indexer import LightningIndexer
from lightning_indexer.indexer.rope import rope_tables
from lightning_indexer.kernels.select_topk import paged_select_topk
from lightning_indexer.speculator.batch import RequestRows, target_batch
from lightning_indexer.testing import reference

CONFIG = IndexerConfig(
    hidden_size=24,
    q_lora_rank=20,
    index_n_heads=4,
    index_head_dim=32,
    index_topk=7,
    qk_rope_head_dim=8,
    rope_style="interleaved",
    max_position_embeddings=64,
)
LENGTH, PAGE = 40, 8


class Layer:
    """An indexer that has selected for a prompt of LENGTH rows, over a cache of this dtype."""

    def __init__(self, config: IndexerConfig, dtype: torch.dtype, seed: int) -> None:
        torch.manual_seed(seed)
        self.indexer = LightningIndexer(config, TopkIndicesBuffer(LENGTH, 7)).requires_grad_(False)
        self.cache = IndexKCache(6, 32, page_size=PAGE, dtype=dtype)
        self.table = BlockTable(1, LENGTH, num_pages=6, page_size=PAGE)
        self.table.allocate(0, LENGTH)
        self.hidden, self.q_resid = torch.randn(LENGTH, 24), torch.randn(LENGTH, 20)
        self.positions = torch.arange(LENGTH)
        batch = target_batch([RequestRows(0, 0, [0] * LENGTH)], self.table.table, PAGE)
        self.selection = self.indexer(
            self.hidden,
            self.q_resid,
            batch.positions,
            cache=self.cache,
            slot_mapping=batch.slot_mapping,
            block_table=batch.block_table,
            row_to_request=batch.row_to_request,
            context_lens=batch.context_lens(),
            max_context_len=batch.max_context_len,
        )

    def exact_scores(self) -> torch.Tensor:
        """[LENGTH, LENGTH] float64 from the module's differentiable functions, −inf unseen."""
        layer = self.indexer.double()
        q = layer.query(self.q_resid.double(), self.positions)
        k = layer.key(self.hidden.double(), self.positions)
        weights = layer.head_weights(self.hidden.double())
        zeros, ends = torch.zeros(LENGTH, dtype=torch.int32), self.positions.int() + 1
        return reference.mqa_logits(q, k, weights, zeros, ends)


def assert_selects(selection: torch.Tensor, scores: torch.Tensor, error: float) -> None:
    """Every row is the best of its scores, give or take what an error of `error` can swap."""
    for t, row in enumerate(selection.tolist()):
        chosen, count = [p for p in row if p >= 0], min(7, t + 1)
        assert len(set(chosen)) == count
        least = scores[t].sort(descending=True).values[count - 1]
        left_out = sorted({*range(t + 1)} - {*chosen})
        assert scores[t, chosen].min() >= least - 2 * error
        if left_out:
            assert scores[t, left_out].max() <= least + 2 * error


@pytest.mark.parametrize("hadamard", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_the_transform_leaves_fp32_scores_as_they_are(hadamard, seed):
    layer = Layer(replace(CONFIG, hadamard=hadamard), torch.float32, seed)
    scores = layer.exact_scores()
    # fp32: projections of 24 terms, norm, rotation, 5 sums of the transform, a product of 32
    error = 100 * 2.0**-24 * scores[scores.isfinite()].abs().max().item() * 32**0.5
    assert_selects(layer.selection, scores, error)


@pytest.mark.parametrize("scale_format", ["fp32", "ue8m0"])
@pytest.mark.parametrize("hadamard", [False, True])
def test_fp8_queries_select_by_the_product_of_quantised_sides(hadamard, scale_format, monkeypatch):
    config = replace(CONFIG, hadamard=hadamard, fp8_queries=True)
    taken = []

    def spy(q, cache, weights, *args, **kwargs):
        taken.append((q, weights))
        return paged_select_topk(q, cache, weights, *args, **kwargs)

    monkeypatch.setattr(lightning_indexer, "paged_select_topk", spy)
    monkeypatch.setattr(IndexKCache, "scale_format", scale_format, raising=False)
    layer = Layer(config, torch.float8_e4m3fn, 3)
    ((q, weights),) = taken
    assert q.dtype == torch.float8_e4m3fn
    k, scale = layer.cache.read(layer.table.table, torch.tensor([LENGTH], dtype=torch.int32))
    zeros, ends = torch.zeros(LENGTH, dtype=torch.int32), layer.positions.int() + 1
    scores = reference.mqa_logits(q.squeeze(1), k, weights, zeros, ends, k_scale=scale)
    finite = scores[scores.isfinite()].abs().max().item()
    assert_selects(layer.selection, scores, 40 * 2.0**-24 * finite)
    # and quantising is what it says it is: close to the exact scores, and not equal to them
    exact = layer.exact_scores()
    error = (scores - exact)[exact.isfinite()].abs().max()
    assert 0 < error < 0.1 * finite


def test_queries_stay_floats_over_a_float_cache():
    plain = Layer(CONFIG, torch.float32, 5)
    asked = Layer(replace(CONFIG, fp8_queries=True), torch.float32, 5)
    assert torch.equal(plain.selection, asked.selection)


def test_a_transform_of_the_keys_is_in_the_cache():
    plain = Layer(CONFIG, torch.float32, 5).cache.data.double().view(-1, 32)
    turned = Layer(replace(CONFIG, hadamard=True), torch.float32, 5).cache.data.double()
    signs = [[(-1.0) ** bin(i & j).count("1") for j in range(32)] for i in range(32)]
    matrix = torch.tensor(signs, dtype=torch.float64) * 32**-0.5
    torch.testing.assert_close(turned.view(-1, 32), plain @ matrix, atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_rope_tables_stay_fp32_whatever_the_model_is_cast_to(dtype):
    indexer = LightningIndexer(CONFIG, TopkIndicesBuffer(4, 7)).to(dtype)
    assert indexer.wk.weight.dtype == dtype
    cos, sin = rope_tables(64, 8, 10000.0)
    assert torch.equal(indexer.rope_tables.cos, cos.float())
    assert torch.equal(indexer.rope_tables.sin, sin.float())
    assert not [name for name in indexer.state_dict() if "rope" in name]


def test_transform_of_a_dimension_that_is_no_power_of_two_is_refused():
    with pytest.raises(ValueError, match="power of two for index_head_dim, got 24"):
        replace(CONFIG, index_head_dim=24, hadamard=True)
