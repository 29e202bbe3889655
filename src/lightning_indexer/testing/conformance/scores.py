"""What the judges of ragged and paged scores share."""

from __future__ import annotations

import torch

from .. import relations
from ..compare import assert_matches
from ..contracts import ScoreContract


def judge_scores(
    got: object,
    expected: torch.Tensor,
    bound: torch.Tensor,
    visible: torch.Tensor,
    contract: ScoreContract,
) -> None:
    """Raises AssertionError unless `got` is the oracle's scores within `bound` where visible.

    `visible` [rows, L] says which positions a row sees; elsewhere the contract decides.
    """
    assert isinstance(got, torch.Tensor), f"returned {type(got).__name__}, not a tensor"
    shape = list(got.shape)
    assert shape == list(expected.shape), f"shape {shape}, expected {list(expected.shape)}"
    assert got.dtype == torch.float32, f"{got.dtype}, expected torch.float32"
    if contract.outside == "-inf":
        wrong = ~visible & ~torch.isneginf(got)
        if wrong.any():
            t, s = wrong.nonzero()[0].tolist()
            raise AssertionError(
                f"row {t} has score {got[t, s]} at position {s}, which it does not see"
                f" ({int(wrong.sum())} such scores)"
            )
    assert_matches(torch.where(visible, got, 0.0), torch.where(visible, expected, 0.0), bound)


def where_seen(got: torch.Tensor, visible: torch.Tensor, contract: ScoreContract) -> torch.Tensor:
    """`got`, and −inf where nothing is promised: two calls need not agree there."""
    if contract.outside == "-inf":
        return got
    return got.masked_fill(~visible, float("-inf"))


class Agreement:
    """How near two scores of the same query and key must be: equal, or within twice the bound."""

    def __init__(self, contract: ScoreContract, bound: torch.Tensor) -> None:
        self.exact, self.bound = contract.batch_invariant, 2 * bound

    def __call__(self, a: torch.Tensor, b: torch.Tensor, what: str) -> None:
        """Raises AssertionError, saying `what`, unless a and b agree."""
        if self.exact:
            relations.assert_equal(a, b, what)
            return
        assert a.shape == b.shape, f"{what}: shapes {list(a.shape)} and {list(b.shape)}"
        apart = (a.double() - b.double()).abs() > self.bound
        wrong = apart | (torch.isnan(a) != torch.isnan(b))
        assert not wrong.any(), f"{what}: {int(wrong.sum())} of {wrong.numel()} scores differ"
