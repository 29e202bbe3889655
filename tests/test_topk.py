import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from counting import AGREEMENT, POISONED, counts_examples, tallies
from lightning_indexer.kernels.topk import TOPK_OP, topk_indices
from lightning_indexer.testing import reference, relations
from lightning_indexer.testing.calls import call_for_result
from score_rows import RowsCase, in_small_pieces, row_cases, scores

POISON = 0x7FFFFFFF
HALF, EIGHTH = (settings(max_examples=max(3, settings().max_examples // n)) for n in (2, 8))


def select(inputs: dict) -> torch.Tensor:
    return topk_indices(**inputs)


@HALF
@given(case=row_cases, small_pieces=st.booleans())
@counts_examples("topk_indices")
@tallies(AGREEMENT, "topk_indices")
def test_selects_what_sorting_by_score_then_position_selects(
    case: RowsCase, small_pieces: bool
) -> None:
    with in_small_pieces(small_pieces, case.seed):
        got = select(case.inputs())
    assert torch.equal(got, reference.topk_indices(**case.inputs()))


@EIGHTH
@given(case=row_cases, values=st.integers(1, 3), small_pieces=st.booleans())
@counts_examples("topk_indices")
@tallies(AGREEMENT, "topk_indices")
def test_tie_prefers_smaller_position(case: RowsCase, values: int, small_pieces: bool) -> None:
    generator = torch.Generator().manual_seed(case.seed)
    logits = torch.randint(0, values, (case.rows, case.length), generator=generator).float()
    with in_small_pieces(small_pieces, case.seed):
        got = topk_indices(logits, case.k)
    for row, chosen in zip(logits, got, strict=True):
        by_value = [p for v in (2, 1, 0) for p in (row == v).nonzero().flatten().tolist()]
        best = sorted(by_value[: case.k])
        assert chosen.tolist() == best + [-1] * (case.k - len(best))


@EIGHTH
@given(case=row_cases, small_pieces=st.booleans())
@counts_examples("topk_indices")
def test_row_alone_gives_what_it_gives_in_a_batch(case: RowsCase, small_pieces: bool) -> None:
    def together_in_small_pieces(inputs: dict) -> torch.Tensor:
        pieces = small_pieces and len(inputs["logits"]) == case.rows
        with in_small_pieces(pieces, case.seed):
            return select(inputs)

    relations.row_alone(together_in_small_pieces, case.inputs(), relations.assert_equal)


@EIGHTH
@given(case=row_cases, small_pieces=st.booleans())
@counts_examples("topk_indices")
def test_window_gives_what_its_slice_gives(case: RowsCase, small_pieces: bool) -> None:
    inputs = dataclasses.replace(case, windows="both").inputs()

    def windows_in_small_pieces(inputs: dict) -> torch.Tensor:
        pieces = small_pieces and inputs["row_ends"] is not None
        with in_small_pieces(pieces, case.seed):
            return select(inputs)

    relations.window_is_slice(windows_in_small_pieces, inputs, relations.assert_equal)


@EIGHTH
@given(case=row_cases, small_pieces=st.booleans())
@counts_examples("topk_indices")
@tallies(AGREEMENT, "topk_indices")
@tallies(POISONED, "topk_indices")
def test_writes_every_slot_of_a_strided_out_and_nothing_else(
    case: RowsCase, small_pieces: bool
) -> None:
    out = (case.rows, case.k), torch.int32
    with in_small_pieces(small_pieces, case.seed):
        got = call_for_result(topk_indices, case.inputs(), out=out, layout="strided")
    assert torch.equal(got, reference.topk_indices(**case.inputs()))


def test_returns_the_out_that_it_was_given() -> None:
    out = torch.empty(2, 3, dtype=torch.int32)
    assert topk_indices(torch.zeros(2, 5), 3, out=out) is out


@pytest.mark.parametrize("rows, length", [(0, 5), (3, 0), (0, 0), (1, 1)])
def test_empty_sizes_select_nothing(rows: int, length: int) -> None:
    bounds = torch.zeros(rows, dtype=torch.int32)
    got = topk_indices(torch.ones(rows, length), 3, bounds, bounds + 1)
    assert got.tolist() == [[0, -1, -1] if length else [-1] * 3] * rows


def test_selection_is_the_same_with_and_without_gradients() -> None:
    # NVIDIA/Megatron-LM#7169
    x = scores(2, 60, "rounded", seed=2).requires_grad_()
    with torch.no_grad():
        without = topk_indices(x, 9)
    assert torch.equal(topk_indices(x, 9), without)
    assert topk_indices(x, 9).requires_grad is False


@pytest.mark.parametrize("windows", ["none", "ends", "both"])
def test_op_passes_opcheck(windows: str) -> None:
    case = RowsCase(2, 40, 5, "relu", torch.float32, "padded", windows, torch.int32, seed=3)
    out = torch.empty(2, 5, dtype=torch.int32)
    torch.library.opcheck(TOPK_OP, (case.logits(), 5, *case.bounds()), {"out": out})


def test_compiles_without_graph_breaks() -> None:
    compiled = torch.compile(topk_indices, fullgraph=True, backend="aot_eager")
    x = scores(2, 40, "rounded", seed=4)
    ends = torch.tensor([30, 40])
    assert torch.equal(compiled(x, 5, None, ends), topk_indices(x, 5, None, ends))
    out = torch.full((2, 5), POISON, dtype=torch.int32)
    compiled(x, 5, out=out)
    assert torch.equal(out, topk_indices(x, 5))


def test_writing_moves_the_version_of_out() -> None:
    out = torch.zeros(2, 3, dtype=torch.int32)
    before = out._version
    topk_indices(torch.zeros(2, 5), 3, out=out)
    assert out._version > before
