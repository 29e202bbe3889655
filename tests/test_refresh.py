"""refresh_every: decode steps n, 2n, … select afresh, over keys that skipping steps have cached."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from counting import counts_examples
from lightning_indexer.indexer.buffer import SelectionKind
from lightning_indexer.speculator.mtp import MTPSpeculator
from lightning_indexer.speculator.recorded import RecordedRunner
from tiny_rounds import TOPK, tiny_draft, tiny_propose, tiny_speculator, tiny_table
from toy import (
    WIDTH,
    PlainDraft,
    SharingDraft,
    simple_drafts,
    simple_round,
    toy_block_table,
    toy_config,
    toy_draft,
)

pytestmark = pytest.mark.once

STEPS = 5
LENGTHS = [3, 1, 5]
MODES = ["eager", "steps", "fused"]


def _toy_speculator(refresh_every, mode="eager", *, append=False, log=None, **options):
    config = toy_config(
        STEPS, padded=mode != "eager", fused_steps=(3, STEPS) if mode == "fused" else ()
    )
    draft = toy_draft(config, append_columns=append * (STEPS - 1), log=log)
    runner = None if mode == "eager" else RecordedRunner()
    speculator = MTPSpeculator(
        draft,
        config,
        runner=runner,
        append_new_positions=append,
        refresh_every=refresh_every,
        **options,
    )
    if mode != "eager":
        speculator.capture()
    return speculator


def _propose(speculator, lengths=LENGTHS, steps=STEPS):
    round_ = simple_round(toy_block_table(speculator.config), lengths)
    return speculator.propose(*round_, num_speculative_steps=steps)


def _expected(speculator, lengths=LENGTHS, steps=STEPS, **options):
    table = toy_block_table(speculator.config)
    simple_round(table, lengths)
    return simple_drafts(table, lengths, steps, shares=True, **options)


@pytest.mark.parametrize("steps", [1, 2, 3, 5])
@pytest.mark.parametrize("every", [None, 0, 1, 2, 3, 4, 5, 99])
def test_flag_is_off_at_multiples_alone(every, steps):
    flags = []
    speculator = _toy_speculator(every, log=lambda _, flag: flags.append(flag))
    observed = []
    speculator.observer = lambda step, batch: observed.append((step, speculator.reusing))
    _propose(speculator, steps=steps)
    expected = [bool(not every or step % every) for step in range(1, steps)]
    assert flags == [False, *expected]
    assert observed == list(enumerate(expected, start=1))
    assert not speculator.model.skip_topk


@pytest.mark.parametrize("append", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("every", [1, 2, 3])
def test_drafts_are_the_oracles_for_any_sequence_of_rounds(every, mode, append):
    speculator = _toy_speculator(every, mode, append=append)
    captured = speculator.model.forwards
    options = {"refresh_every": every, "append_columns": append * (STEPS - 1)}
    for steps in (5, 2, 4, 1, 3, 0, 5):
        for lengths in (LENGTHS, [1, 4, 1, 2]):
            got = _propose(speculator, lengths, steps)
            assert torch.equal(got[:, :steps], _expected(speculator, lengths, steps, **options))
    assert (speculator.model.forwards == captured) == (mode != "eager")


def test_refreshes_change_the_drafts():
    speculator = _toy_speculator(2)
    drafts = {str(_expected(speculator, refresh_every=n).tolist()) for n in (None, 1, 2, 3, 4)}
    assert len(drafts) == 5


@pytest.mark.parametrize("append", [False, True])
def test_later_steps_reuse_the_fresh_rows(append):
    rows = []
    speculator = _toy_speculator(
        2,
        append=append,
        observer=lambda *_: rows.append(speculator.model.buffer.indices[:4].clone()),
    )
    _propose(speculator)
    fixed = [r[:, :WIDTH] for r in rows]
    assert torch.equal(fixed[1], fixed[2])
    assert not torch.equal(fixed[0], fixed[1])
    assert not torch.equal(fixed[2], fixed[3])
    last = torch.tensor(LENGTHS) - 1
    for step in (2, 4):  # the signature's position, the step's own
        assert torch.equal(rows[step - 1][:3, 1].long(), last + step)
        assert (rows[step - 1][3] == -1).all()
    if append:  # a refresh empties the tail; then only what came after it is appended
        tails = [r[:3, WIDTH:] for r in rows]
        assert (tails[1] == -1).all()
        assert torch.equal(tails[2][:, 2].long(), last + 3)
        assert (tails[2][:, [0, 1, 3]] == -1).all()
        assert (tails[3] == -1).all()


@pytest.mark.parametrize("mode", MODES)
def test_counters_tell_refreshed_rows(mode):
    speculator = _toy_speculator(2, mode)
    _propose(speculator)  # refreshes at 2 and 4
    _propose(speculator, [2, 2], 3)  # at 2
    stats = speculator.stats
    assert stats.rows_refreshed == 2 * 3 + 2
    assert stats.rows_computed == sum(LENGTHS) + 4 + stats.rows_refreshed
    assert stats.rows_reused == 2 * 3 + 2
    assert stats.rows_compacted == 3 + 2
    assert stats.forwards == 5 + 3


@pytest.mark.parametrize("append", [False, True])
@pytest.mark.parametrize("fails_at", range(STEPS))
def test_failing_step_leaves_the_flag_off_and_the_next_round_right(fails_at, append):
    speculator = _toy_speculator(2, append=append)
    draft = speculator.model
    draft.fail_at = fails_at
    with pytest.raises(RuntimeError, match="the draft broke"):
        _propose(speculator)
    draft.fail_at = None
    assert not draft.skip_topk
    assert speculator.graph_state() == (False,)
    assert speculator.stats.rows_refreshed == 3 * ((fails_at - 1) // 2 if fails_at else 0)
    expected = _expected(speculator, refresh_every=2, append_columns=append * (STEPS - 1))
    assert torch.equal(_propose(speculator), expected)


def test_refresh_that_selects_nothing_of_this_round_is_refused():
    speculator = _toy_speculator(2)
    buffer = speculator.model.buffer
    marked = buffer.mark_refreshed
    buffer.mark_refreshed = lambda num_reqs: marked(num_reqs - 1)
    with pytest.raises(RuntimeError, match="3 requests want to reuse a selection of 2"):
        _propose(speculator)
    assert not speculator.model.skip_topk


@pytest.mark.parametrize("fused", [False, True])
def test_capture_ends_idle_and_counts_nothing(fused):
    speculator = _toy_speculator(2, "fused" if fused else "steps")
    phases = {(key.phase, key.steps) for key in speculator.runner._graphs}
    segments = {("decode", (1, 1)), ("decode", (3, 3))} if fused else set()
    assert phases == {("prefill", None), ("decode", None), ("refresh", None)} | segments
    assert vars(speculator.stats) == vars(type(speculator.stats)())
    assert not speculator.model.skip_topk
    assert speculator.model.buffer.state.kind is SelectionKind.EMPTY


class _WritesNot(SharingDraft):
    set_write_skipped_index_k = None


@pytest.mark.parametrize(
    "kind, config, name",
    [(_WritesNot, None, "_WritesNot"), (SharingDraft, {}, "SharingDraft"), (PlainDraft, {}, "Pl")],
)
def test_draft_that_cannot_refresh_is_refused(kind, config, name):
    draft = toy_draft(toy_config(STEPS), kind)
    with pytest.raises(
        ValueError, match=f"refresh_every=2 .*set_write_skipped_index_k, got {name}"
    ):
        MTPSpeculator(draft, toy_config(STEPS), draft_config=config, refresh_every=2)
    MTPSpeculator(draft, toy_config(STEPS), draft_config=config, refresh_every=0)
    with pytest.raises(ValueError, match="refresh_every"):
        MTPSpeculator(draft, toy_config(STEPS), draft_config=config, refresh_every=-1)


def test_later_draft_that_cannot_refresh_is_refused_and_not_taken():
    speculator = _toy_speculator(2, "steps")
    with pytest.raises(ValueError, match="set_write_skipped_index_k, got _WritesNot"):
        speculator.load_draft_model(toy_draft(speculator.config, _WritesNot))
    captured = speculator.model.forwards
    assert torch.equal(_propose(speculator), _expected(speculator, refresh_every=2))
    assert speculator.model.forwards == captured  # its graphs are there too


def test_draft_that_refreshed_once_stops_writing_keys_for_a_speculator_that_does_not():
    draft = toy_draft(toy_config(STEPS))
    MTPSpeculator(draft, toy_config(STEPS), refresh_every=2)
    assert draft.writes_skipped_index_k
    MTPSpeculator(draft, toy_config(STEPS))
    assert not draft.writes_skipped_index_k


@dataclass(frozen=True)
class Case:
    """Two rounds of the demo's draft: prompts, then as many verified rows of each."""

    seed: int
    steps: tuple[int, int]
    lengths: tuple[int, ...]
    verified: int


cases = st.builds(
    Case,
    seed=st.integers(0, 5),
    steps=st.tuples(st.integers(1, STEPS), st.integers(1, STEPS)),
    lengths=st.lists(st.integers(1, 14), min_size=1, max_size=3).map(tuple),
    verified=st.integers(1, 4),
)


@cache
def _tiny(seed, shares, recorded, refresh_every=None, append=0):
    draft = tiny_draft(seed, append_columns=append)
    return tiny_speculator(
        draft,
        STEPS,
        shares=shares,
        recorded=recorded,
        refresh_every=refresh_every,
        append_new_positions=append > 0,
    )


def _two_rounds(speculator, case):
    prompts = [(r, 0, n) for r, n in enumerate(case.lengths)]
    verified = [(r, n, case.verified) for r, n in enumerate(case.lengths)]
    return [
        tiny_propose(speculator, chunks, steps).tolist()
        for chunks, steps in zip((prompts, verified), case.steps, strict=True)
    ]


@pytest.mark.parametrize("recorded", [False, True])
@settings(max_examples=50)  # an example runs whole rounds several times
@given(case=cases)
@counts_examples("refresh_every")
def test_refreshing_every_step_drafts_what_a_draft_without_sharing_does(recorded, case):
    fresh = _two_rounds(_tiny(case.seed, False, False), case)
    assert _two_rounds(_tiny(case.seed, True, recorded, 1), case) == fresh


@pytest.mark.parametrize("recorded", [False, True])
@settings(max_examples=50)  # an example runs whole rounds several times
@given(case=cases)
@counts_examples("refresh_every")
def test_refreshing_after_the_last_step_is_plain_sharing(recorded, case):
    plain = _two_rounds(_tiny(case.seed, True, False), case)
    assert _two_rounds(_tiny(case.seed, True, recorded, STEPS), case) == plain


def _index_keys(draft):
    return draft.cache.index_k.data.view(-1, draft.config.index_head_dim)


@pytest.mark.parametrize("every", [None, 2, 3])
def test_skipped_steps_cache_index_keys_only_if_a_refresh_will_look_for_them(every):
    lengths = [6, 9, 2]
    chunks = [(r, 0, n) for r, n in enumerate(lengths)]
    fresh = tiny_speculator(tiny_draft(), STEPS, shares=False)
    speculator = tiny_speculator(tiny_draft(), STEPS, refresh_every=every)
    for made in (fresh, speculator):
        tiny_propose(made, chunks)
    table, owner = tiny_table(), torch.arange(3, dtype=torch.int32)
    # Step 1's hidden states come from step 0, which is the same with sharing and without.
    first = table.slots(torch.tensor(lengths), owner)
    assert _index_keys(fresh.model)[first].any(dim=1).all()
    same = torch.equal(_index_keys(fresh.model)[first], _index_keys(speculator.model)[first])
    assert same == (every is not None)
    for step in range(1, STEPS):
        slots = table.slots(torch.tensor(lengths) + step - 1, owner)
        assert bool(_index_keys(speculator.model)[slots].any()) == (every is not None)


@settings(max_examples=50)  # an example runs whole rounds several times
@given(case=cases, every=st.integers(1, STEPS))
@counts_examples("refresh_every")
def test_row_of_fresh_and_appended_positions_holds_none_twice(case, every):
    speculator = _tiny(case.seed % 2, True, False, every, STEPS - 1)
    (buffer,) = speculator.model.topk_buffers
    seen = []
    speculator.observer = lambda step, batch: seen.append((step, buffer.indices[:3].tolist()))
    _two_rounds(speculator, case)
    ends = [[n - 1 for n in case.lengths], [n - 1 + case.verified for n in case.lengths]]
    for last in ends:
        for step in range(1, case.steps[ends.index(last)]):
            at, rows = seen.pop(0)
            assert at == step
            since = step // every * every
            for row, end in zip(rows, last, strict=False):
                places = [position for position in row if position >= 0]
                assert len(set(places)) == len(places)
                assert max(row[:TOPK]) <= end + since
                made = [end + s if since < s <= step else -1 for s in range(1, STEPS)]
                assert row[TOPK:] == made
    assert not seen
