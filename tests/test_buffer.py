"""The host state of `TopkIndicesBuffer`, move by move."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from counting import counts_examples
from lightning_indexer.indexer.buffer import (
    SelectionKind,
    SelectionState,
    StaleSelectionError,
    TopkIndicesBuffer,
)

pytestmark = pytest.mark.once

#: Positions of four requests' last tokens.
ANCHORS = torch.tensor([3, 8, 5, 1])


def _buffer(*, track: bool = True) -> TopkIndicesBuffer:
    buffer = TopkIndicesBuffer(6, 3)
    if track:
        buffer.track()
        buffer.new_generation()
    return buffer


def test_starts_untracked_and_without_any_selection():
    buffer = TopkIndicesBuffer(6, 3)
    assert (buffer.max_rows, buffer.width) == (6, 3)
    assert buffer.indices.dtype == torch.int32
    assert (buffer.indices == -1).all()
    assert buffer.state.kind is SelectionKind.UNTRACKED


def test_rows_are_views_at_a_fixed_address():
    buffer = _buffer()
    address = buffer.indices.data_ptr()
    buffer.rows(4).fill_(5)
    buffer.mark_written(4)
    buffer.mark_compacted(ANCHORS, 2)
    buffer.clear()
    assert buffer.rows(0).shape == (0, 3)
    assert buffer.rows(6).data_ptr() == buffer.indices.data_ptr() == address


def test_too_many_rows_are_refused():
    with pytest.raises(ValueError, match="num_rows must be at most 6, got 7"):
        _buffer().rows(7)


@pytest.mark.parametrize("size", [(0, 3), (3, 0), (-1, 1)])
def test_empty_buffer_is_refused(size):
    with pytest.raises(ValueError, match="at least 1"):
        TopkIndicesBuffer(*size)


def test_round_of_writing_compacting_and_reusing():
    buffer = _buffer()
    buffer.mark_written(5)
    assert buffer.state == SelectionState(SelectionKind.PER_TOKEN, 5, 1)
    buffer.check_compactable()
    buffer.indices.fill_(7)
    buffer.mark_compacted(ANCHORS, 2)
    assert buffer.state == SelectionState(SelectionKind.PER_REQUEST, 2, 1)
    assert buffer.indices[:, 0].tolist() == [7, 7, -1, -1, 7, 7]
    for reqs in (0, 1, 2):
        buffer.check_reusable(ANCHORS, reqs)


def test_rows_of_another_position_are_refused_in_check_mode_alone(monkeypatch):
    buffer = _buffer()
    buffer.mark_written(5)
    buffer.mark_compacted(ANCHORS, 2)
    reordered = ANCHORS[[1, 0, 2, 3]]
    buffer.check_reusable(reordered, 2)
    monkeypatch.setenv("LIGHTNING_INDEXER_CHECK", "1")
    buffer.check_reusable(ANCHORS, 2)
    with pytest.raises(
        StaleSelectionError, match="positions \\[3, 8\\], requests go on from \\[8, 3"
    ):
        buffer.check_reusable(reordered, 2)


def test_more_requests_than_rows_are_refused():
    buffer = _buffer()
    buffer.mark_written(5)
    buffer.mark_compacted(ANCHORS, 2)
    with pytest.raises(StaleSelectionError, match="3 requests"):
        buffer.check_reusable(ANCHORS, 3)


def test_empty_selection_is_refused():
    with pytest.raises(StaleSelectionError, match="empty"):
        _buffer().check_reusable(ANCHORS, 1)


def test_selection_per_token_is_refused():
    buffer = _buffer()
    buffer.mark_written(5)
    with pytest.raises(StaleSelectionError, match="per token"):
        buffer.check_reusable(ANCHORS, 1)


def test_old_generation_is_refused():
    buffer = _buffer()
    buffer.mark_written(5)
    buffer.mark_compacted(ANCHORS, 2)
    buffer.new_generation()
    with pytest.raises(StaleSelectionError, match="generation 1, now is 2"):
        buffer.check_reusable(ANCHORS, 1)


def test_second_compaction_is_refused_until_rows_are_written_again():
    buffer = _buffer()
    buffer.mark_written(5)
    buffer.mark_compacted(ANCHORS, 2)
    with pytest.raises(StaleSelectionError, match="compacted already"):
        buffer.check_compactable()
    buffer.new_generation()
    buffer.mark_written(5)
    buffer.check_compactable()


@pytest.mark.parametrize("written", [False, True])
def test_compacting_rows_that_no_forward_wrote_makes_nothing_reusable(written):
    buffer = _buffer()
    if written:
        buffer.mark_written(5)
        buffer.new_generation()  # they are of the round before
    buffer.mark_compacted(ANCHORS, 2)
    with pytest.raises(StaleSelectionError):
        buffer.check_reusable(ANCHORS, 1)


def test_cleared_buffer_is_empty():
    buffer = _buffer()
    buffer.mark_written(5)
    buffer.mark_compacted(ANCHORS, 2)
    buffer.clear()
    assert buffer.state.kind is SelectionKind.EMPTY
    with pytest.raises(StaleSelectionError, match="empty"):
        buffer.check_reusable(ANCHORS, 1)


def test_write_count_moves_with_every_write_by_view_or_op():
    from lightning_indexer.kernels.compact import compact_topk_indices

    buffer = _buffer()
    writes = [
        lambda: buffer.rows(2).fill_(1),
        lambda: buffer.indices[1].copy_(torch.ones(3)),
        lambda: compact_topk_indices(buffer.indices, torch.tensor([1])),
        lambda: compact_topk_indices([buffer.indices], torch.tensor([1])),
    ]
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        for write in writes:
            before = buffer.write_count
            with mode():
                write()
            assert buffer.write_count > before


def test_reading_does_not_move_the_write_count():
    buffer = _buffer()
    before = buffer.write_count
    buffer.rows(3).sum()
    buffer.indices.clone()
    assert buffer.write_count == before


def test_buffer_made_in_inference_mode_counts_writes():
    with torch.inference_mode():
        buffer = TopkIndicesBuffer(2, 2)
        before = buffer.write_count
        buffer.rows(1).fill_(3)
    assert buffer.write_count > before


MOVES = ["write", "compact", "generation", "clear"]


@given(st.lists(st.sampled_from(MOVES), max_size=12))
@counts_examples("TopkIndicesBuffer")
def test_reuse_is_allowed_iff_write_and_compaction_came_in_this_generation(moves):
    tracked, untracked = _buffer(), _buffer(track=False)
    written = compacted = False
    for move in moves:
        for buffer in (tracked, untracked):
            {
                "write": lambda b=buffer: b.mark_written(4),
                "compact": lambda b=buffer: b.mark_compacted(ANCHORS, 2),
                "generation": buffer.new_generation,
                "clear": buffer.clear,
            }[move]()
        if move == "write":
            written, compacted = True, False
        elif move == "compact":
            compacted = compacted or written
        elif move in ("generation", "clear"):
            written = compacted = False
        untracked.check_reusable(ANCHORS, 6)  # a foreign runner's buffer never raises
        untracked.check_compactable()
        assert _allowed(tracked.check_reusable, ANCHORS, 2) == compacted
        assert _allowed(tracked.check_compactable) == (not compacted)


def _allowed(check, *args) -> bool:
    try:
        check(*args)
    except StaleSelectionError:
        return False
    return True
