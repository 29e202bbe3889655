"""The toy models with logits that leave room for chance, and the exact law of their target."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import torch

from lightning_indexer.speculator.sampling import SamplingParams, token_probabilities
from toy import PRIME, VOCAB, SharingDraft, ToyTarget, columns, expand, mix


def soft_logits(hidden: torch.Tensor) -> torch.Tensor:
    """In [0, 1), a hash of the hidden state."""
    values = [mix(*columns(hidden), token) % 1000 for token in range(VOCAB)]
    return torch.stack(values, dim=1) / 1000


class SoftTarget(ToyTarget):
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return soft_logits(hidden)


class SoftDraft(SharingDraft):
    """Keeps the logits of every forward that Python executes."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.logits: list[torch.Tensor] = []

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.logits.append(3 * soft_logits(hidden))  # not the target's law
        return self.logits[-1]


def continuation_law(prompt: Sequence[int], count: int, params: SamplingParams) -> torch.Tensor:
    """[VOCAB^count] chances of each continuation of `prompt`; params of one request."""
    chances = []
    for tokens in product(range(VOCAB), repeat=count):
        known, chance = list(prompt), 1.0
        for token in tokens:
            context = sum(mix(i, t) for i, t in enumerate(known)) % PRIME
            logits = soft_logits(torch.tensor([expand(context)]))
            chance *= float(token_probabilities(logits, params)[0, token])
            known.append(token)
        chances.append(chance)
    return torch.tensor(chances, dtype=torch.float64)
