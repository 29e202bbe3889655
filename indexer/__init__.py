"""The indexer: configuration, layer plan, shared buffer, paged caches and the module."""

from .block_table import BlockTable
from .buffer import SelectionKind, SelectionState, StaleSelectionError, TopkIndicesBuffer
from .config import IndexerConfig
from .index_k_cache import IndexKCache
from .layer_plan import layer_roles, stage_roles
from .lightning_indexer import LightningIndexer

__all__ = [
    "BlockTable",
    "IndexKCache",
    "IndexerConfig",
    "LightningIndexer",
    "SelectionKind",
    "SelectionState",
    "StaleSelectionError",
    "TopkIndicesBuffer",
    "layer_roles",
    "stage_roles",
]
