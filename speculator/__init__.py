"""Speculative decoding with a shared selection: batches, hooks, runners and verification."""

from .autoregressive import AutoRegressiveSpeculator, DraftModel
from .batch import RequestRows, StepBatch, target_batch, with_hidden
from .check import IndexSharingError, SharingReport, check_index_sharing
from .config import SpeculatorConfig
from .generate import GenerationResult, TargetModel, generate
from .mtp import MTPSpeculator
from .overlap import OverlapProbe
from .recorded import CaptureError, RecordedRunner
from .runner import EagerRunner, GraphRunner, GraphStateError
from .sharing import SharesTopkIndices, SharingCapability, find_sharing
from .stats import SpeculatorStats
from .verify import verify_greedy

__all__ = [
    "AutoRegressiveSpeculator",
    "CaptureError",
    "DraftModel",
    "EagerRunner",
    "GenerationResult",
    "GraphRunner",
    "GraphStateError",
    "IndexSharingError",
    "MTPSpeculator",
    "OverlapProbe",
    "RecordedRunner",
    "RequestRows",
    "SharesTopkIndices",
    "SharingCapability",
    "SharingReport",
    "SpeculatorConfig",
    "SpeculatorStats",
    "StepBatch",
    "TargetModel",
    "check_index_sharing",
    "find_sharing",
    "generate",
    "target_batch",
    "verify_greedy",
    "with_hidden",
]
