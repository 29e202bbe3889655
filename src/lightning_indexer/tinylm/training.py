"""Training of the demo model: seeded, on one thread, resumable, a fixed number of steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .config import TinyConfig
from .corpus import Corpus, windows
from .losses import Losses, window_losses
from .model import TinyLM


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """Everything but the corpus and the model's sizes that the trained weights depend on.

    Attributes:
        steps: optimiser steps.
        seed: of the initial weights and of the windows drawn.
        batch_size: windows of max_model_len a step.
        draft_depth: draft steps trained.
        dense_fraction: share of the steps in which attention is dense and the indexer only learns.
        index_every: steps between two indexer updates.
        peak_lr: learning rate after the first `warmup_steps`; a cosine takes it to a twentieth.
    """

    steps: int = 1500
    seed: int = 0
    batch_size: int = 4
    draft_depth: int = 3
    dense_fraction: float = 0.3
    index_every: int = 3
    peak_lr: float = 3e-3
    warmup_steps: int = 50
    weight_decay: float = 0.1
    draft_weight: float = 0.3
    index_weight: float = 0.1
    initial_std: float = 0.02


@dataclass(frozen=True)
class Progress:
    """Reported after every step; losses in nats a byte."""

    step: int
    steps: int
    sparse: bool
    target: float
    drafts: tuple[float, ...]
    index: float


class Trainer:
    """Model, optimiser and window source between two steps.

    Args:
        config: the model's sizes.
        plan: the recipe.
        corpus: what to learn from.
    """

    def __init__(self, config: TinyConfig, plan: TrainingPlan, corpus: Corpus) -> None:
        self.config, self.plan, self.corpus = config, plan, corpus
        self.step = 0
        self.generator = torch.Generator().manual_seed(plan.seed)
        self.lm = TinyLM(config)
        self.lm.randomize(self.generator, std=plan.initial_std)
        self.optimizer = torch.optim.AdamW(
            self.lm.parameters(),
            lr=plan.peak_lr,
            betas=(0.9, 0.95),
            weight_decay=plan.weight_decay,
        )

    @property
    def sparse(self) -> bool:
        """Whether the dense warm-up is over."""
        return self.step >= self.plan.dense_fraction * self.plan.steps

    def run_step(self) -> Progress:
        """One optimiser step."""
        plan = self.plan
        sparse = self.sparse
        losses = window_losses(
            self.lm,
            self._draw_windows(),
            depth=plan.draft_depth,
            sparse=sparse,
            # Alternating, the draft learns both to reselect and to live with step 0's selection.
            share=self.step % 2 == 0,
            learn_index=self.step % plan.index_every == 0,
        )
        total = losses.target + plan.draft_weight * sum(losses.drafts)
        total = total + plan.index_weight * losses.index
        for group in self.optimizer.param_groups:
            group["lr"] = plan.peak_lr * self._lr_factor()
        self.optimizer.zero_grad(set_to_none=True)
        total.backward()
        nn.utils.clip_grad_norm_(self.lm.parameters(), 1.0)
        self.optimizer.step()
        self.step += 1
        return Progress(self.step, plan.steps, sparse, *_as_floats(losses))

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs to end with the same weights."""
        return {
            "config": asdict(self.config),
            "plan": asdict(self.plan),
            "data_sha256": self.corpus.sha256,
            "step": self.step,
            "model": self.lm.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "generator": self.generator.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from `state_dict`.

        Raises:
            ValueError: when the state belongs to another config, plan or corpus.
        """
        mine = self.state_dict()
        for name in ("config", "plan", "data_sha256"):
            if state[name] != mine[name]:
                raise ValueError(
                    f"checkpoint must be of this run's {name} {mine[name]}, got {state[name]}"
                )
        self.step = state["step"]
        self.lm.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.generator.set_state(state["generator"])

    def _draw_windows(self) -> torch.Tensor:
        length = self.config.max_model_len + 2
        last = len(self.corpus.train) - length
        starts = torch.randint(0, last + 1, (self.plan.batch_size,), generator=self.generator)
        return windows(self.corpus.train, starts, length)

    def _lr_factor(self) -> float:
        plan = self.plan
        rising = min(1.0, (self.step + 1) / plan.warmup_steps)
        return rising * (0.05 + 0.475 * (1 + math.cos(math.pi * self.step / plan.steps)))


def train(
    config: TinyConfig,
    plan: TrainingPlan,
    corpus: Corpus,
    *,
    checkpoint: Path | None = None,
    checkpoint_every: int = 100,
    progress: Callable[[Progress], None] | None = None,
) -> TinyLM:
    """Trains a model; the weights depend on config, plan, corpus, torch and CPU only.

    Args:
        config: the model's sizes.
        plan: the recipe.
        corpus: what to learn from.
        checkpoint: written every `checkpoint_every` steps; if it exists, the run continues
            from it and ends with the weights that an uninterrupted run would have had.
        checkpoint_every: steps between two writes.
        progress: called after every step.

    Raises:
        ValueError: when `checkpoint` is of another run, or the corpus is shorter than a window.
    """
    if len(corpus.train) < config.max_model_len + 2:
        raise ValueError(
            f"corpus must have at least {config.max_model_len + 2} training bytes,"
            f" got {len(corpus.train)}"
        )
    with _one_thread():
        trainer = Trainer(config, plan, corpus)
        if checkpoint is not None and checkpoint.exists():
            trainer.load_state_dict(torch.load(checkpoint, weights_only=True))
        while trainer.step < plan.steps:
            report = trainer.run_step()
            if checkpoint is not None and trainer.step % checkpoint_every == 0:
                _save_atomically(trainer.state_dict(), checkpoint)
            if progress is not None:
                progress(report)
    return trainer.lm


@torch.no_grad()
def validate(lm: TinyLM, corpus: Corpus, *, draft_depth: int = 1, batch: int = 8) -> Losses:
    """Mean losses over the held-out text in consecutive windows of the whole context."""
    rows = lm.config.max_model_len
    starts = torch.arange(0, len(corpus.held_out) - rows - 1, rows)
    was_training = lm.training
    lm.train()
    with _one_thread():
        parts = [
            window_losses(
                lm,
                windows(corpus.held_out, some, rows + 2),
                depth=draft_depth,
                sparse=True,
                share=True,
                learn_index=False,
            )
            for some in starts.split(batch)
        ]
    lm.train(was_training)
    weights = torch.tensor([len(some) for some in starts.split(batch)]) / len(starts)
    target = sum(w * part.target for w, part in zip(weights, parts, strict=True))
    drafts = tuple(
        sum(w * part.drafts[step] for w, part in zip(weights, parts, strict=True))
        for step in range(draft_depth)
    )
    return Losses(target, drafts, torch.zeros(()))


def _as_floats(losses: Losses) -> tuple[float, tuple[float, ...], float]:
    return losses.target.item(), tuple(d.item() for d in losses.drafts), losses.index.item()


def _save_atomically(state: dict[str, Any], path: Path) -> None:
    """A run killed while writing must not lose the checkpoint before."""
    partial = path.with_name(path.name + ".partial")
    torch.save(state, partial)
    partial.replace(path)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Sums split over threads have other bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
