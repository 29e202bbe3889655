"""`propose` with sampling: what drafts are drawn from, and that a request depends on itself."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from counting import BATCHES, counts_examples, tallies
from lightning_indexer.speculator import draft_sampler
from lightning_indexer.speculator.mtp import MTPSpeculator
from lightning_indexer.speculator.recorded import RecordedRunner
from lightning_indexer.speculator.sampling import (
    Purpose,
    SamplingParams,
    draw_tokens,
    token_probabilities,
    uniform_at,
)
from soft_toy import SoftDraft
from toy import VOCAB, simple_round, target_rows, toy_block_table, toy_config, toy_draft

pytestmark = pytest.mark.once


def soft_speculator(steps: int, *, recorded: bool = False, padded: bool = False, **changes):
    config = toy_config(steps, padded=padded or recorded, **{"vocab_size": VOCAB} | changes)
    runner = RecordedRunner() if recorded else None
    speculator = MTPSpeculator(toy_draft(config, SoftDraft), config, runner=runner)
    if recorded:
        speculator.capture()
    return speculator, toy_block_table(config)


@dataclass(frozen=True)
class Case:
    steps: int
    lengths: tuple[int, ...]
    padded: bool
    recorded: bool
    temperatures: tuple[float, ...]
    top_p: float
    seed: int

    def params(self) -> SamplingParams:
        count = len(self.lengths)
        return SamplingParams.of(
            range(self.seed, self.seed + count),
            temperature=self.temperatures[:count],
            top_p=self.top_p,
        )


cases = st.builds(
    Case,
    steps=st.integers(1, 4),
    lengths=st.lists(st.integers(1, 3), min_size=1, max_size=4).map(tuple),
    padded=st.booleans(),
    recorded=st.booleans(),
    temperatures=st.tuples(*[st.sampled_from([0.0, 0.4, 1.0, 3.0])] * 4),
    top_p=st.sampled_from([0.5, 1.0]),
    seed=st.integers(-(2**63), 2**63 - 9),
)


@given(cases)
@counts_examples("propose")
@tallies(BATCHES, "propose")
def test_request_in_a_batch_drafts_what_it_drafts_alone(case: Case):
    speculator, table = soft_speculator(case.steps, recorded=case.recorded, padded=case.padded)
    params = case.params()
    target, rejected, tokens = simple_round(table, case.lengths)
    got = speculator.propose(target, rejected, tokens, sampling=params)
    assert speculator.draft_probs is not None
    starts = target.query_start_loc.tolist()
    for r in range(len(case.lengths)):
        alone, _ = soft_speculator(case.steps)
        rows, here = slice(starts[r], starts[r + 1]), slice(r, r + 1)
        batch = replace(
            target,
            **{
                name: getattr(target, name)[rows]
                for name in ("input_ids", "positions", "hidden", "slot_mapping")
            },
            query_start_loc=target.query_start_loc[r : r + 2] - starts[r],
            seq_lens=target.seq_lens[here],
            block_table=target.block_table[here],
            row_to_request=target.row_to_request[rows] - r,
            num_reqs=1,
            num_tokens=case.lengths[r],
            num_tokens_padded=case.lengths[r],
        )
        drafts = alone.propose(batch, rejected[here], tokens[here], sampling=params.rows(here))
        assert torch.equal(drafts[0], got[r])
        assert torch.equal(alone.draft_probs[0], speculator.draft_probs[r])


@given(cases)
@counts_examples("propose")
def test_drafts_are_drawn_from_the_probabilities_that_are_kept(case: Case):
    speculator, table = soft_speculator(case.steps)
    params, count = case.params(), len(case.lengths)
    got = speculator.propose(*simple_round(table, case.lengths), sampling=params)
    assert len(speculator.model.logits) == case.steps
    for step, logits in enumerate(speculator.model.logits):
        probs = speculator.draft_probs[:count, step]
        assert torch.equal(probs, token_probabilities(logits, params))
        # after a prompt of n tokens and the sampled one, draft s stands at position n + 1 + s
        place = torch.tensor(case.lengths) + 1 + step
        expected = draw_tokens(probs, uniform_at(params.seed, place, Purpose.DRAFT))
        assert torch.equal(got[:, step], expected)


@given(cases)
@counts_examples("propose")
def test_temperature_zero_drafts_greedily(case: Case):
    speculator, table = soft_speculator(case.steps, recorded=case.recorded)
    round_ = simple_round(table, case.lengths)
    greedy = speculator.propose(*round_)
    params = case.params()
    params.temperature.zero_()
    got = speculator.propose(*round_, sampling=params)
    assert torch.equal(got, greedy)
    probs = speculator.draft_probs[: len(case.lengths)]
    assert torch.equal(probs, torch.nn.functional.one_hot(got, VOCAB).double())


def test_fewer_steps_draft_the_beginning_of_more():
    speculator, table = soft_speculator(4)
    round_, params = simple_round(table, [3, 1]), SamplingParams.of([1, 2], temperature=5)
    more = speculator.propose(*round_, sampling=params)
    fewer = speculator.propose(*round_, sampling=params, num_speculative_steps=2)
    assert torch.equal(fewer[:, :2], more[:, :2])
    assert (fewer[:, 2:] == -1).all()


def test_other_seeds_draft_other_tokens():
    speculator, table = soft_speculator(4)
    round_ = simple_round(table, [3, 1])
    drafts = [
        speculator.propose(*round_, sampling=SamplingParams.of([s, s], temperature=5))
        for s in range(10)
    ]
    assert len({str(d.tolist()) for d in drafts}) > 5


def test_greedy_and_sampling_graphs_are_told_apart():
    speculator, table = soft_speculator(3, recorded=True)
    eager, _ = soft_speculator(3)
    captured = speculator.model.forwards
    assert captured == 2 * 6
    for seed, lengths in enumerate(([3, 1, 5], [2], [1, 1], [4, 4, 4])):
        round_ = simple_round(table, lengths)
        params = SamplingParams.of([seed] * len(lengths), temperature=5)
        for sampling in (params, None, params):
            expected = eager.propose(*round_, sampling=sampling)
            assert torch.equal(speculator.propose(*round_, sampling=sampling), expected)
    assert speculator.model.forwards == captured


def test_greedy_rounds_compute_no_probabilities(monkeypatch):
    speculator, table = soft_speculator(3)
    assert speculator.draft_probs is not None
    speculator.draft_probs.fill_(7)
    monkeypatch.setattr(draft_sampler, "token_probabilities", lambda *_: pytest.fail("computed"))
    speculator.propose(*simple_round(table, [3, 1]))
    assert (speculator.draft_probs == 7).all()


def test_probabilities_keep_their_address():
    speculator, table = soft_speculator(3)
    address = speculator.draft_probs.data_ptr()
    for lengths in ([3, 1], [2]):
        params = SamplingParams.of([0] * len(lengths))
        speculator.propose(*simple_round(table, lengths), sampling=params)
        assert speculator.draft_probs.data_ptr() == address
    assert speculator.draft_probs.shape == (4, 3, VOCAB)


@pytest.mark.parametrize("recorded", [False, True])
def test_dummies_sample_nothing_and_write_nothing(recorded):
    speculator, table = soft_speculator(3, recorded=recorded)
    params = SamplingParams.of([1, 2])
    target, rejected, tokens = simple_round(table, [2, 1])
    speculator.propose(target, rejected, tokens, sampling=params)
    before = speculator.model.cache.live.clone()
    dummy = replace(
        target,
        slot_mapping=torch.full_like(target.slot_mapping, -1),
        seq_lens=torch.zeros_like(target.seq_lens),
    )
    assert (speculator.propose(dummy, rejected, tokens, sampling=params) == -1).all()
    assert torch.equal(speculator.model.cache.live, before)


def test_no_request_is_no_work():
    speculator, table = soft_speculator(3)
    none = torch.zeros(0, dtype=torch.int64)
    empty = target_rows(table, [])
    got = speculator.propose(empty, none, none, sampling=SamplingParams.of([]), caps=none)
    assert got.shape == (0, 3)
    assert speculator.model.forwards == 0


def test_sampling_that_cannot_be_served_is_refused():
    speculator, table = soft_speculator(3)
    round_ = simple_round(table, [3, 1])
    with pytest.raises(ValueError, match=r"sampling.seed must have shape \[2\], got \[1\]"):
        speculator.propose(*round_, sampling=SamplingParams.of([0]))
    plain, _ = soft_speculator(3, vocab_size=None)
    assert plain.draft_probs is None
    with pytest.raises(ValueError, match="sampling needs the config's vocab_size"):
        plain.propose(*round_, sampling=SamplingParams.of([0, 1]))
    assert speculator.model.forwards == plain.model.forwards == 0


def test_logits_of_another_vocabulary_are_refused_and_the_flag_is_off():
    speculator, table = soft_speculator(3, vocab_size=VOCAB + 1)
    round_ = simple_round(table, [3, 1])
    with pytest.raises(ValueError, match=r"logits must have shape \[2, 4\], got \[2, 3\]"):
        speculator.propose(*round_, sampling=SamplingParams.of([0, 1]))
    assert not speculator.model.skip_topk
