"""The two callables of index sharing on a model that holds several indexers."""

from __future__ import annotations

import torch
from torch import nn

from lightning_indexer.indexer.buffer import TopkIndicesBuffer
from lightning_indexer.indexer.config import IndexerConfig
from lightning_indexer.indexer.lightning_indexer import LightningIndexer
from lightning_indexer.indexer.sharing import compact_topk_indices, indexers_of, set_skip_topk

ROWS = 16
CONFIG = IndexerConfig(
    hidden_size=12,
    q_lora_rank=10,
    index_n_heads=4,
    index_head_dim=16,
    index_topk=5,
    qk_rope_head_dim=8,
    rope_style="half_split",
)


def _indexer() -> LightningIndexer:
    return LightningIndexer(CONFIG, TopkIndicesBuffer(ROWS, CONFIG.index_topk))


class _Three(nn.Module):
    """Two indexers on one buffer and a third on its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([_indexer(), _indexer(), _indexer()])
        self.layers[1].buffer = self.layers[0].buffer


def test_callables_for_a_model_reach_every_indexer_and_each_buffer_once():
    model = _Three()
    buffers = [layer.buffer for layer in model.layers]
    for buffer in buffers:
        buffer.indices.copy_(torch.arange(ROWS).unsqueeze(1).expand(-1, 5))
    set_skip_topk(model, True)
    assert [layer.skip_topk for layer in indexers_of(model)] == [True] * 3
    compact_topk_indices(model, torch.tensor([1, 4]))
    for buffer in buffers:
        assert buffer.indices[:3, 0].tolist() == [1, 4, 2]  # twice would have given 4, …
    compact_topk_indices(nn.Linear(2, 2), torch.tensor([1]))  # no indexer, nothing to do
