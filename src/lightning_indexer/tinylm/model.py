"""The demo model's weights, target and draft, under the names of a DeepSeek checkpoint."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from ..indexer.buffer import TopkIndicesBuffer
from .config import MINIATURE, TinyConfig
from .layers import DecoderLayer, MTPLayer
from .linear import RowBlockLinear


class Trunk(nn.Module):
    """Embedding, hidden layers followed by the MTP layer, and the final norm."""

    def __init__(
        self, config: TinyConfig, target: TopkIndicesBuffer, draft: TopkIndicesBuffer
    ) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        roles = config.roles[: config.num_hidden_layers]
        self.layers = nn.ModuleList(
            [*(DecoderLayer(config, role, target) for role in roles), MTPLayer(config, draft)]
        )
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)


class TinyLM(nn.Module):
    """Every weight of target and draft; `build` makes the two that run.

    Args:
        config: sizes.
        max_rows: rows of both selection buffers, the most tokens a forward may have.
        append_columns: columns of the draft's buffer beyond index_topk.
    """

    def __init__(self, config: TinyConfig, *, max_rows: int = 1, append_columns: int = 0) -> None:
        super().__init__()
        self.config = config
        target = TopkIndicesBuffer(max_rows, config.index_topk)
        draft = TopkIndicesBuffer(
            max_rows, config.index_topk + append_columns, append_columns=append_columns
        )
        self.model = Trunk(config, target, draft)
        self.lm_head = RowBlockLinear(config.hidden_size, config.vocab_size, bias=False)

    @property
    def hidden_layers(self) -> list[DecoderLayer]:
        """The target's layers."""
        return cast(list[DecoderLayer], list(self.model.layers)[:-1])

    @property
    def mtp_layer(self) -> MTPLayer:
        """The draft's layer."""
        return cast(MTPLayer, self.model.layers[-1])

    def randomize(self, generator: torch.Generator, *, std: float) -> None:
        """Draws every matrix from N(0, std²); norms keep their ones."""
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.dim() == 2:
                    parameter.normal_(std=std, generator=generator)


def random_model(seed: int, config: TinyConfig = MINIATURE) -> TinyLM:
    """An untrained model whose outputs vary with its inputs; for tests of exactness."""
    lm = TinyLM(config)
    lm.randomize(torch.Generator().manual_seed(seed), std=config.hidden_size**-0.5)
    return lm
