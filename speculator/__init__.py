"""Speculative decoding with a shared selection: batches, hooks, runners and verification."""

from .autoregressive import AutoRegressiveSpeculator
from .batch import target_batch, with_hidden
from .check import IndexSharingError, SharingReport, check_index_sharing
from .config import SpeculatorConfig
from .cuda_graphs import CudaGraphRunner
from .draft_model import DraftModel
from .generate import GenerationResult, TargetModel, generate
from .mtp import MTPSpeculator
from .overlap import OverlapProbe
from .recorded import RecordedRunner
from .rejection import rejection_sample
from .runner import CaptureError, EagerRunner, GraphRunner, GraphStateError
from .sampling import Purpose, SamplingParams, draw_tokens, token_probabilities, uniform_at
from .sharing import SharesTopkIndices, SharingCapability, find_sharing
from .stats import SpeculatorStats
from .step_batch import RequestRows, StepBatch
from .verify import verify_greedy

__all__ = [
    "AutoRegressiveSpeculator",
    "CaptureError",
    "CudaGraphRunner",
    "DraftModel",
    "EagerRunner",
    "GenerationResult",
    "GraphRunner",
    "GraphStateError",
    "IndexSharingError",
    "MTPSpeculator",
    "OverlapProbe",
    "Purpose",
    "RecordedRunner",
    "RequestRows",
    "SamplingParams",
    "SharesTopkIndices",
    "SharingCapability",
    "SharingReport",
    "SpeculatorConfig",
    "SpeculatorStats",
    "StepBatch",
    "TargetModel",
    "check_index_sharing",
    "draw_tokens",
    "find_sharing",
    "generate",
    "rejection_sample",
    "target_batch",
    "token_probabilities",
    "uniform_at",
    "verify_greedy",
    "with_hidden",
]
