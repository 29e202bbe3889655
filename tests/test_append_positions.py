"""append_new_positions: a step also sees what its round has made so far, and nothing else new."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from counting import counts_examples
from lightning_indexer.indexer.buffer import SelectionKind, TopkIndicesBuffer
from lightning_indexer.indexer.config import IndexerConfig
from lightning_indexer.indexer.lightning_indexer import LightningIndexer
from lightning_indexer.speculator.mtp import MTPSpeculator
from lightning_indexer.speculator.recorded import RecordedRunner
from tiny_rounds import MAX_LEN, TOPK, tiny_draft, tiny_propose, tiny_speculator
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

STEPS = 4
LENGTHS = [3, 1, 5]
MODES = ["eager", "steps", "fused"]


@dataclass(frozen=True)
class Case:
    steps: int
    lengths: tuple[int, ...]
    caps: tuple[int, ...] | None

    @property
    def chunks(self) -> list[tuple[int, int, int]]:
        """The last 16 positions of each request at most, as if the rest had run before."""
        return [(r, max(n - 16, 0), min(n, 16)) for r, n in enumerate(self.lengths)]


cases = st.builds(
    Case,
    steps=st.integers(0, STEPS),
    lengths=st.lists(
        st.one_of(st.integers(1, 16), st.integers(MAX_LEN - 4, MAX_LEN)), min_size=1, max_size=3
    ).map(tuple),
    caps=st.none() | st.tuples(*[st.integers(-1, STEPS)] * 3),
)


@cache
def _seeing():
    """A speculator of the demo's draft, and what its observer saw in the round."""
    seen = []
    draft = tiny_draft(append_columns=STEPS - 1)
    (buffer,) = draft.topk_buffers

    def observe(step, batch):
        seen.append((step, buffer.indices.clone(), buffer.state.kind, buffer.write_count))

    return tiny_speculator(draft, STEPS, append_new_positions=True, observer=observe), seen


@settings(max_examples=50)  # an example runs whole rounds several times
@given(rounds=st.lists(cases, min_size=1, max_size=3))
@counts_examples("append_new_positions")
def test_row_is_the_compacted_one_and_the_positions_made_since(rounds):
    speculator, seen = _seeing()
    (buffer,) = speculator.model.topk_buffers
    address = buffer.indices.data_ptr()
    selected = []

    def remember(num_reqs):  # before compaction: rows of the requests' last tokens
        selected[:] = buffer.indices[speculator.last_token_indices[:num_reqs]].tolist()
        MTPSpeculator.on_prefill_end(speculator, num_reqs)

    speculator.on_prefill_end = remember
    for case in rounds:
        seen.clear()
        caps = None if case.caps is None else torch.tensor(case.caps[: len(case.lengths)])
        tiny_propose(speculator, case.chunks, case.steps, caps=caps)
        assert [step for step, *_ in seen] == list(range(1, case.steps))
        assert all(row[TOPK:] == [-1] * (STEPS - 1) for row in selected)
        for step, rows, kind, _ in seen:
            assert kind is SelectionKind.PER_REQUEST
            for r, length in enumerate(case.lengths):
                most = MAX_LEN - length  # steps that the model still has positions for
                if case.caps is not None:
                    most = min(most, case.caps[r] - 1)
                made = [length - 1 + s if s <= most else -1 for s in range(1, step + 1)]
                row = rows[r].tolist()
                assert row == selected[r][:TOPK] + made + [-1] * (STEPS - 1 - step)
                places = [position for position in row if position >= 0]
                assert len(places) == len(set(places))
            assert (rows[len(case.lengths) : 3] == -1).all()
        assert len({count for *_, count in seen}) <= 1  # no step selected
        assert buffer.indices.data_ptr() == address


@pytest.mark.parametrize("early", [False, True])
def test_no_position_is_seen_before_it_is_cached(early):
    draft = tiny_draft(append_columns=STEPS - 1)
    speculator = tiny_speculator(draft, STEPS, append_new_positions=True)
    draft.cache.latent.rows.fill_(float("nan"))  # what nobody has written
    (buffer,) = draft.topk_buffers
    append = buffer.append
    buffer.append = lambda positions, last: append(positions + early, last)
    tiny_propose(speculator, [(0, 0, 7), (1, 0, 2), (2, 0, 16)])
    assert bool(speculator.steps._feedback.isfinite().all()) != early


@pytest.mark.parametrize("recorded", [False, True])
def test_short_request_drafts_as_if_every_step_selected(recorded):
    # A step's own position and those before it are all there is: sharing alone loses some.
    differs = 0
    for seed in range(4):
        chunks = [(0, 0, 1), (1, 0, 2), (2, 0, 1)]
        steps = 3  # at most 4 = index_topk positions
        draft = tiny_draft(seed, append_columns=steps - 1)
        appending = tiny_speculator(draft, steps, recorded=recorded, append_new_positions=True)
        fresh = tiny_propose(tiny_speculator(tiny_draft(seed), steps, shares=False), chunks)
        plain = tiny_propose(tiny_speculator(tiny_draft(seed), steps), chunks)
        assert torch.equal(tiny_propose(appending, chunks), fresh)
        differs += not torch.equal(plain, fresh)
    assert differs > 0


def _toy_speculator(mode="eager", *, kind=SharingDraft, **options):
    config = toy_config(
        STEPS, padded=mode != "eager", fused_steps=(2, STEPS) if mode == "fused" else ()
    )
    draft = toy_draft(config, kind, append_columns=STEPS - 1)
    runner = None if mode == "eager" else RecordedRunner()
    speculator = MTPSpeculator(draft, config, runner=runner, append_new_positions=True, **options)
    if mode != "eager":
        speculator.capture()
    return speculator


def _assert_right(speculator, lengths=LENGTHS, steps=STEPS):
    table = toy_block_table(speculator.config)
    got = speculator.propose(*simple_round(table, lengths), num_speculative_steps=steps)
    expected = simple_drafts(table, lengths, steps, shares=True, append_columns=STEPS - 1)
    assert torch.equal(got[:, :steps], expected)


@pytest.mark.parametrize("mode", MODES)
def test_drafts_are_the_oracles_for_any_sequence_of_rounds(mode):
    speculator = _toy_speculator(mode)
    captured = speculator.model.forwards
    for steps in (4, 2, 3, 1, 4, 0, 2, 4):
        for lengths in (LENGTHS, [2], [1, 4, 1, 2]):
            _assert_right(speculator, lengths, steps)
    assert (speculator.model.forwards == captured) == (mode != "eager")


def test_appended_positions_change_the_drafts():
    table = toy_block_table(toy_config(STEPS))
    simple_round(table, LENGTHS)
    plain, appended, elsewhere = (
        simple_drafts(table, LENGTHS, STEPS, shares=True, append_columns=n) for n in (0, 3, 4)
    )
    assert not torch.equal(plain, appended)
    assert not torch.equal(appended, elsewhere)  # each column is read


class _Sees(SharingDraft):
    """Keeps the appended columns that selecting forwards find."""

    def forward(self, batch):
        if not self.skip_topk:
            self.found = [*getattr(self, "found", ()), self.buffer.indices[:, WIDTH:].clone()]
        return super().forward(batch)


@pytest.mark.parametrize("dies_at", [None, 1, 2, 3])
def test_step_0_finds_nothing_of_the_round_before(dies_at):
    speculator = _toy_speculator(kind=_Sees)
    for steps in (STEPS, 2, 3):
        if dies_at is not None:
            speculator.model.fail_at = speculator.model.forwards + dies_at
            with pytest.raises(RuntimeError, match="the draft broke"):
                speculator.propose(*simple_round(toy_block_table(speculator.config), LENGTHS))
            speculator.model.fail_at = None
        _assert_right(speculator, steps=steps)
        speculator.capture()
    assert all((tail == -1).all() for tail in speculator.model.found)


@pytest.mark.parametrize("mode", MODES)
def test_capture_leaves_no_tail(mode):
    speculator = _toy_speculator(mode)
    _assert_right(speculator)
    assert (speculator.model.buffer.indices[:3, WIDTH:] >= 0).all()
    speculator.capture()
    assert (speculator.model.buffer.indices[:, WIDTH:] == -1).all()
    _assert_right(speculator, steps=2)


@pytest.mark.parametrize("mode", MODES)
def test_dummies_and_padding_get_nothing(mode):
    speculator = _toy_speculator(mode)
    target, rejected, tokens = simple_round(toy_block_table(speculator.config), LENGTHS)
    slots, lens = target.slot_mapping.clone(), target.seq_lens.clone()
    slots[3:4], lens[1] = -1, 0  # request 1 idles
    got = speculator.propose(replace(target, slot_mapping=slots, seq_lens=lens), rejected, tokens)
    assert (got[1] == -1).all()
    rows = speculator.model.buffer.indices
    assert (rows[[1, 3]] == -1).all()
    assert rows[[0, 2], WIDTH:].tolist() == [[3, 4, 5], [5, 6, 7]]


def test_overlap_is_measured_of_rows_without_tails_and_leaves_them():
    plain, probed = _toy_speculator(), _toy_speculator(measure_overlap_every=1)
    for steps in (4, 3):
        _assert_right(plain, steps=steps)
        _assert_right(probed, steps=steps)
        assert torch.equal(plain.model.buffer.indices, probed.model.buffer.indices)


@pytest.mark.parametrize(
    "columns, options, need",
    [
        (0, {}, r"append_columns of at least 3, got \[0\]"),
        (2, {}, r"append_columns of at least 3, got \[2\]"),
        (3, {"draft_config": {}}, r"shared topk_buffers .*, got \[\]"),
        (3, {"kind": PlainDraft}, r"shared topk_buffers .*, got \[\]"),
    ],
)
@pytest.mark.filterwarnings("ignore:index_share_for_mtp_iteration")
def test_draft_that_cannot_take_new_positions_is_refused(columns, options, need):
    config, options = toy_config(STEPS), dict(options)
    draft = toy_draft(config, options.pop("kind", SharingDraft), append_columns=columns)
    with pytest.raises(ValueError, match=need):
        MTPSpeculator(draft, config, append_new_positions=True, **options)


def test_later_draft_without_room_is_refused():
    speculator = _toy_speculator()
    with pytest.raises(ValueError, match=r"got \[0\]"):
        speculator.load_draft_model(toy_draft(speculator.config))
    _assert_right(speculator)  # with the draft that it had


def test_one_draft_a_round_needs_no_room():
    config = toy_config(1)
    table = toy_block_table(config)
    speculator = MTPSpeculator(toy_draft(config), config, append_new_positions=True)
    got = speculator.propose(*simple_round(table, LENGTHS))
    assert torch.equal(got, simple_drafts(table, LENGTHS, 1, shares=True))


def test_buffer_must_hold_the_selection_beside_the_appended_columns():
    with pytest.raises(ValueError, match="width must be at least 4, got 3"):
        TopkIndicesBuffer(2, 3, append_columns=3)
    config = IndexerConfig(
        hidden_size=12, q_lora_rank=10, index_n_heads=4, index_head_dim=16, index_topk=5,
        qk_rope_head_dim=8, rope_style="half_split",
    )  # fmt: skip
    LightningIndexer(config, TopkIndicesBuffer(2, 8, append_columns=3))
    with pytest.raises(ValueError, match="index_topk=5 wide, got 7 of which 3 are for appended"):
        LightningIndexer(config, TopkIndicesBuffer(2, 7, append_columns=3))


def test_buffer_made_in_inference_mode_works_outside_of_it():
    with torch.inference_mode():
        buffer = TopkIndicesBuffer(3, 4, append_columns=2)
    buffer.track()
    buffer.new_generation()
    last = torch.tensor([5, 6])
    buffer.mark_written(2)
    buffer.mark_compacted(last, 2)
    buffer.append(last + 1, last)
    buffer.check_reusable(last, 2)
    assert buffer.indices.tolist() == [[-1, -1, 6, -1], [-1, -1, 7, -1], [-1] * 4]


@settings(max_examples=50)  # an example runs whole rounds several times
@given(
    rows=st.lists(
        st.tuples(st.integers(0, 9), st.lists(st.booleans(), min_size=3, max_size=3)), max_size=4
    )
)
@counts_examples("append_new_positions")
def test_positions_go_to_the_column_of_their_distance(rows):
    buffer = TopkIndicesBuffer(5, 5, append_columns=3)
    buffer.indices.copy_(torch.arange(100, 125).reshape(5, 5))
    buffer.new_generation()
    expected = [[100 + 5 * r, 101 + 5 * r, -1, -1, -1] for r in range(5)]
    last, count = torch.tensor([last for last, _ in rows], dtype=torch.int64), buffer.write_count
    for step in range(1, 4):
        new = [last + step if lives[step - 1] else -1 for last, lives in rows]
        buffer.append(torch.tensor(new, dtype=torch.int64), last)
        for row, position in zip(expected, new, strict=False):
            row[1 + step] = position
        assert buffer.indices.tolist() == expected
    assert buffer.write_count == count  # nothing was selected
