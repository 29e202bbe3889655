"""The demo model: a small byte-level language model with sparse attention and an MTP draft."""

from .checkpoint import describe, load, save
from .config import MINIATURE, TinyConfig
from .corpus import Corpus, python_topics, split_text
from .evaluation import draft_held_out
from .model import TinyLM, random_model
from .runtime import TinyDraft, TinyTarget, build
from .training import Progress, TrainingPlan, train, validate

__all__ = [
    "MINIATURE",
    "Corpus",
    "Progress",
    "TinyConfig",
    "TinyDraft",
    "TinyLM",
    "TinyTarget",
    "TrainingPlan",
    "build",
    "describe",
    "draft_held_out",
    "load",
    "python_topics",
    "random_model",
    "save",
    "split_text",
    "train",
    "validate",
]
