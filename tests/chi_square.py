"""Pearson's test of counts against a law.

Every use has fixed seeds, so it passes or fails for good. Were the seeds drawn afresh, a right
implementation would fail one such test in a million (`FALSE_ALARM`).
"""

from __future__ import annotations

import torch

FALSE_ALARM = 1e-6


def p_value(counts: torch.Tensor, law: torch.Tensor) -> float:
    """The chance of counts at least as far from `law`, which has no cell of chance 0."""
    total = counts.sum()
    expected = law.double() * total
    assert float(expected.min()) >= 5, "too few samples for the chi-square approximation"
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = torch.tensor((law.numel() - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))


def counts_of(cells: torch.Tensor, num_cells: int) -> torch.Tensor:
    return torch.bincount(cells.flatten(), minlength=num_cells)
