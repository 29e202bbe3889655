"""check_index_sharing passes a right model and names what is wrong with a broken one."""

import pytest
import torch

from lightning_indexer.speculator.check import IndexSharingError, check_index_sharing
from lightning_indexer.tinylm.model import random_model
from lightning_indexer.tinylm.runtime import TinyDraft, build

PAGE_SIZE = 8


def tiny_draft() -> TinyDraft:
    _, draft = build(random_model(0), num_pages=16, max_num_tokens=128, page_size=PAGE_SIZE)
    return draft


def check(draft):
    config = draft.config
    return check_index_sharing(
        draft,
        hidden_size=config.hidden_size,
        index_topk=config.index_topk,
        page_size=PAGE_SIZE,
    )


def test_a_right_model_passes_and_is_left_with_the_flag_off():
    draft = tiny_draft()
    report = check(draft)
    assert report.num_buffers == 1
    assert report.requests == 3
    assert not draft.layer.self_attn.indexer.skip_topk


def test_missing_callables_are_named():
    class Bare(torch.nn.Module):
        pass

    with pytest.raises(IndexSharingError, match="set_skip_topk and compact_topk_indices"):
        check_index_sharing(Bare(), hidden_size=4, index_topk=2)


def test_a_flag_that_does_nothing_is_caught():
    draft = tiny_draft()
    draft.set_skip_topk = lambda skip: None
    with pytest.raises(IndexSharingError, match="selects although skip_topk is set"):
        check(draft)


def test_a_compaction_that_does_nothing_is_caught():
    draft = tiny_draft()
    draft.compact_topk_indices = lambda rows: None
    with pytest.raises(IndexSharingError, match="is not that of request"):
        check(draft)


def test_compaction_to_another_requests_row_is_caught():
    draft = tiny_draft()
    right = draft.compact_topk_indices
    draft.compact_topk_indices = lambda rows: right(rows.flip(0))
    with pytest.raises(IndexSharingError, match="row 0 of buffer 0"):
        check(draft)


def test_a_step_that_ignores_the_buffer_is_caught():
    draft = tiny_draft()
    forward = draft.forward

    def ignores_rows(batch):
        kept = draft.topk_buffers[0].indices.clone()
        if draft.layer.self_attn.indexer.skip_topk:
            draft.topk_buffers[0].indices.fill_(0)  # attends to position 0, whatever is shared
        output = forward(batch)
        if draft.layer.self_attn.indexer.skip_topk:
            draft.topk_buffers[0].indices.copy_(kept)
        return output

    draft.forward = ignores_rows
    with pytest.raises(IndexSharingError, match="does not read its row"):
        check(draft)


def test_a_step_that_reads_another_requests_row_is_caught():
    draft = tiny_draft()
    forward = draft.forward

    def reads_row_0(batch):
        buffer = draft.topk_buffers[0]
        if not draft.layer.self_attn.indexer.skip_topk:
            return forward(batch)
        kept = buffer.indices.clone()
        buffer.indices[: batch.num_reqs] = kept[0]
        output = forward(batch)
        buffer.indices.copy_(kept)
        return output

    draft.forward = reads_row_0
    with pytest.raises(IndexSharingError, match="reaches other requests"):
        check(draft)


def test_a_buffer_that_moves_is_caught():
    draft = tiny_draft()
    forward = draft.forward

    def moves(batch):
        buffer = draft.topk_buffers[0]
        buffer.indices = buffer.indices.clone()
        return forward(batch)

    draft.forward = moves
    with pytest.raises(IndexSharingError, match="moved to another address"):
        check(draft)


def test_a_selection_of_unseen_positions_is_caught():
    draft = tiny_draft()
    forward = draft.forward

    def looks_ahead(batch):
        output = forward(batch)
        if not draft.layer.self_attn.indexer.skip_topk:
            draft.topk_buffers[0].indices[0, 0] = 5
        return output

    draft.forward = looks_ahead
    with pytest.raises(IndexSharingError, match="cannot see"):
        check(draft)
