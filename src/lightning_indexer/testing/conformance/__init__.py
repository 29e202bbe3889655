"""Conformance suites: any kernel, judged by the promises that its own contract makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...speculator.check import IndexSharingError
from ...speculator.check import check_index_sharing as drive_index_sharing
from ...speculator.draft_model import DraftModel
from ..contracts import (
    CompactContract,
    IndexSharingContract,
    KernelContract,
    MqaLogitsContract,
    PagedMqaLogitsContract,
    SlotsContract,
    SparseAttentionContract,
    TopkContract,
)
from ..report import ConformanceReport, Failure, Outcome
from ..runner import Property, run_property
from .compact import CompactSuite
from .mqa_logits import MqaLogitsSuite
from .paged_mqa_logits import PagedMqaLogitsSuite
from .slots import SlotsSuite
from .sparse_attention import SparseAttentionSuite
from .topk import TopkSuite

#: By name of the op: what a kernel of it promises unless it says otherwise, and who judges it.
SUITES: dict[str, tuple[type[KernelContract], Callable[..., Any]]] = {
    "topk": (TopkContract, TopkSuite),
    "mqa_logits": (MqaLogitsContract, MqaLogitsSuite),
    "paged_mqa_logits": (PagedMqaLogitsContract, PagedMqaLogitsSuite),
    "compact": (CompactContract, CompactSuite),
    "slots": (SlotsContract, SlotsSuite),
    "sparse_attention": (SparseAttentionContract, SparseAttentionSuite),
}
EXAMPLES = 25


def properties(
    op: str, fn: Callable[..., Any], contract: KernelContract | None = None
) -> list[Property]:
    """What is asked of a kernel of `op` (a key of SUITES) under its contract."""
    kind, suite = SUITES[op]
    contract = kind() if contract is None else contract
    if not isinstance(contract, kind):
        raise TypeError(f"contract must be a {kind.__name__}, got {type(contract).__name__}")
    return suite(fn, contract).properties()


def check_topk(
    fn: Callable[..., Any], contract: TopkContract | None = None, *, examples: int = EXAMPLES
) -> ConformanceReport:
    """Judges `fn(logits, k, row_starts, row_ends) → [T, k]` positions; see `TopkContract`.

    Args:
        fn: called as `topk_indices` is; with `contract.takes_out` also given `out=`.
        contract: what it promises (default: what `topk_indices` does).
        examples: cases tried for each property.

    Returns:
        The report. It does not raise for a wrong kernel: call its `raise_if_failed()`.

    Guarantees:
        Every call runs on guarded copies, and writes outside outputs are failures. The cases are
        the same on every run, and what fails is shrunk.
    """
    return _check("topk", fn, contract, examples)


def check_mqa_logits(
    fn: Callable[..., Any], contract: MqaLogitsContract | None = None, *, examples: int = EXAMPLES
) -> ConformanceReport:
    """Judges `fn(q, k, weights, row_starts, row_ends, k_scale=…)`; else as `check_topk`."""
    return _check("mqa_logits", fn, contract, examples)


def check_paged_mqa_logits(
    fn: Callable[..., Any],
    contract: PagedMqaLogitsContract | None = None,
    *,
    examples: int = EXAMPLES,
) -> ConformanceReport:
    """Judges `fn(q, cache, weights, context_lens, block_table, …)`; else as `check_topk`.

    Keywords are `max_context_len`, `page_size` and, in the ragged form, `row_to_request`.
    """
    return _check("paged_mqa_logits", fn, contract, examples)


def check_compact(
    fn: Callable[..., Any], contract: CompactContract | None = None, *, examples: int = EXAMPLES
) -> ConformanceReport:
    """Judges `fn(buffers, rows)`, in place (with `num_rows=` if promised); else as `check_topk`."""
    return _check("compact", fn, contract, examples)


def check_slots(
    fn: Callable[..., Any], contract: SlotsContract | None = None, *, examples: int = EXAMPLES
) -> ConformanceReport:
    """Judges `fn(indices, block_table, row_to_request, page_size)`; else as `check_topk`."""
    return _check("slots", fn, contract, examples)


def check_sparse_attention(
    fn: Callable[..., Any],
    contract: SparseAttentionContract | None = None,
    *,
    examples: int = EXAMPLES,
) -> ConformanceReport:
    """Judges `fn(q, kv, indices, scale, v_dim) → (out, lse)`; else as `check_topk`."""
    return _check("sparse_attention", fn, contract, examples)


def check_index_sharing(model: DraftModel, contract: IndexSharingContract) -> ConformanceReport:
    """Judges a draft model that shares its selection, by driving it; see the speculator's check.

    Run it before serving: it writes to the first pages of the model's caches. The report has one
    property, whose failing case is the contract.
    """
    options = {name: getattr(contract, name) for name in contract.__dataclass_fields__}
    failure = None
    try:
        drive_index_sharing(model, **options)
    except IndexSharingError as error:
        failure = Failure(contract, str(error))
    outcome = Outcome("drafts share the selection of step 0", 1, failure)
    return ConformanceReport(type(model).__name__, "index_sharing", (outcome,))


def _check(
    op: str, fn: Callable[..., Any], contract: KernelContract | None, examples: int
) -> ConformanceReport:
    outcomes = tuple(run_property(p, examples) for p in properties(op, fn, contract))
    return ConformanceReport(getattr(fn, "__name__", repr(fn)), op, outcomes)
