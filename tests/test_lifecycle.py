"""The four hooks and the skip flag: order, values, and recovery from failures."""

from __future__ import annotations

import pytest
import torch

from lightning_indexer.indexer.buffer import SelectionKind, StaleSelectionError
from lightning_indexer.speculator.autoregressive import AutoRegressiveSpeculator
from lightning_indexer.speculator.mtp import MTPSpeculator
from lightning_indexer.speculator.recorded import RecordedRunner
from toy import (
    PlainDraft,
    SharingDraft,
    simple_drafts,
    simple_round,
    toy_block_table,
    toy_config,
    toy_draft,
)

LENGTHS = [3, 1, 5]


class _Logs:
    """Overrides every hook; goes before a speculator class."""

    def on_prefill_begin(self, num_reqs):
        super().on_prefill_begin(num_reqs)
        self.hear("prefill begin", num_reqs)

    def on_prefill_end(self, num_reqs):
        super().on_prefill_end(num_reqs)
        self.hear("prefill end", num_reqs)

    def on_multi_step_decode_begin(self, num_reqs):
        super().on_multi_step_decode_begin(num_reqs)
        self.hear("decode begin", num_reqs)

    def on_multi_step_decode_end(self, num_reqs):
        super().on_multi_step_decode_end(num_reqs)
        self.hear("decode end", num_reqs)


class LoggedMTP(_Logs, MTPSpeculator):
    pass


class LoggedBase(_Logs, AutoRegressiveSpeculator):
    pass


def _logged(kind, config, runner=None):
    """A speculator, and a list that gets (event, requests, flag after it)."""
    events: list[tuple] = []
    draft = toy_draft(config, log=lambda name, flag: events.append((name, flag)))
    speculator = kind(draft, config, runner=runner)
    speculator.hear = lambda name, num_reqs: events.append((name, num_reqs, draft.skip_topk))
    return speculator, events


def _expected(reqs, prefills, decodes, *, multi_step, flag=True):
    events = [("prefill begin", reqs, False), *[("forward", False)] * prefills]
    events.append(("prefill end", reqs, False))
    if multi_step:
        events += [("decode begin", reqs, flag), *[("forward", flag)] * decodes]
        events.append(("decode end", reqs, False))
    return events


@pytest.mark.parametrize("kind", [LoggedMTP, LoggedBase])
@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_hooks_and_flag_of_a_round(kind, steps):
    config = toy_config(5)
    speculator, events = _logged(kind, config)
    round_ = simple_round(toy_block_table(config), LENGTHS)
    speculator.propose(*round_, num_speculative_steps=steps)
    shares = kind is LoggedMTP
    assert speculator.round_steps == steps
    assert events == _expected(3, 1, steps - 1, multi_step=steps > 1, flag=shares)


@pytest.mark.parametrize("kind", [LoggedMTP, LoggedBase])
@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_hooks_and_flag_of_a_capture(kind, steps):
    config = toy_config(steps, padded=True)
    speculator, events = _logged(kind, config)
    speculator.capture()
    sizes = len(config.prefill_sizes), len(config.decode_sizes)
    assert events == _expected(4, *sizes, multi_step=steps > 1, flag=kind is LoggedMTP)


def test_hooks_get_the_real_number_of_requests_when_batches_are_padded():
    config = toy_config(3, padded=True)
    speculator, events = _logged(LoggedMTP, config, RecordedRunner())
    speculator.capture()
    events.clear()
    got = speculator.propose(*simple_round(table := toy_block_table(config), LENGTHS))
    assert events == _expected(3, 0, 0, multi_step=True)  # replays run no Python
    assert torch.equal(got, simple_drafts(table, LENGTHS, 3, shares=True))
    assert (speculator.model.buffer.indices[3:4] == -1).all()


@pytest.mark.parametrize("recorded", [False, True])
def test_buffer_is_left_alone_between_compaction_and_the_next_round(recorded):
    # ROCm/ATOM#2008: one selection a round of 3 drafts, eager and replayed
    config = toy_config(3, padded=recorded)
    draft, seen = toy_draft(config), []
    speculator = MTPSpeculator(
        draft,
        config,
        runner=RecordedRunner() if recorded else None,
        observer=lambda *_: seen.append((draft.buffer.write_count, draft.buffer.indices.clone())),
    )
    if recorded:
        speculator.capture()
    speculator.propose(*simple_round(toy_block_table(config), LENGTHS))
    (first, rows), (second, same_rows) = seen
    assert first == second
    assert torch.equal(rows, same_rows)
    assert speculator.stats.rows_computed == sum(LENGTHS)
    assert speculator.stats.rows_reused == 2 * len(LENGTHS)


def test_each_request_reads_the_row_of_its_own_last_token():
    # lightseekorg/tokenspeed#348: a prefill of 5 rows beside 3 single ones
    config, lengths = toy_config(2), [5, 1, 1, 1]
    table, draft = toy_block_table(config), toy_draft(config)
    rows = []
    speculator = MTPSpeculator(
        draft, config, observer=lambda *_: rows.append(draft.buffer.indices[:4].clone())
    )
    speculator.propose(*simple_round(table, lengths))
    assert speculator.last_token_indices.tolist() == [4, 5, 6, 7]
    assert torch.equal(rows[0][:, 0], table.table[:, 0])
    assert rows[0][:, 1].tolist() == [4, 0, 0, 0]


@pytest.mark.parametrize("padded", [False, True])
def test_compaction_takes_the_real_requests_alone(padded):
    config = toy_config(3, padded=padded)
    draft, taken = toy_draft(config), []
    compact = draft.compact_topk_indices
    draft.compact_topk_indices = lambda rows: (taken.append(rows.tolist()), compact(rows))
    MTPSpeculator(draft, config).propose(*simple_round(toy_block_table(config), LENGTHS))
    assert taken == [[2, 3, 8]]


def test_rejected_rows_are_not_what_is_reused():
    config = toy_config(2)
    speculator = MTPSpeculator(draft := toy_draft(config), config)
    target, _, tokens = simple_round(toy_block_table(config), LENGTHS)
    speculator.propose(target, torch.tensor([1, 0, 3]), tokens)
    assert speculator.last_token_indices.tolist() == [1, 3, 5, 0]
    assert draft.buffer.indices[:3, 1].tolist() == [1, 0, 1]


class _Rolled(SharingDraft):
    def compact_topk_indices(self, rows):
        super().compact_topk_indices(rows.roll(1))


def test_rows_of_the_wrong_request_change_the_drafts():
    config = toy_config(4)
    table = toy_block_table(config)
    got = MTPSpeculator(toy_draft(config, _Rolled), config).propose(*simple_round(table, LENGTHS))
    assert not torch.equal(got, simple_drafts(table, LENGTHS, 4, shares=True))


def test_selection_of_the_target_never_reaches_the_draft():
    # ROCm/ATOM#1362: whatever the shared rows held before, step 0 selects for itself
    config = toy_config(3)
    table, draft = toy_block_table(config), toy_draft(config)
    speculator = MTPSpeculator(draft, config)
    for junk in (0, 1, 777):
        draft.buffer.indices.fill_(junk)
        got = speculator.propose(*simple_round(table, LENGTHS))
        assert torch.equal(got, simple_drafts(table, LENGTHS, 3, shares=True))


@pytest.mark.parametrize("step", range(4))
def test_failing_step_leaves_the_flag_off_and_the_next_round_right(step):
    # NVIDIA/TensorRT-LLM#15806: one failing draft step poisoned the next forward
    config = toy_config(4)
    table, draft = toy_block_table(config), toy_draft(config, fail_at=step)
    speculator = MTPSpeculator(draft, config)
    with pytest.raises(RuntimeError, match="the draft broke"):
        speculator.propose(*simple_round(table, LENGTHS))
    assert not draft.skip_topk
    assert speculator.graph_state() == (False,)
    draft.fail_at = None
    got = speculator.propose(*simple_round(table, LENGTHS))
    assert torch.equal(got, simple_drafts(table, LENGTHS, 4, shares=True))


@pytest.mark.parametrize(
    "hook",
    ["on_prefill_begin", "on_prefill_end", "on_multi_step_decode_begin"],
)
def test_failing_hook_leaves_the_flag_off_and_the_next_round_right(hook, monkeypatch):
    config = toy_config(4)
    table, draft = toy_block_table(config), toy_draft(config)
    speculator = MTPSpeculator(draft, config)
    original = getattr(speculator, hook)

    def fail(num_reqs):
        original(num_reqs)
        raise RuntimeError("the hook broke")

    with monkeypatch.context() as patch:
        patch.setattr(speculator, hook, fail)
        with pytest.raises(RuntimeError, match="the hook broke"):
            speculator.propose(*simple_round(table, LENGTHS))
    assert not draft.skip_topk
    got = speculator.propose(*simple_round(table, LENGTHS))
    assert torch.equal(got, simple_drafts(table, LENGTHS, 4, shares=True))


@pytest.mark.parametrize("steps", [0, 1, 4])
def test_flag_left_on_by_a_dead_round_is_taken_off(steps):
    config = toy_config(4)
    table, draft = toy_block_table(config), toy_draft(config)
    speculator = MTPSpeculator(draft, config)
    speculator.on_prefill_begin(3)
    draft.set_skip_topk(True)  # killed here, before its finally
    got = speculator.propose(*simple_round(table, LENGTHS), num_speculative_steps=steps)
    assert not draft.skip_topk
    assert torch.equal(got[:, :steps], simple_drafts(table, LENGTHS, steps, shares=True))


@pytest.mark.parametrize("padded", [False, True])
def test_draft_without_sharing_gives_the_tokens_of_fresh_selections(padded):
    config = toy_config(4, padded=padded)
    table, draft = toy_block_table(config), toy_draft(config, PlainDraft)
    with pytest.warns(RuntimeWarning, match="set_skip_topk"):
        speculator = MTPSpeculator(draft, config)
    got = speculator.propose(*simple_round(table, LENGTHS))
    assert torch.equal(got, simple_drafts(table, LENGTHS, 4, shares=False))
    assert speculator.stats.rows_reused == 0
    assert speculator.stats.rows_compacted == 0


def test_sharing_that_is_not_asked_for_does_not_happen():
    config = toy_config(4)
    table, draft = toy_block_table(config), toy_draft(config)
    speculator = MTPSpeculator(draft, config, draft_config={})
    got = speculator.propose(*simple_round(table, LENGTHS))
    assert torch.equal(got, simple_drafts(table, LENGTHS, 4, shares=False))
    assert not speculator.share_mtp_topk_indices


class _NeverSelects(SharingDraft):
    """Starts in skip mode and stays there, as when a pattern marks the draft layer shared."""

    def set_skip_topk(self, skip):
        self.skip_topk = True


def test_selection_that_nobody_wrote_is_refused():
    # vllm-project/vllm-ascend#14451: a draft layer may not start in skip mode
    config = toy_config(3)
    speculator = MTPSpeculator(toy_draft(config, _NeverSelects), config)
    speculator.model.set_skip_topk(True)
    round_ = simple_round(toy_block_table(config), LENGTHS)
    with pytest.raises(StaleSelectionError, match="empty"):
        speculator.propose(*round_)


def test_selection_of_the_round_before_is_refused():
    # NVIDIA/Megatron-LM#6020: a selection must not leak into the next forward
    config = toy_config(3)
    draft = toy_draft(config)
    speculator = MTPSpeculator(draft, config)
    round_ = simple_round(toy_block_table(config), LENGTHS)
    speculator.propose(*round_)
    draft.set_skip_topk = lambda skip: setattr(draft, "skip_topk", True)
    with pytest.raises(StaleSelectionError, match="of generation 1, now is 2"):
        speculator.propose(*round_)


def test_second_compaction_of_a_round_is_refused():
    class Twice(MTPSpeculator):
        def on_prefill_end(self, num_reqs):
            super().on_prefill_end(num_reqs)
            super().on_prefill_end(num_reqs)

    config = toy_config(3)
    speculator = Twice(toy_draft(config), config)
    with pytest.raises(StaleSelectionError, match="compacted already"):
        speculator.propose(*simple_round(toy_block_table(config), LENGTHS))


def test_selection_without_compaction_is_refused():
    class Never(MTPSpeculator):
        def on_prefill_end(self, num_reqs):
            """Forgets to compact."""

    config = toy_config(3)
    speculator = Never(toy_draft(config), config)
    with pytest.raises(StaleSelectionError, match="per token"):
        speculator.propose(*simple_round(toy_block_table(config), LENGTHS))


@pytest.mark.parametrize("change", [-1, 0, 1])
def test_requests_may_shrink_but_not_grow_after_compaction(change):
    # data-parallel dummy rounds shrink num_reqs between the hooks
    class Changes(MTPSpeculator):
        def on_multi_step_decode_begin(self, num_reqs):
            super().on_multi_step_decode_begin(num_reqs + change)

    config = toy_config(3)
    speculator = Changes(toy_draft(config), config)
    round_ = simple_round(toy_block_table(config), LENGTHS)
    if change <= 0:
        speculator.propose(*round_)
        return
    with pytest.raises(StaleSelectionError, match="4 requests"):
        speculator.propose(*round_)
    assert not speculator.model.skip_topk


def test_model_without_listed_buffers_shares_untracked():
    config = toy_config(4)
    table, draft = toy_block_table(config), toy_draft(config)
    del draft.topk_buffers
    got = MTPSpeculator(draft, config).propose(*simple_round(table, LENGTHS))
    assert torch.equal(got, simple_drafts(table, LENGTHS, 4, shares=True))
    assert draft.buffer.state.kind is SelectionKind.UNTRACKED


@pytest.mark.parametrize("steps", [0, 1])
def test_short_round_compacts_nothing(steps):
    config = toy_config(4)
    speculator = MTPSpeculator(draft := toy_draft(config), config)
    round_ = simple_round(toy_block_table(config), LENGTHS)
    speculator.propose(*round_, num_speculative_steps=steps)
    assert speculator.stats.rows_compacted == 0
    assert draft.buffer.state.kind is SelectionKind.PER_TOKEN
    assert draft.buffer.state.num_rows == sum(LENGTHS)


def test_counters_tell_computed_reused_and_compacted_rows():
    # sgl-project/sglang#28192: that the flag is read at all must be observable
    config = toy_config(4)
    speculator = MTPSpeculator(toy_draft(config), config)
    table = toy_block_table(config)
    for _ in range(2):
        speculator.propose(*simple_round(table, LENGTHS))
    stats = speculator.stats
    assert (stats.rounds, stats.forwards) == (2, 8)
    assert stats.rows_computed == 2 * sum(LENGTHS)
    assert stats.rows_reused == 2 * 3 * len(LENGTHS)
    assert stats.rows_compacted == 2 * len(LENGTHS)
