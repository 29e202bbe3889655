"""The drafts that bench_speculator drives: one that does nothing, and one that is an indexer."""

from __future__ import annotations

import torch

from lightning_indexer.indexer.buffer import TopkIndicesBuffer
from lightning_indexer.indexer.config import IndexerConfig
from lightning_indexer.indexer.index_k_cache import IndexKCache
from lightning_indexer.indexer.lightning_indexer import LightningIndexer
from lightning_indexer.kernels.compact import compact_topk_indices
from lightning_indexer.speculator.config import SpeculatorConfig
from lightning_indexer.speculator.step_batch import StepBatch

PAGE_SIZE = 64
VOCAB = 16  # logits are not what is timed
HEADS, HEAD_DIM, Q_RANK, HIDDEN = 64, 128, 1536, 7168  # DeepSeek-V3.2's


def num_pages(config: SpeculatorConfig) -> int:
    return -(-config.max_model_len // PAGE_SIZE) * config.max_num_reqs


class StubDraft:
    """Computes nothing."""

    def __init__(self, config: SpeculatorConfig, topk: int) -> None:
        rows = config.max_num_tokens
        self.buffer = TopkIndicesBuffer(rows, topk, device=config.device)
        self.topk_buffers = [self.buffer]
        self.skip_topk = False
        self.logits = torch.zeros((rows, VOCAB), dtype=config.dtype, device=config.device)

    def set_skip_topk(self, skip: bool) -> None:
        """See `SharesTopkIndices`."""
        self.skip_topk = skip

    def compact_topk_indices(self, rows: torch.Tensor) -> None:
        """See `SharesTopkIndices`."""
        compact_topk_indices(self.buffer.indices, rows)

    def forward(self, batch: StepBatch) -> torch.Tensor:
        """See `DraftModel`."""
        if not self.skip_topk:
            self.buffer.indices[0, :1].fill_(0)
        return batch.hidden

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `DraftModel`."""
        return self.logits[: hidden.shape[0]]


class IndexerDraft:
    """A lightning indexer; the selection's last column shows in the hidden states."""

    def __init__(self, config: SpeculatorConfig, topk: int) -> None:
        generator = torch.Generator().manual_seed(0)
        buffer = TopkIndicesBuffer(config.max_num_tokens, topk, device=config.device)
        sizes = IndexerConfig(
            hidden_size=config.hidden_size,
            q_lora_rank=Q_RANK,
            index_n_heads=HEADS,
            index_head_dim=HEAD_DIM,
            index_topk=topk,
            qk_rope_head_dim=64,
            rope_style="half_split",
            max_position_embeddings=config.max_model_len,
        )
        self.indexer = LightningIndexer(sizes, buffer).to(config.device, config.dtype)
        self.topk_buffers = [buffer]
        self.set_skip_topk = self.indexer.set_skip_topk
        self.compact_topk_indices = self.indexer.compact_topk_indices
        self.cache = IndexKCache(
            num_pages(config), HEAD_DIM, page_size=PAGE_SIZE, device=config.device
        )
        slots = torch.arange(num_pages(config) * PAGE_SIZE, device=config.device)
        keys = torch.randn(len(slots), HEAD_DIM, generator=generator)
        self.cache.write(keys.to(config.device, config.dtype), slots)

    def forward(self, batch: StepBatch) -> torch.Tensor:
        """See `DraftModel`."""
        selection = self.indexer(
            batch.hidden,
            batch.hidden[:, :Q_RANK],
            batch.positions,
            cache=self.cache,
            slot_mapping=batch.slot_mapping,
            block_table=batch.block_table,
            row_to_request=batch.row_to_request,
            context_lens=batch.context_lens(),
            max_context_len=batch.max_context_len,
        )
        return batch.hidden.roll(1, dims=1) + selection[:, -1:] % 3

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `DraftModel`."""
        return hidden[:, :VOCAB]
