"""Judges a kernel of in-place row compaction by what its contract promises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .. import reference, relations
from ..calls import guarded_call
from ..cases import CompactCase
from ..contracts import CompactContract
from ..runner import Property
from ..strategies import compact_cases


def judge_compaction(
    old: torch.Tensor, got: torch.Tensor, rows: torch.Tensor, limit: int, name: str
) -> None:
    """Raises AssertionError, with the reason, unless `got` is `old` compacted by `rows`."""
    expected = reference.compact_topk_indices(old, rows, num_rows=limit)
    wrong = (got != expected).any(dim=1)
    if not wrong.any():
        return
    i = int(wrong.nonzero()[0])
    if i >= len(rows):
        raise AssertionError(f"{name}: row {i} has changed, only the first {len(rows)} may")
    source = int(rows[i])
    if not 0 <= source < limit:
        raise AssertionError(f"{name}: row {i} is of the unknown row {source} and is not −1")
    clue = ""
    if source < len(rows) and torch.equal(got[i], got[source]):
        clue = f": that row was overwritten before row {i} was read from it"
    raise AssertionError(f"{name}: row {i} is not what row {source} held{clue}")


class CompactSuite:
    """The properties of one kernel under its contract."""

    def __init__(self, fn: Callable[..., Any], contract: CompactContract) -> None:
        self.fn, self.contract = fn, contract

    def call(
        self, buffers: list[torch.Tensor], rows: torch.Tensor, num_rows: int | None = None
    ) -> list[torch.Tensor]:
        """The buffers after the call, which happens in guarded copies of them."""
        passed = buffers if self.contract.several else buffers[0]
        keywords = {} if num_rows is None else {"num_rows": num_rows}
        guarded_call(
            self.fn,
            {"buffers": passed, "rows": rows},
            keywords,
            device=self.contract.device,
            writes=frozenset({"buffers"}),
        )
        return buffers

    def moves_rows(self, case: CompactCase) -> None:
        """Row i becomes old row rows[i], and nothing else changes."""
        got = self.call(case.buffers(), case.rows(), case.num_rows and case.limit)
        for i, (old, new) in enumerate(zip(case.buffers(), got, strict=True)):
            judge_compaction(old, new, case.rows(), case.limit, f"buffer {i}")

    def together(self, case: CompactCase) -> None:
        """Buffers in one call end as each alone does, and one listed twice as listed once."""
        relations.compacted_together(self.call, case.buffers(), case.rows())
        if self.contract.repeats:
            relations.listed_twice(self.call, case.buffers()[0], case.rows())

    def twice(self, case: CompactCase) -> None:
        """Compactions compose."""
        relations.compacted_twice(self.call, case.buffers()[0], case.rows())

    def properties(self) -> list[Property]:
        """A property an order of row ids, then the relations that the contract allows."""
        c = self.contract
        found = [
            Property(
                f"moves rows whose ids are {order}",
                compact_cases(c, orders=[order]),
                self.moves_rows,
            )
            for order in c.orders
        ]
        if c.several:
            found.append(
                Property("buffers together end as each alone", compact_cases(c), self.together)
            )
        known = tuple(order for order in c.orders if order != "wild")
        if known:
            found.append(
                Property("compactions compose", compact_cases(c, orders=known), self.twice)
            )
        return found
