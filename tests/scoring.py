"""What the scoring tests share: the kit's cases within our contract, and equality of bits."""

from dataclasses import dataclass

import torch
from hypothesis import settings

from lightning_indexer.kernels.backend import INTERPRET
from lightning_indexer.testing.bounds import score_bound
from lightning_indexer.testing.cases import BF16, FP16, FP32
from lightning_indexer.testing.cases import MqaLogitsCase as ScoreCase
from lightning_indexer.testing.contracts import MqaLogitsContract
from lightning_indexer.testing.layouts import laid_out
from lightning_indexer.testing.regimes import FP8
from lightning_indexer.testing.strategies import mqa_logits_cases

__all__ = [
    "BF16",
    "FP8",
    "FP16",
    "FP32",
    "MOVABLE_REGIME",
    "Canary",
    "ScoreCase",
    "few_rows",
    "same_bits",
    "score_bound",
    "score_cases",
    "share",
    "strided",
]
#: numpy's BLAS, which multiplies for the interpreter, rounds by the place in the matrix. Tests that
#: move queries and keys about can expect equal bits there only of sums that are exact.
MOVABLE_REGIME = "ties" if INTERPRET else None

score_cases = mqa_logits_cases(MqaLogitsContract(special_values=False, empty_sizes=False))
#: Selection is slow in the interpreter.
few_rows = mqa_logits_cases(
    MqaLogitsContract(special_values=False, empty_sizes=False, max_rows=4, max_length=80)
)


def share(part: int) -> settings:
    """One `part`-th of the profile's examples: the tests of an op together make up the whole."""
    return settings(max_examples=max(3, -(-settings().max_examples // part)))


def strided(x: torch.Tensor) -> torch.Tensor:
    """A copy of `x` whose axes lie in reverse order, every other element, at an odd offset."""
    return laid_out(x, "strided")


@dataclass(frozen=True)
class Canary:
    """An output with strange strides inside a poisoned tensor."""

    around: torch.Tensor
    out: torch.Tensor

    POISON = 12345.0

    @classmethod
    def of(cls, rows: int, width: int, dtype: torch.dtype = torch.float32) -> "Canary":
        around = torch.full((rows + 2, 2 * width + 2), cls.POISON).to(dtype)
        return cls(around, around[1:-1, 1:-1:2])

    def assert_nothing_else_written(self) -> None:
        self.out.fill_(self.POISON)
        assert (self.around == self.POISON).all()


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))
