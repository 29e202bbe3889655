"""Caps of single requests: drafts end there, and nothing is written or read past them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from counting import counts_examples
from lightning_indexer.speculator.batch import RequestRows
from lightning_indexer.speculator.mtp import MTPSpeculator
from lightning_indexer.speculator.recorded import RecordedRunner
from lightning_indexer.speculator.sampling import SamplingParams
from toy import (
    DraftOracle,
    simple_drafts,
    simple_round,
    target_rows,
    toy_block_table,
    toy_config,
    toy_draft,
)

pytestmark = pytest.mark.once

LENGTHS = [3, 1, 5, 2]


def _speculator(steps: int, *, recorded: bool, **options) -> MTPSpeculator:
    config = toy_config(steps, padded=recorded, vocab_size=3)
    runner = RecordedRunner() if recorded else None
    speculator = MTPSpeculator(toy_draft(config), config, runner=runner, **options)
    if recorded:
        speculator.capture()
    return speculator


@given(
    caps=st.lists(st.sampled_from([*range(-2, 8), 2**31 - 1]), min_size=4, max_size=4),
    steps=st.integers(0, 5),
    recorded=st.booleans(),
    samples=st.booleans(),
    dtype=st.sampled_from([torch.int32, torch.int64]),
)
@counts_examples("propose")
def test_capped_drafts_are_the_beginning_of_uncapped_ones(caps, steps, recorded, samples, dtype):
    speculator = _speculator(5, recorded=recorded)
    table = toy_block_table(speculator.config)
    sampling = SamplingParams.of([0] * 4, temperature=9) if samples else None
    options = {"num_speculative_steps": steps, "sampling": sampling}
    round_ = simple_round(table, LENGTHS)
    plain = speculator.propose(*round_, **options)
    capped = speculator.propose(*round_, **options, caps=torch.tensor(caps, dtype=dtype))
    live = torch.arange(5) < torch.tensor(caps).unsqueeze(1)
    assert torch.equal(capped, torch.where(live, plain, -1))
    assert torch.equal(speculator.propose(*round_, **options), plain)  # a cap is for one round


@pytest.mark.parametrize("recorded", [False, True])
def test_rows_past_their_cap_have_no_slot_and_no_length(recorded):
    seen = {}

    def keep(step, batch):
        seen[step] = batch.slot_mapping.tolist(), batch.seq_lens.tolist()

    speculator = _speculator(5, recorded=recorded, observer=keep)
    table = toy_block_table(speculator.config)
    speculator.propose(*simple_round(table, LENGTHS), caps=torch.tensor([0, 2, 5, 1]))
    for step, (slots, lengths) in seen.items():
        for request, cap in enumerate([0, 2, 5, 1]):
            assert (slots[request] >= 0) == (step < cap)
            assert lengths[request] == (LENGTHS[request] + step if step < cap else 0)
    assert set(seen) == {1, 2, 3, 4}


@pytest.mark.parametrize("recorded", [False, True])
def test_capped_request_leaves_the_cache_as_a_shorter_round_does(recorded):
    caches = []
    for options in ({"num_speculative_steps": 2}, {"caps": torch.tensor([2] * 4)}):
        speculator = _speculator(5, recorded=recorded)
        table = toy_block_table(speculator.config)
        speculator.propose(*simple_round(table, LENGTHS), **options)
        caches.append(speculator.model.cache.live.clone())
    assert torch.equal(*caches)


def test_request_capped_at_zero_keeps_its_cache_in_step():
    speculator = _speculator(3, recorded=False)
    table = toy_block_table(speculator.config)
    target, rejected, tokens = simple_round(table, [4, 4])
    speculator.propose(target, rejected, tokens, caps=torch.tensor([0, 3]))
    verified = target_rows(table, [RequestRows(r, 4, [1, 2, 0]) for r in (1, 0)])  # reordered
    got = speculator.propose(verified, rejected, tokens)
    for row, request in enumerate((1, 0)):
        oracle = DraftOracle(table.table[request].tolist(), 4, 24, shares=True)
        oracle.propose(0, [(request + i) % 3 for i in range(4)], 0, 1, 1)
        assert got[row].tolist() == oracle.propose(4, [1, 2, 0], 0, 1, 3)


def test_cap_of_a_request_is_not_that_of_the_next_one_in_its_row():
    speculator = _speculator(3, recorded=True)
    table = toy_block_table(speculator.config)
    speculator.propose(*simple_round(table, LENGTHS), caps=torch.tensor([0, 0, 0, 0]))
    got = speculator.propose(*simple_round(table, [2, 3]), caps=torch.tensor([3, 3]))
    assert torch.equal(got, simple_drafts(table, [2, 3], 3, shares=True))


def test_unusable_caps_are_refused():
    speculator = _speculator(3, recorded=False)
    round_ = simple_round(toy_block_table(speculator.config), [2, 3])
    with pytest.raises(ValueError, match=r"caps must have shape \[2\], got \[1\]"):
        speculator.propose(*round_, caps=torch.tensor([1]))
    with pytest.raises(TypeError, match="caps must be int32 or int64"):
        speculator.propose(*round_, caps=torch.tensor([1.0, 2.0]))
    assert speculator.model.forwards == 0
