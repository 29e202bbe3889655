"""The indexer: configuration, layer plan, shared buffer, paged caches and the module."""

from .block_table import BlockTable
from .buffer import SelectionKind, SelectionState, StaleSelectionError, TopkIndicesBuffer
from .config import IndexerConfig
from .dsa_attention import DSAAttention, DSACache
from .dsa_config import DSAConfig
from .index_k_cache import IndexKCache
from .latent_cache import LatentCache
from .layer_plan import layer_roles, stage_roles
from .lightning_indexer import LightningIndexer

__all__ = [
    "BlockTable",
    "DSAAttention",
    "DSACache",
    "DSAConfig",
    "IndexKCache",
    "IndexerConfig",
    "LatentCache",
    "LightningIndexer",
    "SelectionKind",
    "SelectionState",
    "StaleSelectionError",
    "TopkIndicesBuffer",
    "layer_roles",
    "stage_roles",
]
