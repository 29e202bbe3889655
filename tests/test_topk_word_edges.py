"""`topk_indices` whatever bracket a sample gives: what the flags of one can tell is not read again.

The guess is put in place of the sampled one, in the interpreter, so that each row has exactly as
many scores in the bracket and above it as a rule of the selection turns on.
"""

import dataclasses
import math
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch

from lightning_indexer.kernels import topk_finish, topk_kernel, topk_split
from lightning_indexer.kernels.backend import tl
from lightning_indexer.kernels.topk import topk_indices
from lightning_indexer.kernels.topk_plan import TopkPlan
from test_topk_edges import (
    ALONE,
    CAPACITY,
    INF,
    NAN,
    POISON,
    SPLIT,
    by_sorting,
    guarded_scratch,
    launched_by,
)

pytestmark = pytest.mark.interpreter

LEAST = struct.unpack("<f", struct.pack("<I", 0xFF7FFFFF))[0]
FLAG_AT_LEAST, FLAG_BOTH, COUNT = 0, 1, 2
plans = pytest.mark.parametrize("plan", [ALONE, SPLIT], ids=["alone", "split"])


def key_of(x: float) -> int:
    """An integer from 0 to 2³² that orders as binary32 does."""
    bits: int = struct.unpack("<i", struct.pack("<f", x))[0]
    return (bits ^ 0x7FFFFFFF if bits < 0 else bits) + 2**31


ABOVE_ALL = key_of(INF) + 1


@dataclasses.dataclass(frozen=True)
class Guess:
    """`above` different scores of a row above a bracket, `inside` in it, equal ones if `equal`."""

    above: int
    inside: int
    equal: bool = False
    rest: bool = True  # of the row: lower scores, or NaN
    tight: bool = False  # a bracket that ends at its greatest score, not at the least above
    form: int = FLAG_BOTH
    again: bool = False  # flags that tell too little: the row is read once more
    start: int = 0
    length: int = 264  # two tiles, two blocks of words
    last: bool = False  # the best scores are the last

    def row(self) -> list[float]:
        n = self.above + self.inside
        scores = [3.0 - i * 2.0**-21 for i in range(self.above)]
        if self.above and (self.equal or self.tight):
            scores[-1] = 1.0 + 2.0**-23  # the next number after the bracket
        scores += [1.0 - (0 if self.equal else i * 2.0**-24) for i in range(self.inside)]
        scores += [-1.0 - i if self.rest else NAN for i in range(self.length - n)]
        if self.last:
            return scores[::-1]
        order = torch.randperm(self.length, generator=torch.Generator().manual_seed(n))
        return [scores[i] for i in order.tolist()]

    def bracket(self) -> tuple[int, int, int]:
        best = sorted((x for x in self.row() if not math.isnan(x)), reverse=True)
        lo = key_of(best[self.above + self.inside - 1] if self.rest else LEAST)
        hi = key_of(best[self.above - 1]) if self.above else ABOVE_ALL
        if self.equal or self.tight:
            hi = key_of(best[self.above]) + 1
        return lo, hi, self.form


@contextmanager
def guessing(guesses: list[Guess], again: list[int]) -> Iterator[None]:
    """Each row gets its guess; `again` gets an entry for each row that is read once more."""
    brackets, certain = iter([guess.bracket() for guess in guesses]), topk_finish._flag_for_certain

    def sample_bracket(*_: object) -> tuple[object, object, object]:
        lo, hi, form = next(brackets)
        return (tl.full((), lo, tl.uint32), tl.full((), hi, tl.uint32), tl.full((), form, tl.int32))

    def watched(*args: object) -> object:
        again.append(1)
        return certain(*args)

    with (
        patch.object(topk_kernel, "sample_bracket", sample_bracket),
        patch.object(topk_split, "sample_bracket", sample_bracket),
        patch.object(topk_finish, "_flag_for_certain", watched),
    ):
        yield


def check_guesses(k: int, guesses: list[Guess], plan: TopkPlan) -> None:
    rows = len(guesses)
    if plan.splits > 1:
        plan = dataclasses.replace(plan, launch_rows=rows)
    starts = torch.tensor([guess.start for guess in guesses])
    ends = torch.tensor([guess.start + guess.length for guess in guesses])
    x = torch.full((rows, int(ends.max())), INF)  # what is outside a window is not looked at
    for row, guess in zip(x, guesses, strict=True):
        row[guess.start : guess.start + guess.length] = torch.tensor(guess.row())
    out = torch.full((rows + 2, k), POISON, dtype=torch.int32)
    margins: list[torch.Tensor] = []
    again: list[int] = []
    with launched_by(plan), guarded_scratch(margins), guessing(guesses, again):
        topk_indices(x, k, starts, ends, out=out[1:-1])
    assert out[1:-1].tolist() == [by_sorting(guess.row(), k) for guess in guesses]
    assert (out[[0, -1]] == POISON).all() and all((m == POISON).all() for m in margins)
    assert len(again) == sum(guess.again for guess in guesses)


#: Lists hold 16; k is below that, or above it.
FEW, MANY = 10, 40


@plans
def test_list_of_what_is_above_or_of_what_is_inside_holds_the_answer(plan: TopkPlan) -> None:
    above = [Guess(CAPACITY, 5), Guess(FEW, 3, start=2), Guess(12, 30, equal=True, start=1)]
    inside = [Guess(0, CAPACITY, start=3), Guess(0, 12, equal=True)]
    all_there_is = [Guess(0, n, rest=False) for n in (1, FEW - 1)]
    at_least = Guess(0, FEW, form=FLAG_AT_LEAST, start=1, last=True)
    check_guesses(FEW, [*above, *inside, *all_there_is, at_least], plan)


@plans
def test_what_is_above_is_joined_by_the_best_or_the_first_inside(plan: TopkPlan) -> None:
    best = [Guess(3, 2, rest=False), Guess(9, 2, start=1), Guess(3, CAPACITY), Guess(2, 8)]
    check_guesses(FEW, [*best, Guess(3, 20, equal=True), Guess(0, 30, equal=True, start=3)], plan)
    many = [Guess(MANY, 5), Guess(MANY - 1, CAPACITY), Guess(20, 20), Guess(0, MANY)]
    first = [Guess(15, MANY, equal=True), Guess(5, 259, equal=True, start=1)]
    check_guesses(MANY, [*many, *first, Guess(10, 20, rest=False, start=2)], plan)


def test_bracket_of_two_neighbouring_keys_is_more_than_equal_scores() -> None:
    check_guesses(MANY, [Guess(MANY - 1, 2, tight=True)], ALONE)


@plans
def test_flags_that_tell_too_little_are_made_again(plan: TopkPlan) -> None:
    guesses = [Guess(CAPACITY + 1, 5), Guess(3, FEW - 4), Guess(1, CAPACITY + 1)]
    guesses += [Guess(3, 30, tight=True, form=COUNT)]
    again = [dataclasses.replace(guess, again=True, start=s) for s, guess in enumerate(guesses)]
    check_guesses(FEW, again, plan)


@pytest.mark.parametrize("length", [33, 256, 257, 512, 765, 787])
def test_last_flag_of_a_row_counts_wherever_its_word_and_tile_end(length: int) -> None:
    guess = Guess(1, 4, equal=True, length=length, last=True)
    check_guesses(5, [guess], dataclasses.replace(ALONE, threads=8 if length < 512 else 16))
    check_guesses(5, [dataclasses.replace(guess, start=3)], SPLIT)


@plans
def test_row_that_a_list_holds_needs_no_guess(plan: TopkPlan) -> None:
    check_guesses(FEW, [Guess(1, 1, length=CAPACITY)], plan)
