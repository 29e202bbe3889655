"""Judges a kernel of attention over selected slots by what its contract promises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .. import relations
from ..attention_cases import ATTENTION_REGIMES, SparseAttentionCase
from ..attention_reference import attention_error_bounds, sparse_mla_attention
from ..calls import guarded_call
from ..compare import assert_matches
from ..contracts import SparseAttentionContract
from ..runner import Property
from ..strategies import sparse_attention_cases

NAMES = ("q", "kv", "indices", "scale", "v_dim")
#: What a slot is called in the name of a property.
SLOTS = {"floats": "the listed slots", "656 bytes": "656-byte rows"}


class SparseAttentionSuite:
    """The properties of one kernel under its contract."""

    def __init__(self, fn: Callable[..., Any], contract: SparseAttentionContract) -> None:
        if contract.takes_out:
            raise ValueError("takes_out must be False: wrap a kernel that writes out and lse")
        self.fn, self.contract = fn, contract

    def call(self, inputs: dict[str, Any]) -> tuple[torch.Tensor, ...]:
        """(out, lse), or (out,) if the contract says so, from guarded memory."""
        given = {n: inputs[n] for n in NAMES}
        result = guarded_call(self.fn, given, device=self.contract.device)
        results = result if isinstance(result, tuple) else (result,)
        need = 2 if self.contract.lse else 1
        found = [type(x).__name__ for x in results]
        tensors = all(isinstance(x, torch.Tensor) for x in results)
        assert tensors and len(results) == need, f"returned {found}, expected {need} tensors"
        return results

    def attends(self, case: SparseAttentionCase) -> None:
        """Softmax over the listed slots within the derived bounds; unlisted slots are not read."""
        inputs = case.inputs()
        results, expected = self.call(inputs), sparse_mla_attention(**inputs)
        bounds = attention_error_bounds(**inputs, operand=self.contract.operand)
        dtype = results[0].dtype
        assert dtype == case.dtype, f"out is {dtype}, expected {case.dtype}"
        for name, got, want, bound in zip(("out", "lse"), results, expected, bounds, strict=False):
            try:
                assert_matches(got, want, bound)
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from None

    def padded(self, case: SparseAttentionCase) -> None:
        """−1 appended changes nothing, or within rounding nothing."""
        inputs = case.inputs()
        bound = 2 * attention_error_bounds(**inputs, operand=self.contract.operand)[0]

        def within(a: torch.Tensor, b: torch.Tensor, what: str) -> None:
            apart = (a.double() - b.double()).abs() > bound
            assert not apart.any(), f"{what}: {int(apart.sum())} of {apart.numel()} elements differ"

        agree = relations.assert_equal if self.contract.batch_invariant else within
        relations.absent_indices_appended(lambda x: self.call(x)[0], inputs, agree)

    def merged(self, case: SparseAttentionCase) -> None:
        """Split equals whole: halves merge by their lse."""
        inputs = case.inputs()
        bounds = attention_error_bounds(**inputs, operand=self.contract.operand)
        # The whole is within its bound, the halves together too; their shares are off by twice
        # lse's, which adds less than both.
        relations.attention_merged(self.call, inputs, (4 * bounds[0], 4 * bounds[1]))

    def properties(self) -> list[Property]:
        """A property a regime of scores, then the relations that the contract allows."""
        c = self.contract
        found = [
            Property(
                f"attends to {SLOTS[cache]} with {regime} scores",
                sparse_attention_cases(c, regimes=[regime], cache=cache),
                self.attends,
            )
            for cache in c.caches
            for regime in ATTENTION_REGIMES
        ]
        drawn = sparse_attention_cases(c, cache=c.caches[0])
        if c.empty_rows:
            found.append(Property("absent indices appended change nothing", drawn, self.padded))
        if c.lse and c.empty_rows:
            found.append(Property("halves merged by lse are the whole", drawn, self.merged))
        return found
