"""Judges a kernel of paged indexer scores by what its contract promises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .. import reference, relations
from ..bounds import paged_score_bound
from ..calls import call_for_result
from ..contracts import PagedMqaLogitsContract
from ..paged_cases import PagedMqaLogitsCase
from ..runner import Property
from ..strategies import paged_mqa_logits_cases, value_regimes
from .scores import Agreement, judge_scores, where_seen

NAMES = ("q", "cache", "weights", "context_lens", "block_table")


def _seen(inputs: dict[str, Any]) -> torch.Tensor:
    """Which positions lie within their row's length, [rows, max_context_len]."""
    lengths, _ = reference.row_lengths(
        inputs["context_lens"], inputs["q"].shape[1], inputs.get("row_to_request")
    )
    places = torch.arange(inputs["max_context_len"])
    return places < torch.tensor(lengths, dtype=torch.int64)[:, None]


class PagedMqaLogitsSuite:
    """The properties of one kernel under its contract."""

    def __init__(self, fn: Callable[..., torch.Tensor], contract: PagedMqaLogitsContract) -> None:
        self.fn, self.contract = fn, contract

    def call(self, inputs: dict[str, Any], layout: str = "contiguous") -> Any:
        """The kernel's answer, from guarded memory."""
        keywords = {n: x for n, x in inputs.items() if n not in NAMES}
        rows = inputs["q"].shape[0] * inputs["q"].shape[1]
        out = (rows, inputs["max_context_len"]), torch.float32
        return call_for_result(
            self.fn,
            {n: inputs[n] for n in NAMES},
            keywords,
            out=out if self.contract.takes_out else None,
            layout=layout,
            device=self.contract.device,
        )

    def call_where_seen(self, inputs: dict[str, Any]) -> Any:
        """`call`, and −inf for what the contract says nothing of."""
        return where_seen(self.call(inputs), _seen(inputs), self.contract)

    def _scores(self, inputs: dict[str, Any], layout: str) -> None:
        expected = reference.paged_mqa_logits(**inputs)
        bound = paged_score_bound(inputs, self.contract.rounding)
        judge_scores(self.call(inputs, layout), expected, bound, _seen(inputs), self.contract)

    def scores(self, case: PagedMqaLogitsCase) -> None:
        """The formula within rounding, and what the contract says past a row's length."""
        self._scores(case.inputs(hostile=False), case.layout)

    def garbage(self, case: PagedMqaLogitsCase) -> None:
        """Tables, lengths and requests out of range score −inf, and nothing is read there."""
        self._scores(case.inputs(hostile=True), case.layout)

    def again(self, case: PagedMqaLogitsCase) -> None:
        """The same call gives the same bits."""
        inputs = case.inputs(hostile=False)
        first = self.call_where_seen(inputs)
        for _ in range(3):
            again = self.call_where_seen(inputs)
            relations.assert_equal(again, first, "the same call again")

    def renumbered(self, case: PagedMqaLogitsCase) -> None:
        """The page map changes nothing."""
        inputs = case.inputs(hostile=False)
        agree = Agreement(self.contract, paged_score_bound(inputs, self.contract.rounding))
        relations.pages_renumbered(self.call_where_seen, inputs, case.seed, agree)

    def split(self, case: PagedMqaLogitsCase) -> None:
        """Rows of the ragged form may come in any number of calls."""
        inputs = case.inputs(hostile=False)
        agree = Agreement(self.contract, paged_score_bound(inputs, self.contract.rounding))
        rows = ("q", "weights", "context_lens", "row_to_request")
        relations.rows_split(self.call_where_seen, inputs, agree, rows)

    def forms(self, case: PagedMqaLogitsCase) -> None:
        """Lengths [B] and the lengths [B, N] that they mean give the same."""
        inputs = case.inputs(hostile=False)
        agree = Agreement(self.contract, paged_score_bound(inputs, self.contract.rounding))
        lengths, _ = reference.row_lengths(inputs["context_lens"], case.next_n, None)
        own = torch.tensor(lengths, dtype=torch.int32).view(case.requests, case.next_n)
        other = self.call_where_seen(inputs | {"context_lens": own})
        agree(self.call_where_seen(inputs), other, "lengths [B], and [B, N]")

    def properties(self) -> list[Property]:
        """A property a regime of operands, then garbage and relations as the contract allows."""
        c, plain = self.contract, ("normal", "ties", "spread")

        def drawn(*regimes: str, forms: tuple[str, ...] = ()) -> Any:
            return paged_mqa_logits_cases(c, regimes=regimes, forms=forms)

        found = [
            Property(f"scores {regime} operands by the formula", drawn(regime), self.scores)
            for regime in value_regimes(c)
        ]
        if c.garbage:
            found.append(
                Property("garbage in tables and lengths has no score", drawn(*plain), self.garbage)
            )
        found += [
            Property("scores do not depend on the page map", drawn(*plain), self.renumbered),
            Property(
                "weights doubled double the scores",
                drawn("normal", "ties"),
                lambda case: relations.weights_doubled(
                    self.call_where_seen, case.inputs(hostile=False)
                ),
            ),
        ]
        if {"drafts", "own lengths"} <= set(c.forms):
            found.append(
                Property(
                    "both forms of lengths score the same",
                    drawn(*plain, forms=("drafts",)),
                    self.forms,
                )
            )
        if "ragged" in c.forms:
            found.append(
                Property(
                    "rows split over two calls score the same",
                    drawn(*plain, forms=("ragged",)),
                    self.split,
                )
            )
        if c.deterministic:
            found.append(Property("the same call gives the same answer", drawn(), self.again))
        return found
