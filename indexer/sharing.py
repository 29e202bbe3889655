"""The callables of index sharing, for any module that holds lightning indexers."""

from __future__ import annotations

import torch
from torch import nn

from ..kernels.compact import compact_topk_indices as compact
from .buffer import TopkIndicesBuffer
from .lightning_indexer import LightningIndexer


def indexers_of(model: nn.Module) -> list[LightningIndexer]:
    """Every lightning indexer inside `model`, in module order."""
    return [module for module in model.modules() if isinstance(module, LightningIndexer)]


def topk_buffers_of(model: nn.Module) -> list[TopkIndicesBuffer]:
    """The distinct selection buffers of `model`'s indexers."""
    buffers = {id(indexer.buffer): indexer.buffer for indexer in indexers_of(model)}
    return list(buffers.values())


def set_skip_topk(model: nn.Module, skip: bool) -> None:
    """Sets the flag on every indexer inside `model`."""
    for indexer in indexers_of(model):
        indexer.set_skip_topk(skip)


def set_write_skipped_index_k(model: nn.Module, write: bool) -> None:
    """Sets on every indexer inside `model` whether skipping forwards still cache their keys."""
    for indexer in indexers_of(model):
        indexer.set_write_skipped_index_k(write)


def compact_topk_indices(model: nn.Module, rows: torch.Tensor) -> None:
    """Compacts every selection buffer of `model` in one launch: row i becomes old row rows[i]."""
    buffers = topk_buffers_of(model)
    if buffers:
        compact([buffer.indices for buffer in buffers], rows)
