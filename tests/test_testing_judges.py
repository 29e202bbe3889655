"""Judges accept what a contract promises and nothing else; reports say what was found."""

import dataclasses
import re
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import right_kernels
import wrong_kernels
from lightning_indexer.testing import (
    CompactContract,
    ConformanceError,
    IndexSharingContract,
    MqaLogitsContract,
    SparseAttentionContract,
    TopkContract,
    check_compact,
    check_index_sharing,
    check_slots,
    check_sparse_attention,
    check_topk,
    reference,
)
from lightning_indexer.testing.cases import TopkCase
from lightning_indexer.testing.conformance import SUITES, properties, run_property
from lightning_indexer.testing.conformance.topk import judge_topk
from lightning_indexer.testing.runner import Property
from lightning_indexer.testing.strategies import sizes, topk_cases
from lightning_indexer.tinylm.model import random_model
from lightning_indexer.tinylm.runtime import build

pytestmark = [pytest.mark.once, pytest.mark.usefixtures("uncounted")]

NAN, INF = float("nan"), float("inf")
OURS = TopkContract()


def inputs_of(scores: list[float], k: int) -> dict:
    return {"logits": torch.tensor([scores]), "k": k, "row_starts": None, "row_ends": None}


def judge(scores: list[float], chosen: list[int], **promises: object) -> None:
    got = torch.tensor([chosen], dtype=torch.int32)
    judge_topk(inputs_of(scores, len(chosen)), got, TopkContract(**promises))


@given(case=topk_cases())
def test_the_oracle_is_accepted(case: TopkCase) -> None:
    judge_topk(case.inputs(), reference.topk_indices(**case.inputs()), OURS)


@given(case=topk_cases(TopkContract(empty_sizes=False)), change=st.integers(1, 2**20))
@settings(max_examples=30)
def test_anything_but_the_oracle_is_rejected(case: TopkCase, change: int) -> None:
    got = reference.topk_indices(**case.inputs())
    place = change % got.numel()
    got.view(-1)[place] += 1 if change % 2 else -1
    with pytest.raises(AssertionError, match=r"^row "):
        judge_topk(case.inputs(), got, OURS)


@pytest.mark.parametrize(
    "scores, chosen, reason",
    [
        ([1, 1, 0], [1], "a tie at score 1.0 goes to position 1, not to the smaller 0"),
        ([0.0, -0.0], [1], "a tie at score -0.0 goes to position 1"),
        ([3, 1, 2], [0, 1], "position 2 with score 2.0 is left out, position 1 with 1.0 chosen"),
        ([3, 1, 2], [2, 0], "positions do not ascend"),
        ([3, NAN], [0, 1], "position 1 has score nan, which is never chosen"),
        ([3, -INF], [0, 1], "position 1 has score -inf, which is never chosen"),
        ([3, NAN, 1], [0, -1], "1 positions chosen, 2 to choose"),
        ([3, NAN], [-1, 0], "padding between the positions"),
        ([3, 2], [0, 0], "a position is chosen twice"),
        ([3, 2], [0, 7], "position 7 is outside its window of 2 keys"),
    ],
)
def test_reason_is_told(scores: list[float], chosen: list[int], reason: str) -> None:
    with pytest.raises(AssertionError, match=re.escape(reason)):
        judge(scores, chosen)


def test_a_weaker_promise_accepts_more_and_not_everything() -> None:
    judge([1, 1, 0], [1], tie_rule="any")
    judge([3, 1, 2], [2, 0], order="any")
    judge([3, 1, 2], [0, 2], order="score")
    judge([3, NAN], [-1, 0], order="any")
    judge([3, NAN, 5], [1, 2], nan="greatest")
    judge([3, -INF], [0, 1], neg_inf="least")
    judge([3, NAN], [0, 99], padding=99)
    judge([0.0] * 99 + [1.0], [99], padding=99)
    judge([3, NAN, NAN], [0, 2], padding=2)
    for scores, chosen, promises in (
        ([1, 1, 0], [2], {"tie_rule": "any"}),
        ([3, 1, 2], [1, 0], {"order": "any"}),
        ([3, 1, 5], [0, 2], {"order": "score", "tie_rule": "any"}),
        ([1, 1], [1, 0], {"order": "score"}),
        ([3, NAN, 5], [0, 2], {"nan": "greatest"}),
        ([3, NAN], [0, -1], {"padding": 99}),
    ):
        with pytest.raises(AssertionError):
            judge(scores, chosen, **promises)


def test_shape_and_dtype_are_judged() -> None:
    inputs = inputs_of([1, 2], 1)
    for got, reason in (
        (None, "returned NoneType"),
        (torch.zeros(1, 2, dtype=torch.int32), r"shape \[1, 2\], expected \[1, 1\]"),
        (torch.ones(1, 1, dtype=torch.int64), "torch.int64, expected torch.int32"),
    ):
        with pytest.raises(AssertionError, match=reason):
            judge_topk(inputs, got, OURS)
    judge_topk(inputs, torch.ones(1, 1).long(), TopkContract(index_dtype=torch.int64))


@pytest.mark.parametrize(
    "contract, options, name",
    [
        (TopkContract, {"order": "ascending?"}, "order"),
        (TopkContract, {"nan": "first"}, "nan"),
        (TopkContract, {"windows": ("start",)}, "windows"),
        (CompactContract, {"orders": ("sorted",)}, "orders"),
        (MqaLogitsContract, {"dtypes": ("int8",)}, "dtypes"),
        (MqaLogitsContract, {"outside": "zero"}, "outside"),
        (SparseAttentionContract, {"layouts": ("ragged",)}, "layouts"),
    ],
)
def test_a_word_that_promises_nothing_known_is_named(
    contract: type, options: dict, name: str
) -> None:
    with pytest.raises(ValueError, match=f"^{name} must be out of"):
        contract(**options)


def test_rows_without_a_padding_have_no_windows() -> None:
    with pytest.raises(ValueError, match=r"^windows must be \('none',\) without a padding"):
        TopkContract(padding=None)


def test_contract_of_another_op_is_an_error() -> None:
    with pytest.raises(TypeError, match="contract must be a TopkContract, got CompactContract"):
        check_topk(right_kernels.torch_topk, CompactContract())


def test_report_lists_the_smallest_failing_case_and_its_repr_is_python() -> None:
    report = check_compact(wrong_kernels.compact_forward)
    assert {o.name for o in report.failures} >= {"moves rows whose ids are reversed"}
    failure = next(o.failure for o in report.failures if "reversed" in o.name)
    assert failure.case.height == failure.case.n == 2 and failure.case.widths == (1,)
    names = {"torch": torch, type(failure.case).__name__: type(failure.case)}
    assert eval(repr(failure.case), names) == failure.case
    assert repr(failure.case) in str(report) and "overwritten before" in str(report)
    with pytest.raises(ConformanceError, match=r"compact_forward as compact: . of 7 properties"):
        report.raise_if_failed()


def test_report_of_a_right_kernel_counts_its_cases() -> None:
    contract = right_kernels.compact.lightning_indexer_contract
    report = check_compact(right_kernels.compact, contract, examples=7)
    assert report.raise_if_failed() is report and report.cases == 7 * len(report.outcomes)
    assert "all 4 properties hold, 28 cases" in str(report)


def test_what_a_kernel_raises_is_its_failure() -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no kernel image")

    report = check_slots(broken, examples=3)
    assert len(report.failures) == len(report.outcomes)
    assert "RuntimeError raised: no kernel image" in str(report)


def test_a_kernel_that_answers_differently_each_time_is_found() -> None:
    calls = []

    def drifting(logits: torch.Tensor, k: int, *bounds: object) -> torch.Tensor:
        calls.append(1)
        got = reference.topk_indices(logits, k, *bounds)
        return got if len(calls) % 3 else got - 1

    found = {p.name: p for p in properties("topk", drifting, TopkContract(empty_sizes=False))}
    outcome = run_property(found["the same call gives the same answer"], 3)
    assert outcome.failure is not None and "the same call again" in outcome.failure.reason


def test_a_fault_of_the_cases_themselves_is_no_failure_of_the_kernel() -> None:
    def draw(_: int) -> int:
        raise KeyError("no such regime")

    with pytest.raises(KeyError):
        run_property(Property("p", st.integers().map(draw), lambda case: None), 3)


def test_writes_outside_are_failures_of_a_kernel_with_right_answers() -> None:
    def with_a_stray_write(logits: torch.Tensor, k: int, *bounds: object) -> torch.Tensor:
        x = torch.empty(len(logits), k, dtype=torch.int32)
        x.as_strided((x.numel() + 1,), (1,)).fill_(0)
        return x.copy_(reference.topk_indices(logits, k, *bounds))

    report = check_topk(with_a_stray_write, TopkContract(empty_sizes=False), examples=3)
    assert "that the kernel allocated: 4 bytes written" in str(report)


def test_sizes_near_boundaries_are_drawn_often() -> None:
    drawn: list[int] = []

    @settings(max_examples=400, database=None)
    @given(sizes(0, 1000, 256))
    def draw(size: int) -> None:
        drawn.append(size)

    draw()
    edges = sum(size in (0, 1, 255, 256, 257, 999, 1000) for size in drawn)
    assert edges / len(drawn) > 0.2 and set(drawn) >= {0, 1, 255, 256, 257, 1000}


def test_sharing_is_judged_by_driving_the_model() -> None:
    _, draft = build(random_model(0), num_pages=16, max_num_tokens=128, page_size=8)
    config = draft.config
    contract = IndexSharingContract(
        hidden_size=config.hidden_size, index_topk=config.index_topk, page_size=8
    )
    check_index_sharing(draft, contract).raise_if_failed()
    draft.set_skip_topk = lambda skip: None
    report = check_index_sharing(draft, contract)
    assert "selects although skip_topk is set" in report.outcomes[0].failure.reason


def test_attention_that_writes_out_is_asked_for_a_wrapper() -> None:
    with pytest.raises(ValueError, match=r"^takes_out must be False"):
        check_sparse_attention(lambda: None, SparseAttentionContract(takes_out=True))


def test_every_suite_asks_something_of_the_least_that_can_be_promised() -> None:
    for contract, suite in SUITES.values():
        least = dataclasses.replace(contract(), empty_sizes=False, layouts=("contiguous",))
        assert suite(lambda: None, least).properties()


def test_without_hypothesis_oracles_work_and_suites_name_the_extra() -> None:
    code = """
import sys
sys.modules["hypothesis"] = None
from lightning_indexer.testing import assert_matches, reference, TopkContract, Guarded
try:
    from lightning_indexer.testing import check_topk
except ImportError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "pip install 'lightning-indexer[testing]'" in done.stdout
