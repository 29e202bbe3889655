"""Judges a top-k kernel by what its contract promises."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch

from .. import relations
from ..calls import call_for_result
from ..cases import TopkCase
from ..contracts import TopkContract
from ..runner import Property
from ..strategies import longest_topk_cases, topk_cases, topk_regimes

TopkKernel = Callable[..., torch.Tensor]
Score = tuple[int, float]


def judge_topk(inputs: dict[str, Any], got: object, contract: TopkContract) -> None:
    """Raises AssertionError, with the reason, unless `got` is what the contract promises."""
    logits, k = inputs["logits"], inputs["k"]
    rows, width = logits.shape
    assert isinstance(got, torch.Tensor), f"returned {type(got).__name__}, not a tensor"
    shape = list(got.shape)
    assert shape == [rows, k], f"shape {shape}, expected {[rows, k]}"
    assert got.dtype == contract.index_dtype, f"{got.dtype}, expected {contract.index_dtype}"
    scores = logits.double().tolist()
    for t, row in enumerate(got.tolist()):
        start = 0 if inputs["row_starts"] is None else max(int(inputs["row_starts"][t]), 0)
        end = width if inputs["row_ends"] is None else min(int(inputs["row_ends"][t]), width)
        base = start if contract.positions == "relative" else 0
        window = {s - base: scores[t][s] for s in range(start, end)}
        _judge_row(f"row {t}", row, window, k, contract)


def _judge_row(
    name: str, row: list[int], window: dict[int, float], k: int, contract: TopkContract
) -> None:
    candidates = {p: _rank(s) for p, s in window.items() if not _skipped(s, contract)}
    best = sorted(candidates, key=lambda p: (-candidates[p][0], -candidates[p][1], p))[:k]
    # a candidate is never taken for padding
    chosen = [p for p in row if p in candidates or p != contract.padding]
    for p in chosen:
        assert p in window, f"{name}: position {p} is outside its window of {len(window)} keys"
        assert p in candidates, f"{name}: position {p} has score {window[p]}, which is never chosen"
    assert len(set(chosen)) == len(chosen), f"{name}: a position is chosen twice: {sorted(chosen)}"
    need = len(best)
    assert len(chosen) == need, f"{name}: {len(chosen)} positions chosen, {need} to choose"
    _judge_set(name, chosen, best, candidates, window, contract)
    if contract.order == "any":
        return
    assert row[:need] == chosen, f"{name}: padding between the positions: {row}"
    if contract.order == "ascending":
        assert chosen == sorted(chosen), f"{name}: positions do not ascend: {chosen}"
        return
    ranks = [candidates[p] for p in chosen]
    assert ranks == sorted(ranks, reverse=True), f"{name}: scores do not descend: {chosen}"
    if contract.tie_rule == "smaller position":
        assert chosen == best, f"{name}: equal scores are not in order of position: {chosen}"


def _judge_set(
    name: str,
    chosen: list[int],
    best: list[int],
    candidates: dict[int, Score],
    window: dict[int, float],
    contract: TopkContract,
) -> None:
    wrong, missing = sorted(set(chosen) - set(best)), sorted(set(best) - set(chosen))
    if not wrong:
        return
    got = sorted(candidates[p] for p in chosen)
    if got == sorted(candidates[p] for p in best):
        if contract.tie_rule == "any":
            return
        raise AssertionError(
            f"{name}: a tie at score {window[wrong[0]]} goes to position {wrong[-1]}, not to the"
            f" smaller {missing[0]}"
        )
    left, taken = max(missing, key=candidates.__getitem__), min(wrong, key=candidates.__getitem__)
    raise AssertionError(
        f"{name}: position {left} with score {window[left]} is left out, position {taken} with"
        f" {window[taken]} chosen ({len(missing)} of {len(best)} wrong)"
    )


def _rank(score: float) -> Score:
    """Orders scores; NaN above all, and −0 is +0 as in Python."""
    return (1, 0.0) if math.isnan(score) else (0, score)


def _skipped(score: float, contract: TopkContract) -> bool:
    if math.isnan(score):
        return contract.nan != "greatest"
    return score == -math.inf and contract.neg_inf != "least"


class TopkSuite:
    """The properties of one top-k kernel under its contract."""

    def __init__(self, fn: TopkKernel, contract: TopkContract) -> None:
        self.fn, self.contract = fn, contract

    def call(self, inputs: dict[str, Any], layout: str = "contiguous") -> Any:
        """The kernel's answer, from guarded memory."""
        contract = self.contract
        names = ["logits", "k"]
        if contract.windows != ("none",):
            names += ["row_starts", "row_ends"]
        out = (inputs["logits"].shape[0], inputs["k"]), contract.index_dtype
        return call_for_result(
            self.fn,
            {n: inputs[n] for n in names},
            out=out if contract.takes_out else None,
            layout=layout,
            device=contract.device,
        )

    def selects(self, case: TopkCase) -> None:
        """Whatever the contract says of the set, its order, padding and dtype."""
        judge_topk(case.inputs(), self.call(case.inputs(), case.layout), self.contract)

    def again(self, case: TopkCase) -> None:
        """The same call gives the same bits."""
        first = self.call(case.inputs())
        for _ in range(3):
            relations.assert_equal(self.call(case.inputs()), first, "the same call again")

    def _distinct(self, case: TopkCase) -> dict[str, Any]:
        """Scores without a tie, so that every contract says which are chosen."""
        dtype, length = case.dtype, max(case.length, case.k)
        logits = relations.distinct_scores(case.rows, length, dtype, case.seed)
        return {"logits": logits, "k": case.k, "row_starts": None, "row_ends": None}

    def _inputs(self, case: TopkCase) -> dict[str, Any]:
        inputs = case.inputs()
        if self.contract.tie_rule == "any":
            inputs["logits"] = relations.distinct_scores(
                case.rows, case.length, case.dtype, case.seed
            )
        return inputs

    def _agree(self, a: torch.Tensor, b: torch.Tensor, what: str) -> None:
        agree = relations.as_sets if self.contract.order == "any" else relations.assert_equal
        agree(a, b, what)

    def properties(self) -> list[Property]:
        """A property a regime of scores, then the relations that the contract allows."""
        c = self.contract
        found = [
            Property(
                f"selects the best of {regime} scores",
                topk_cases(c, regimes=[regime]),
                self.selects,
            )
            for regime in topk_regimes(c)
        ]
        if c.max_length > 1100:
            found.append(
                Property("selects the best of long rows", longest_topk_cases(c), self.selects)
            )
        cases, plain = topk_cases(c), ("normal", "rounded")
        two_thirds = min(c.max_length, 1100) * 2 // 3  # leaves room to append
        short = dataclasses.replace(c, max_length=two_thirds, max_k=min(c.max_k, two_thirds))
        room = topk_cases(short, regimes=plain)

        def relation(name: str, run: Callable[[TopkCase], None], drawn: Any) -> None:
            found.append(Property(name, drawn, run))

        if c.deterministic:
            relation("the same call gives the same answer", self.again, cases)
        relation(
            "a row alone gives what it gives in a batch",
            lambda case: relations.row_alone(self.call, self._inputs(case), self._agree),
            cases,
        )
        sliced = {"none", "both"} <= set(c.windows) and c.padding == -1 and c.empty_sizes
        if sliced and c.k_past_length:  # a slice may be shorter than k
            relation(
                "a window gives what its slice gives",
                lambda case: relations.window_is_slice(
                    self.call, self._inputs(case), self._agree, c.positions
                ),
                topk_cases(c, windows=["both"]),
            )
        if "none" in c.windows:
            relation(
                "keys in another order are the same keys",
                lambda case: relations.keys_permuted(self.call, self._distinct(case), case.seed),
                room,
            )
            relation(
                "worse keys appended change nothing",
                lambda case: relations.worse_keys_appended(self.call, self._distinct(case)),
                room,
            )
            relation(
                "scores doubled select the same",
                lambda case: relations.scores_doubled(self.call, self._distinct(case), self._agree),
                room,
            )
        return found
