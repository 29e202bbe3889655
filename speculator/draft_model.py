"""What a speculator drives, and who may watch it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from .step_batch import StepBatch

#: Called after decode step s ≥ 1 with the step and its batch; must not change any output. A round
#: with an observer runs no fused graph.
StepObserver = Callable[[int, StepBatch], None]


class DraftModel(Protocol):
    """What a speculator drives."""

    def forward(self, batch: StepBatch) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Hidden states [Tp, hidden_size] of the batch's rows.

        Or a pair: the states that `compute_logits` takes, and those fed to the next step.
        """

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [n, vocab] of hidden states [n, hidden_size]."""
