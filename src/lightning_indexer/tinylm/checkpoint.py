"""The model on disk: safetensors weights and a card that says where they came from."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from .config import TinyConfig
from .corpus import Corpus
from .evaluation import draft_held_out
from .model import TinyLM
from .training import TrainingPlan, validate

SHIPPED = Path(__file__).parent / "weights"
WEIGHTS_NAME, CARD_NAME = "tinylm.safetensors", "model_card.json"


def save(lm: TinyLM, card: dict[str, Any], directory: Path) -> None:
    """Writes the weights and their card to `directory`, creating it."""
    directory.mkdir(parents=True, exist_ok=True)
    save_file(lm.state_dict(), directory / WEIGHTS_NAME)
    text = json.dumps(card, indent=2, ensure_ascii=False)
    (directory / CARD_NAME).write_text(text + "\n", encoding="utf-8")


def load(directory: Path = SHIPPED) -> tuple[TinyLM, dict[str, Any]]:
    """The weights in `directory` (those that ship with the package) and their card.

    Raises:
        FileNotFoundError: when either file is missing.
    """
    card = json.loads((directory / CARD_NAME).read_text(encoding="utf-8"))
    fields = card["config"] | {"indexer_types": tuple(card["config"]["indexer_types"])}
    lm = TinyLM(TinyConfig(**fields))
    lm.load_state_dict(load_file(directory / WEIGHTS_NAME))
    return lm, card


def describe(lm: TinyLM, plan: TrainingPlan, corpus: Corpus, *, command: str) -> dict[str, Any]:
    """The card of a model that `train` has just made.

    Args:
        lm: the trained weights.
        plan: their recipe.
        corpus: what they learned from; its held-out part is evaluated here.
        command: what to type to make them again.
    """
    losses = validate(lm, corpus, draft_depth=plan.draft_depth)
    return {
        "model": "tinylm: byte-level language model with sparse attention and one MTP layer",
        "parameters": sum(parameter.numel() for parameter in lm.parameters()),
        "validation_nats_per_byte": round(losses.target.item(), 4),
        "validation_draft_nats_per_byte": [round(loss.item(), 4) for loss in losses.drafts],
        "acceptance": {
            "draft_tokens": plan.draft_depth,
            "text": "first 16 greedy bytes after each of 32 held-out prompts",
            "shared": _acceptance(lm, corpus, plan, share=True),
            "fresh": _acceptance(lm, corpus, plan, share=False),
        },
        "loss": "target + draft_weight·Σ drafts + index_weight·KL(attention ‖ indexer)",
        "steps": plan.steps,
        "seed": plan.seed,
        "data": corpus.source,
        "data_sha256": corpus.sha256,
        "held_out_bytes": len(corpus.held_out),
        "command": command,
        "torch": torch.__version__,
        "plan": asdict(plan),
        "config": asdict(lm.config),
    }


def _acceptance(lm: TinyLM, corpus: Corpus, plan: TrainingPlan, *, share: bool) -> float:
    result = draft_held_out(lm, corpus, share=share, num_speculative_steps=plan.draft_depth)
    return round(result.accepted / result.drafted, 4)
