"""Speculative decoding with a shared selection: batches, hooks, runners and verification."""

from .autoregressive import AutoRegressiveSpeculator, DraftModel
from .batch import RequestRows, StepBatch, target_batch, with_hidden
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
    "MTPSpeculator",
    "OverlapProbe",
    "RecordedRunner",
    "RequestRows",
    "SharesTopkIndices",
    "SharingCapability",
    "SpeculatorConfig",
    "SpeculatorStats",
    "StepBatch",
    "TargetModel",
    "find_sharing",
    "generate",
    "target_batch",
    "verify_greedy",
    "with_hidden",
]
