import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from counting import AGREEMENT, POISONED, counts_examples, tallies
from lightning_indexer.kernels import select_topk as module
from lightning_indexer.kernels.e4m3 import as_bytes
from lightning_indexer.kernels.mqa_logits import mqa_logits
from lightning_indexer.kernels.paged_mqa_logits import paged_mqa_logits
from lightning_indexer.kernels.select_topk import (
    PAGED_SELECT_TOPK_OP,
    SELECT_TOPK_OP,
    paged_select_topk,
    select_topk,
)
from lightning_indexer.testing import reference
from lightning_indexer.testing.calls import call_for_result
from paged_scoring import PagedCase, few_requests
from scoring import FP8, MOVABLE_REGIME, ScoreCase, few_rows, share

PLAIN = ScoreCase(5, 40, 4, 32, "fp32", True, "normal", "causal", "contiguous", seed=1)
PAGED = PagedCase(
    3, 2, 50, 4, 32, 16, ("nominal 4-D", FP8), "drafts", "normal", "contiguous", seed=4
)
TOPK = 7


def expected(inputs: dict, topk: int) -> torch.Tensor:
    """The selection rule applied to the op's own scores: rounding decides nothing."""
    bounds = inputs["row_starts"], inputs["row_ends"]
    return reference.topk_indices(mqa_logits(**inputs), topk, *bounds)


def expected_paged(inputs: dict, topk: int) -> torch.Tensor:
    return reference.topk_indices(paged_mqa_logits(**inputs), topk)


@share(2)
@given(case=few_rows, topk=st.integers(1, 40), rows=st.integers(1, 5))
@counts_examples("select_topk")
@tallies(AGREEMENT, "select_topk")
def test_selects_from_the_scores_whatever_the_chunking(case: ScoreCase, topk: int, rows: int):
    inputs = case.inputs()
    workspace = 4 * case.length * rows + case.seed % 3
    chunked = select_topk(**inputs, topk=topk, workspace_bytes=workspace)
    assert torch.equal(chunked, expected(inputs, topk))


@share(2)
@given(case=few_rows, topk=st.integers(1, 40))
@counts_examples("select_topk")
@tallies(POISONED, "select_topk")
def test_default_workspace_writes_a_strided_out_and_nothing_else(case: ScoreCase, topk: int):
    inputs = case.inputs()
    out = (case.rows, topk), torch.int32
    got = call_for_result(select_topk, {}, inputs | {"topk": topk}, out=out, layout="strided")
    assert torch.equal(got, expected(inputs, topk))


@share(2)
@given(case=few_requests, topk=st.integers(1, 40), rows=st.integers(1, 7))
@counts_examples("paged_select_topk")
@tallies(AGREEMENT, "paged_select_topk")
def test_paged_selects_from_the_scores_whatever_the_chunking(
    case: PagedCase, topk: int, rows: int
) -> None:
    inputs = case.inputs()
    workspace = 4 * case.width * rows + case.seed % 3
    chunked = paged_select_topk(**inputs, topk=topk, workspace_bytes=workspace)
    assert torch.equal(chunked, expected_paged(inputs, topk))


@share(2)
@given(case=few_requests, topk=st.integers(1, 40))
@counts_examples("paged_select_topk")
@tallies(POISONED, "paged_select_topk")
def test_paged_default_workspace_writes_a_strided_out_and_nothing_else(
    case: PagedCase, topk: int
) -> None:
    inputs = case.inputs()
    out = (case.rows, topk), torch.int32
    inputs_and_k = inputs | {"topk": topk}
    got = call_for_result(paged_select_topk, {}, inputs_and_k, out=out, layout="strided")
    assert torch.equal(got, expected_paged(inputs, topk))


def test_returns_the_out_that_it_was_given() -> None:
    out, paged_out = (torch.empty(n, TOPK, dtype=torch.int32) for n in (PLAIN.rows, PAGED.rows))
    assert select_topk(**PLAIN.inputs(), topk=TOPK, out=out) is out
    assert paged_select_topk(**PAGED.inputs(), topk=TOPK, out=paged_out) is paged_out


def test_tied_scores_prefer_smaller_positions_in_every_chunk() -> None:
    regime = MOVABLE_REGIME or "normal"
    inputs = dataclasses.replace(PLAIN, windows="full", regime=regime).inputs()
    inputs["k"][:] = inputs["k"][:1].clone()
    inputs["k_scale"][:] = 1.0
    got = select_topk(**inputs, topk=TOPK, workspace_bytes=2 * 4 * 40)
    assert (got == torch.arange(TOPK)).all()


@pytest.mark.parametrize("rows, length", [(0, 7), (3, 0), (0, 0)])
def test_empty_sizes_select_nothing(rows: int, length: int) -> None:
    inputs = dataclasses.replace(PLAIN, rows=rows, length=length, windows="full").inputs()
    assert select_topk(**inputs, topk=2).tolist() == [[-1, -1]] * rows
    paged = dataclasses.replace(PAGED, requests=rows, width=length).inputs(hostile=False)
    assert paged_select_topk(**paged, topk=2).tolist() == [[-1, -1]] * (2 * rows)


def test_workspace_below_one_row_names_the_minimum() -> None:
    with pytest.raises(ValueError, match=r"workspace_bytes must be at least 160 .*got 159"):
        select_topk(**PLAIN.inputs(), topk=TOPK, workspace_bytes=159)
    with pytest.raises(ValueError, match=r"workspace_bytes must be at least 200 .*got 199"):
        paged_select_topk(**PAGED.inputs(), topk=TOPK, workspace_bytes=199)
    with pytest.raises(TypeError, match="workspace_bytes must be an int, got float"):
        select_topk(**PLAIN.inputs(), topk=TOPK, workspace_bytes=1e6)


def test_scores_never_take_more_than_the_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    taken, select = [], module.TOPK_OP
    monkeypatch.setattr(
        module, "TOPK_OP", lambda x, *a, **kw: (taken.append(x.nbytes), select(x, *a, **kw))
    )
    select_topk(**PLAIN.inputs(), topk=TOPK, workspace_bytes=400)
    assert taken == [320, 320, 160]
    taken.clear()
    case = dataclasses.replace(PAGED, next_n=3)
    for rows, chunks in ((1, [1] * 9), (2, [2, 1] * 3), (5, [3, 3, 3]), (6, [6, 3]), (99, [9])):
        paged_select_topk(**case.inputs(), topk=TOPK, workspace_bytes=200 * rows)
        assert taken == [200 * n for n in chunks]
        taken.clear()


def test_opcheck() -> None:
    i = dataclasses.replace(PLAIN, dtypes="fp8").inputs()
    args = [as_bytes(i[n]) for n in ("q", "k", "weights", "row_starts", "row_ends", "k_scale")]
    out = torch.empty(PLAIN.rows, TOPK, dtype=torch.int32)
    torch.library.opcheck(SELECT_TOPK_OP, (*args, TOPK, 400), {"out": out})


@pytest.mark.parametrize("form", ["drafts", "ragged"])
def test_paged_opcheck(form: str) -> None:
    case = dataclasses.replace(PAGED, form=form)
    i = case.inputs()
    args = (as_bytes(i["q"]), i["cache"], i["weights"], i["context_lens"], i["block_table"])
    args = (*args, i.get("row_to_request"), TOPK, case.width, case.page_size, 400)
    out = torch.empty(case.rows, TOPK, dtype=torch.int32)
    torch.library.opcheck(PAGED_SELECT_TOPK_OP, args, {"out": out})


def test_compiles_without_graph_breaks() -> None:
    ragged = torch.compile(select_topk, fullgraph=True, backend="aot_eager")
    paged = torch.compile(paged_select_topk, fullgraph=True, backend="aot_eager")
    for length in (40, 41, 57):
        inputs = dataclasses.replace(PLAIN, length=length).inputs()
        assert torch.equal(ragged(**inputs, topk=TOPK), select_topk(**inputs, topk=TOPK))
        inputs = dataclasses.replace(PAGED, width=length).inputs()
        assert torch.equal(paged(**inputs, topk=TOPK), paged_select_topk(**inputs, topk=TOPK))


def test_check_mode_raises_before_the_first_chunk_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inputs, paged = PLAIN.inputs(), PAGED.inputs(hostile=False)
    inputs["row_ends"][4] = 41
    paged["context_lens"][2] = 51
    out = torch.full((5, TOPK), 9, dtype=torch.int32)
    paged_out = torch.full((6, TOPK), 9, dtype=torch.int32)
    monkeypatch.setenv("LIGHTNING_INDEXER_CHECK", "1")
    with pytest.raises(ValueError, match="row_ends must stay in"):
        select_topk(**inputs, topk=TOPK, workspace_bytes=160, out=out)
    with pytest.raises(ValueError, match="context_lens must be at most"):
        paged_select_topk(**paged, topk=TOPK, workspace_bytes=200, out=paged_out)
    assert (out == 9).all() and (paged_out == 9).all()
