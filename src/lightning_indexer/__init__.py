"""Exact, deterministic sparse-attention indexer: scoring, top-k, and index sharing for MTP drafts.

Ops are plain functions on tensors; `LightningIndexer` is the layer around them, and
`MTPSpeculator` the driver that lets draft steps share one selection.
"""

from .indexer import (
    BlockTable,
    DSAAttention,
    DSACache,
    DSAConfig,
    IndexerConfig,
    IndexKCache,
    LatentCache,
    LightningIndexer,
    SelectionKind,
    SelectionState,
    StaleSelectionError,
    TopkIndicesBuffer,
    layer_roles,
    stage_roles,
)
from .kernels.compact import compact_topk_indices
from .kernels.mqa_logits import mqa_logits
from .kernels.paged_mqa_logits import paged_mqa_logits
from .kernels.prepare_index_k import prepare_index_k
from .kernels.prepare_index_q import prepare_index_q
from .kernels.prepare_ragged_index_k import prepare_ragged_index_k
from .kernels.read_index_k import read_index_k
from .kernels.select_topk import paged_select_topk, select_topk
from .kernels.slots import indices_to_slots
from .kernels.sparse_mla_attention import sparse_mla_attention
from .kernels.topk import topk_indices
from .kernels.write_index_k import write_index_k
from .kernels.write_mla_kv import write_mla_kv
from .speculator import (
    AutoRegressiveSpeculator,
    CaptureError,
    CudaGraphRunner,
    DraftModel,
    EagerRunner,
    GenerationResult,
    GraphRunner,
    GraphStateError,
    IndexSharingError,
    MTPSpeculator,
    OverlapProbe,
    Purpose,
    RecordedRunner,
    RequestRows,
    SamplingParams,
    SharesTopkIndices,
    SharingCapability,
    SharingReport,
    SpeculatorConfig,
    SpeculatorStats,
    StepBatch,
    TargetModel,
    check_index_sharing,
    draw_tokens,
    find_sharing,
    generate,
    rejection_sample,
    target_batch,
    token_probabilities,
    uniform_at,
    verify_greedy,
    with_hidden,
)

__version__ = "0.1.0"

__all__ = [
    "AutoRegressiveSpeculator",
    "BlockTable",
    "CaptureError",
    "CudaGraphRunner",
    "DSAAttention",
    "DSACache",
    "DSAConfig",
    "DraftModel",
    "EagerRunner",
    "GenerationResult",
    "GraphRunner",
    "GraphStateError",
    "IndexKCache",
    "IndexSharingError",
    "IndexerConfig",
    "LatentCache",
    "LightningIndexer",
    "MTPSpeculator",
    "OverlapProbe",
    "Purpose",
    "RecordedRunner",
    "RequestRows",
    "SamplingParams",
    "SelectionKind",
    "SelectionState",
    "SharesTopkIndices",
    "SharingCapability",
    "SharingReport",
    "SpeculatorConfig",
    "SpeculatorStats",
    "StaleSelectionError",
    "StepBatch",
    "TargetModel",
    "TopkIndicesBuffer",
    "check_index_sharing",
    "compact_topk_indices",
    "draw_tokens",
    "find_sharing",
    "generate",
    "indices_to_slots",
    "layer_roles",
    "mqa_logits",
    "paged_mqa_logits",
    "paged_select_topk",
    "prepare_index_k",
    "prepare_index_q",
    "prepare_ragged_index_k",
    "read_index_k",
    "rejection_sample",
    "select_topk",
    "sparse_mla_attention",
    "stage_roles",
    "target_batch",
    "token_probabilities",
    "topk_indices",
    "uniform_at",
    "verify_greedy",
    "with_hidden",
    "write_index_k",
    "write_mla_kv",
]
