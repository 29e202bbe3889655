"""Judges a kernel of ragged indexer scores by what its contract promises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .. import reference, relations
from ..bounds import score_bound
from ..calls import call_for_result
from ..cases import MqaLogitsCase
from ..contracts import MqaLogitsContract
from ..runner import Property
from ..strategies import mqa_logits_cases, value_regimes
from .scores import Agreement, judge_scores, where_seen


def _seen(inputs: dict[str, Any]) -> torch.Tensor:
    """Which keys the windows hold, [T, L]."""
    places = torch.arange(inputs["k"].shape[0])
    return (places >= inputs["row_starts"][:, None]) & (places < inputs["row_ends"][:, None])


class MqaLogitsSuite:
    """The properties of one kernel under its contract."""

    def __init__(self, fn: Callable[..., torch.Tensor], contract: MqaLogitsContract) -> None:
        self.fn, self.contract = fn, contract

    def call(self, inputs: dict[str, Any], layout: str = "contiguous") -> Any:
        """The kernel's answer, from guarded memory."""
        names = ("q", "k", "weights", "row_starts", "row_ends")
        keywords = {"k_scale": inputs["k_scale"]} if True in self.contract.scaled else {}
        out = (inputs["q"].shape[0], inputs["k"].shape[0]), torch.float32
        return call_for_result(
            self.fn,
            {n: inputs[n] for n in names},
            keywords,
            out=out if self.contract.takes_out else None,
            layout=layout,
            device=self.contract.device,
        )

    def call_where_seen(self, inputs: dict[str, Any]) -> Any:
        """`call`, and −inf for what the contract says nothing of."""
        return where_seen(self.call(inputs), _seen(inputs), self.contract)

    def _bound(self, inputs: dict[str, Any]) -> torch.Tensor:
        q, k, weights, scale = (inputs[n] for n in ("q", "k", "weights", "k_scale"))
        return score_bound(q, k, weights, scale, self.contract.rounding)

    def scores(self, case: MqaLogitsCase) -> None:
        """The formula within rounding, and what the contract says outside the windows."""
        inputs = case.inputs()
        got, expected = self.call(inputs, case.layout), reference.mqa_logits(**inputs)
        judge_scores(got, expected, self._bound(inputs), _seen(inputs), self.contract)

    def again(self, case: MqaLogitsCase) -> None:
        """The same call gives the same bits."""
        first = self.call_where_seen(case.inputs())
        for _ in range(3):
            again = self.call_where_seen(case.inputs())
            relations.assert_equal(again, first, "the same call again")

    def _relation(self, run: Callable[..., None], *extra: Any) -> Callable[[MqaLogitsCase], None]:
        """`run` on the case's inputs, with the agreement that its bound allows."""

        def check(case: MqaLogitsCase) -> None:
            inputs = case.inputs()
            agree = Agreement(self.contract, self._bound(inputs))
            run(self.call_where_seen, inputs, agree, *extra)

        return check

    def properties(self) -> list[Property]:
        """A property a regime of operands, then the relations that the contract allows."""
        c = self.contract
        found = [
            Property(
                f"scores {regime} operands by the formula",
                mqa_logits_cases(
                    c, regimes=[regime], scaled=[True] if regime == "zero scale" else ()
                ),
                self.scores,
            )
            for regime in value_regimes(c)
            if regime != "zero scale" or True in c.scaled
        ]
        plain = ("normal", "ties", "spread")
        full = mqa_logits_cases(c, regimes=plain, windows=["full"])
        if "full" in c.windows:
            rows = ("q", "weights", "row_starts", "row_ends")
            found += [
                Property(
                    "scores move with their keys",
                    full,
                    self._relation(relations.scored_keys_permuted),
                ),
                Property(
                    "rows split over two calls score the same",
                    full,
                    self._relation(relations.rows_split, rows),
                ),
                Property(
                    "keys split over two calls score the same",
                    full,
                    self._relation(relations.keys_split),
                ),
                Property(
                    "weights doubled double the scores",
                    mqa_logits_cases(c, regimes=("normal", "ties"), windows=["full"]),
                    lambda case: relations.weights_doubled(self.call_where_seen, case.inputs()),
                ),
            ]
        if c.outside == "-inf" and c.special_values:
            found.append(
                Property(
                    "keys that no window holds change nothing",
                    mqa_logits_cases(c, regimes=plain),
                    self._relation(relations.unseen_keys_changed),
                )
            )
        if c.deterministic:
            found.append(
                Property("the same call gives the same answer", mqa_logits_cases(c), self.again)
            )
        return found
