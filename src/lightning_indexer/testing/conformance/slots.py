"""Judges a kernel that turns positions into slots by what its contract promises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .. import reference, relations
from ..calls import call_for_result
from ..cases import SlotsCase
from ..contracts import SlotsContract
from ..runner import Property
from ..strategies import slots_cases

NAMES = ("indices", "block_table", "row_to_request")


def judge_slots(inputs: dict[str, Any], got: object) -> None:
    """Raises AssertionError, with the reason, unless `got` is each position's slot."""
    indices, table = inputs["indices"], inputs["block_table"]
    expected = reference.indices_to_slots(
        indices, table, inputs["row_to_request"], inputs["page_size"]
    )
    assert isinstance(got, torch.Tensor), f"returned {type(got).__name__}, not a tensor"
    shape = list(got.shape)
    assert shape == list(expected.shape), f"shape {shape}, expected {list(expected.shape)}"
    assert got.dtype in (torch.int32, torch.int64), f"{got.dtype}, expected int32 or int64"
    wrong = got != expected
    if wrong.any():
        t, j = wrong.nonzero()[0].tolist()
        position, request = int(indices[t, j]), int(inputs["row_to_request"][t])
        raise AssertionError(
            f"position {position} of request {request} (row {t}, place {j}) has slot"
            f" {int(expected[t, j])}, got {int(got[t, j])}; the table is {list(table.shape)}, pages"
            f" of {inputs['page_size']}"
        )


class SlotsSuite:
    """The properties of one kernel under its contract."""

    def __init__(self, fn: Callable[..., torch.Tensor], contract: SlotsContract) -> None:
        self.fn, self.contract = fn, contract

    def _inputs(self, case: SlotsCase) -> dict[str, Any]:
        return dict(zip(NAMES, case.tensors(), strict=True)) | {"page_size": case.page_size}

    def call(self, inputs: dict[str, Any], layout: str = "contiguous") -> Any:
        """The kernel's answer, from guarded memory."""
        out = tuple(inputs["indices"].shape), inputs["row_to_request"].dtype
        return call_for_result(
            self.fn,
            {n: inputs[n] for n in (*NAMES, "page_size")},
            out=out if self.contract.takes_out else None,
            layout=layout,
            device=self.contract.device,
        )

    def slots(self, case: SlotsCase) -> None:
        """Page times page size plus offset; −1 where there is none."""
        inputs = self._inputs(case)
        judge_slots(inputs, self.call(inputs, case.layout))

    def properties(self) -> list[Property]:
        """Positions of a table, garbage if the contract has an answer to it, and relations."""
        c = self.contract
        known = slots_cases(c, garbage=[False])
        found = [
            Property("turns positions into slots", known, self.slots),
            Property(
                "a slot depends on its position alone",
                known,
                lambda case: relations.indices_permuted(self.call, self._inputs(case), case.seed),
            ),
        ]
        if c.garbage:
            garbage = slots_cases(c, garbage=[True])
            found.append(Property("garbage has no slot", garbage, self.slots))
        if 1 in c.page_sizes:
            found.append(
                Property(
                    "a table of tokens gives what one of pages does",
                    slots_cases(c),
                    lambda case: relations.table_expanded(self.call, self._inputs(case)),
                )
            )
        return found
