"""`capture`: dummy rounds that leave caches, counters, flag and buffer as they must be."""

from __future__ import annotations

import pytest
import torch

from lightning_indexer.indexer.buffer import SelectionKind
from lightning_indexer.speculator.mtp import MTPSpeculator
from lightning_indexer.speculator.recorded import RecordedRunner
from lightning_indexer.speculator.runner import EagerRunner, GraphStateError
from toy import (
    PlainDraft,
    simple_drafts,
    simple_round,
    toy_block_table,
    toy_config,
    toy_draft,
)

LENGTHS = [3, 1, 5]
RUNNERS = [EagerRunner, RecordedRunner]


def _assert_idle(draft) -> None:
    assert not draft.skip_topk
    assert draft.buffer.state.kind is SelectionKind.EMPTY


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("padded", [False, True])
def test_capture_ends_with_the_flag_off_and_the_buffer_empty(runner, padded):
    config = toy_config(3, padded=padded)
    speculator = MTPSpeculator(draft := toy_draft(config), config, runner=runner())
    speculator.capture()
    _assert_idle(draft)
    assert speculator.graph_state() == (False,)


@pytest.mark.parametrize("runner", RUNNERS)
def test_capture_touches_no_live_cache(runner):
    config = toy_config(3, padded=True)
    draft = toy_draft(config)
    draft.cache.keys.copy_(torch.arange(draft.cache.keys.numel()))
    before = draft.cache.live.clone()
    MTPSpeculator(draft, config, runner=runner()).capture()
    assert torch.equal(draft.cache.live, before)


@pytest.mark.parametrize("runner", RUNNERS)
def test_capture_between_rounds_leaves_the_next_round_right(runner):
    config = toy_config(4, padded=True)
    table = toy_block_table(config)
    speculator = MTPSpeculator(toy_draft(config), config, runner=runner())
    for _ in range(3):
        speculator.capture()
        got = speculator.propose(*simple_round(table, LENGTHS))
        assert torch.equal(got, simple_drafts(table, LENGTHS, 4, shares=True))


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("fail_at", range(6))  # 3 prefill sizes, then 3 decode sizes
def test_failed_capture_ends_idle_too(runner, fail_at):
    config = toy_config(4, padded=True)
    table, draft = toy_block_table(config), toy_draft(config, fail_at=fail_at)
    speculator = MTPSpeculator(draft, config, runner=runner())
    with pytest.raises(RuntimeError, match="the draft broke"):
        speculator.capture()
    _assert_idle(draft)
    assert speculator.graph_state() == (False,)
    draft.fail_at = None
    got = speculator.propose(*simple_round(table, LENGTHS))
    assert torch.equal(got, simple_drafts(table, LENGTHS, 4, shares=True))


@pytest.mark.parametrize("fail_at", [None, 4])
def test_capture_counts_nothing(fail_at):
    config = toy_config(3, padded=True)
    draft = toy_draft(config, fail_at=fail_at)
    speculator = MTPSpeculator(draft, config)
    counters = speculator.stats
    if fail_at is None:
        speculator.capture()
    else:
        with pytest.raises(RuntimeError):
            speculator.capture()
    assert vars(speculator.stats) == vars(type(speculator.stats)())
    draft.fail_at = None
    speculator.propose(*simple_round(toy_block_table(config), LENGTHS))
    assert counters.rounds == 1  # a caller's reference keeps counting


def test_capture_after_a_dead_round_takes_the_flag_off():
    config = toy_config(3, padded=True)
    speculator = MTPSpeculator(draft := toy_draft(config), config, runner=RecordedRunner())
    speculator.on_prefill_begin(2)
    speculator.steps.prefill(speculator.batches.dummy(3, 2), speculator.graph_state())
    speculator.on_prefill_end(2)
    speculator.on_multi_step_decode_begin(2)  # killed here, before its finally
    assert draft.skip_topk
    speculator.capture()
    _assert_idle(draft)
    assert speculator.graph_state() == (False,)


@pytest.mark.parametrize("steps", [0, 1])
def test_short_drafts_capture_no_decode_step(steps):
    config = toy_config(steps, padded=True)
    draft = toy_draft(config)
    MTPSpeculator(draft, config, runner=RecordedRunner()).capture()
    assert draft.forwards == len(config.prefill_sizes)


def test_replays_execute_no_forward():
    config = toy_config(4, padded=True)
    table, draft = toy_block_table(config), toy_draft(config)
    speculator = MTPSpeculator(draft, config, runner=RecordedRunner())
    speculator.capture()
    captured = draft.forwards
    assert captured == 6
    for lengths in (LENGTHS, [1], [2, 4, 1, 5], [12]):
        got = speculator.propose(*simple_round(table, lengths))
        assert torch.equal(got, simple_drafts(table, lengths, 4, shares=True))
    assert draft.forwards == captured


def test_sizes_that_were_not_captured_run_eagerly():
    config = toy_config(4, prefill_sizes=(2, 4), decode_sizes=(1, 2))
    table, draft = toy_block_table(config), toy_draft(config)
    speculator = MTPSpeculator(draft, config, runner=RecordedRunner())
    speculator.capture()
    captured = draft.forwards
    got = speculator.propose(*simple_round(table, LENGTHS))  # 9 rows, 3 requests
    assert torch.equal(got, simple_drafts(table, LENGTHS, 4, shares=True))
    assert draft.forwards == captured + 4


def test_replay_under_another_flag_is_refused():
    config = toy_config(3, padded=True)
    table, draft = toy_block_table(config), toy_draft(config)
    speculator = MTPSpeculator(draft, config, runner=RecordedRunner())
    speculator.capture()

    class Unshared(MTPSpeculator):
        def on_multi_step_decode_begin(self, num_reqs):
            """Forgets to set the flag, which the graphs have baked in."""

    speculator.__class__ = Unshared
    with pytest.raises(GraphStateError, match=r"\(True,\), now is \(False,\)"):
        speculator.propose(*simple_round(table, LENGTHS))


def test_draft_of_another_model_does_not_replay_the_old_graphs():
    config = toy_config(3, padded=True)
    table = toy_block_table(config)
    speculator = MTPSpeculator(toy_draft(config), config, runner=RecordedRunner())
    speculator.capture()
    other = toy_draft(config, pair=True)
    speculator.load_draft_model(other)
    speculator.propose(*simple_round(table, LENGTHS))
    assert other.forwards == 3


@pytest.mark.parametrize("runner", RUNNERS)
def test_draft_without_an_indexer_captures(runner):
    # vllm-project/vllm#50615: warm-up asserted a buffer that not every draft has
    config = toy_config(3, padded=True)
    table, draft = toy_block_table(config), toy_draft(config, PlainDraft)
    speculator = MTPSpeculator(draft, config, draft_config={}, runner=runner())
    speculator.capture()
    got = speculator.propose(*simple_round(table, LENGTHS))
    assert torch.equal(got, simple_drafts(table, LENGTHS, 3, shares=False))


def test_capture_zeroes_last_token_indices():
    config = toy_config(3, padded=True)
    speculator = MTPSpeculator(toy_draft(config), config)
    speculator.propose(*simple_round(toy_block_table(config), LENGTHS))
    assert speculator.last_token_indices.any()
    speculator.capture()
    assert not speculator.last_token_indices.any()


def test_draft_tensors_keep_their_addresses():
    config = toy_config(3, padded=True)
    seen = []
    speculator = MTPSpeculator(
        toy_draft(config),
        config,
        observer=lambda _, batch: seen.append(
            tuple(v.data_ptr() for v in vars(batch).values() if isinstance(v, torch.Tensor))
        ),
    )
    table = toy_block_table(config)
    for lengths in (LENGTHS, [1, 2]):
        speculator.propose(*simple_round(table, lengths))
    assert len(seen) == 4
    assert len(set(seen)) == 1
