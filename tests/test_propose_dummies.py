"""Dummy requests, and requests that keep no row: nothing drafted, nothing written."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lightning_indexer.speculator.batch import RequestRows, StepBatch
from lightning_indexer.speculator.mtp import MTPSpeculator
from toy import (
    DraftOracle,
    simple_drafts,
    simple_round,
    target_rows,
    toy_block_table,
    toy_config,
    toy_draft,
)


def _idle(batch: StepBatch) -> StepBatch:
    """The same rows as an idle rank's dummies: no slots, no lengths."""
    return replace(
        batch,
        slot_mapping=torch.full_like(batch.slot_mapping, -1),
        seq_lens=torch.zeros_like(batch.seq_lens),
    )


@pytest.mark.parametrize("request_map", ["kept", "none"])
def test_dummy_requests_draft_and_write_nothing(request_map):
    # vllm-project/vllm#56734: dummy rounds of idle ranks overwrote live caches
    config = toy_config(3)
    table = toy_block_table(config)
    draft = toy_draft(config)
    speculator = MTPSpeculator(draft, config)
    target, rejected, tokens = simple_round(table, [1, 1])
    speculator.propose(target, rejected, tokens)
    before = draft.cache.live.clone()
    dummy = _idle(target)
    if request_map == "none":
        dummy = replace(dummy, row_to_request=torch.full_like(dummy.row_to_request, -1))
    got = speculator.propose(dummy, rejected, tokens)
    assert (got == -1).all()
    assert torch.equal(draft.cache.live, before)


@pytest.mark.parametrize("length", [0, 1])
def test_dummy_beside_a_live_request_changes_nothing_for_it(length):
    config = toy_config(3)
    table = toy_block_table(config)
    target, rejected, tokens = simple_round(table, [2, 3])
    dead = torch.tensor([False, False, True, True, True])
    mixed = replace(
        target,
        slot_mapping=target.slot_mapping.masked_fill(dead, -1),
        seq_lens=target.seq_lens * torch.tensor([1, length], dtype=torch.int32),
    )
    got = MTPSpeculator(toy_draft(config), config).propose(mixed, rejected, tokens)
    assert torch.equal(got[:1], simple_drafts(table, [2], 3, shares=True))
    assert (got[1] == -1).all()


@pytest.mark.parametrize("rejected", [3, 9, -1, -9])
def test_request_that_keeps_no_row_is_a_dummy_and_disturbs_nobody(rejected):
    config = toy_config(3)
    table = toy_block_table(config)
    target, _, tokens = simple_round(table, [3, 3, 2])
    got = MTPSpeculator(toy_draft(config), config).propose(
        target, torch.tensor([0, rejected, 0]), tokens
    )
    expected = simple_drafts(table, [3, 3, 2], 3, shares=True)
    assert torch.equal(got[[0, 2]], expected[[0, 2]])
    assert (got[1] == -1).all()


def test_request_without_rows_drafts_nothing_and_disturbs_nobody():
    config = toy_config(3)
    table = toy_block_table(config)
    _, zeros, tokens = simple_round(table, [1, 1, 1, 1])
    rows = [RequestRows(r, 0, [0, 1, 2] if r % 2 else []) for r in range(4)]
    got = MTPSpeculator(toy_draft(config), config).propose(target_rows(table, rows), zeros, tokens)
    for r in (1, 3):
        oracle = DraftOracle(table.table[r].tolist(), 4, config.max_model_len, shares=True)
        assert got[r].tolist() == oracle.propose(0, [0, 1, 2], 0, 1, 3)
    assert (got[[0, 2]] == -1).all()
