"""measure_overlap_every compares shared with fresh selections and changes no output."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_indexer.speculator.mtp import MTPSpeculator
from lightning_indexer.speculator.recorded import RecordedRunner
from lightning_indexer.tinylm.model import random_model
from lightning_indexer.tinylm.runtime import build
from toy import PlainDraft, SharingDraft, simple_round, toy_block_table, toy_config, toy_draft

pytestmark = pytest.mark.once
SHARES = {"index_share_for_mtp_iteration": True}


class StackedDraft(SharingDraft):
    """Its later layers' keys depend on what the first one selected."""

    def forward(self, batch):
        hidden = super().forward(batch)
        self.cache.write(batch.slot_mapping, hidden[:, 0].to(torch.int64))
        return hidden


def speculator(
    steps: int = 3, *, recorded: bool = False, kind: type[PlainDraft] = SharingDraft, **options
) -> MTPSpeculator:
    config = toy_config(steps, padded=recorded)
    runner = RecordedRunner() if recorded else None
    made = MTPSpeculator(
        toy_draft(config, kind), config, draft_config=SHARES, runner=runner, **options
    )
    if recorded:
        made.capture()
    return made


def propose(made: MTPSpeculator, lengths=(3, 2), steps: int | None = None) -> torch.Tensor:
    target, rejected, following = simple_round(toy_block_table(made.config), lengths)
    return made.propose(target, rejected, following, num_speculative_steps=steps)


@pytest.mark.parametrize(
    ("kind", "recorded"), [(SharingDraft, False), (StackedDraft, False), (StackedDraft, True)]
)
@given(
    every=st.integers(1, 4),
    rounds=st.lists(
        st.tuples(st.integers(0, 4), st.lists(st.integers(1, 4), max_size=3)), max_size=4
    ),
)
def test_measuring_changes_no_draft_row_or_counter(kind, recorded, every, rounds):
    plain = speculator(4, recorded=recorded, kind=kind)
    probed = speculator(4, recorded=recorded, kind=kind, measure_overlap_every=every)
    for steps, lengths in rounds:
        assert torch.equal(propose(plain, lengths, steps), propose(probed, lengths, steps))
        assert torch.equal(plain.model.buffer.indices, probed.model.buffer.indices)
        assert plain.model.buffer.state == probed.model.buffer.state
        assert not probed.model.skip_topk
    assert plain.stats == probed.stats


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("every", [1, 2, 3])
def test_every_nth_round_is_measured(every, recorded):
    probed = speculator(3, recorded=recorded, measure_overlap_every=every)
    for _ in range(7):
        propose(probed)
    assert probed.overlap.rows_by_step() == [2 * (7 // every)] * 2


@pytest.mark.parametrize("every", [None, 0])
def test_nothing_is_measured_by_default(every):
    assert speculator(measure_overlap_every=every).overlap is None
    assert speculator().observer is None


@given(seed=st.integers(0, 2**32 - 1))
def test_overlap_is_the_share_of_the_fresh_set(seed):
    probe = speculator(measure_overlap_every=1).overlap
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(2):
        order = torch.rand(5, 12, generator=generator).argsort(1)[:, :6].to(torch.int32)
        sizes = torch.randint(0, 7, (5, 1), generator=generator)
        rows.append(torch.where(torch.arange(6) < sizes, order, -1))
    shared, fresh = rows
    probe._add(2, shared, fresh)
    pairs = zip(shared.tolist(), fresh.tolist(), strict=True)
    sets = [(set(s) - {-1}, set(f) - {-1}) for s, f in pairs]
    shares = [len(s & f) / len(f) for s, f in sets if f]
    assert probe.rows_by_step() == [0, len(shares)]
    assert probe.by_step()[1] == pytest.approx(sum(shares) / len(shares) if shares else 0)


def test_an_observer_of_ones_own_is_still_called():
    seen = []
    probed = speculator(measure_overlap_every=2, observer=lambda step, batch: seen.append(step))
    propose(probed)
    assert seen == [1, 2]


def test_the_flag_is_off_after_a_shadow_forward_that_breaks():
    probed = speculator(measure_overlap_every=1)
    probed.model.fail_at = 2  # step 0 and step 1 pass
    with pytest.raises(RuntimeError, match="the draft broke"):
        propose(probed)
    probed.model.fail_at = None
    assert not probed.model.skip_topk
    assert torch.equal(propose(probed), propose(speculator()))


def test_a_draft_that_does_not_share_is_refused():
    config = toy_config(3)
    with pytest.raises(ValueError, match="share_mtp_topk_indices=False"):
        MTPSpeculator(
            toy_draft(config, PlainDraft), config, draft_config={}, measure_overlap_every=1
        )
    with pytest.raises(ValueError, match="every"):
        speculator(measure_overlap_every=-1)


def test_a_later_draft_that_does_not_share_is_left_alone():
    probed = speculator(measure_overlap_every=1)
    probed.load_draft_model(probed.model, {})
    propose(probed)
    assert probed.overlap.rows_by_step() == [0, 0]


def test_a_selection_that_holds_every_old_key_misses_the_new_ones_alone():
    _, draft = build(random_model(0), num_pages=24, max_num_tokens=12, page_size=4)
    config = toy_config(3, hidden_size=draft.config.hidden_size)
    probed = MTPSpeculator(draft, config, draft_config=SHARES, measure_overlap_every=1)
    target, rejected, following = simple_round(toy_block_table(config), [2, 1])
    hidden = torch.randn(3, config.hidden_size, generator=torch.Generator().manual_seed(0))
    probed.propose(replace(target, hidden=hidden), rejected, following)
    # step 0 selects all 2 and 1 keys there are; steps 1 and 2 see one and two more
    expected = [(2 / 3 + 1 / 2) / 2, (2 / 4 + 1 / 3) / 2]
    assert probed.overlap.by_step() == pytest.approx(expected)
