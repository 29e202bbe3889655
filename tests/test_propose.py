"""`propose` against a plain-Python oracle that knows neither batches nor buffers."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from counting import AGREEMENT, counts_examples, tallies
from lightning_indexer.indexer.block_table import BlockTable
from lightning_indexer.speculator.autoregressive import AutoRegressiveSpeculator
from lightning_indexer.speculator.batch import RequestRows, StepBatch, with_hidden
from lightning_indexer.speculator.mtp import MTPSpeculator
from lightning_indexer.speculator.recorded import RecordedRunner
from lightning_indexer.speculator.runner import EagerRunner
from toy import (
    VOCAB,
    DraftOracle,
    PlainDraft,
    SharingDraft,
    simple_drafts,
    simple_round,
    target_rows,
    toy_block_table,
    toy_config,
    toy_draft,
)


@dataclass(frozen=True)
class Case:
    steps: int  # configured K
    num_requests: int
    num_rounds: int
    max_model_len: int
    padded: bool
    recorded: bool
    sharing: bool
    hooks: bool  # MTPSpeculator, or the base class whose hooks do nothing
    pair: bool
    capped: bool
    seed: int


cases = st.builds(
    Case,
    steps=st.integers(0, 5),
    num_requests=st.integers(1, 4),
    num_rounds=st.integers(1, 4),
    max_model_len=st.sampled_from([9, 12, 24]),
    padded=st.booleans(),
    recorded=st.booleans(),
    sharing=st.booleans(),
    hooks=st.booleans(),
    pair=st.booleans(),
    capped=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)


@given(cases)
@counts_examples("propose")
@tallies(AGREEMENT, "propose")
def test_drafts_equal_the_oracle_of_each_request_alone(case: Case):
    rng = random.Random(case.seed)
    config = toy_config(case.steps, padded=case.padded, max_model_len=case.max_model_len)
    table = toy_block_table(config)
    draft = toy_draft(config, SharingDraft if case.sharing else PlainDraft, pair=case.pair)
    draft.config["index_share_for_mtp_iteration"] = case.sharing
    speculator = (MTPSpeculator if case.hooks else AutoRegressiveSpeculator)(
        draft, config, runner=RecordedRunner() if case.recorded else EagerRunner()
    )
    if case.recorded:
        speculator.capture()
    shares = case.sharing and case.hooks
    order = list(range(case.num_requests))
    for request in reversed(order):
        table.allocate(request, config.max_model_len)
    oracles = [
        DraftOracle(
            table.table[r].tolist(), config.page_size, config.max_model_len, shares, case.pair
        )
        for r in order
    ]
    computed = [0] * case.num_requests
    rows_computed = rows_reused = 0
    for _ in range(case.num_rounds):
        rng.shuffle(order)
        steps = rng.randint(0, case.steps)
        rows, rejected, next_tokens, caps, expected = [], [], [], [], []
        for request in order[: rng.randint(1, case.num_requests)]:
            room = min(config.max_model_len - computed[request], 3)
            if room == 0:
                continue
            tokens = [rng.randrange(VOCAB) for _ in range(rng.randint(1, room))]
            rejected.append(rng.randrange(len(tokens)))
            next_tokens.append(rng.randrange(VOCAB))
            rows.append(RequestRows(request, computed[request], tokens))
            caps.append(rng.randint(0, case.steps + 1))
            most = min(steps, caps[-1]) if case.capped else steps
            drafts = oracles[request].propose(
                computed[request], tokens, rejected[-1], next_tokens[-1], most
            )
            expected.append([*drafts, *[-1] * (case.steps - most)])
            computed[request] += len(tokens) - rejected[-1]
        if not rows:
            break
        got = speculator.propose(
            target_rows(table, rows),
            torch.tensor(rejected, dtype=rng.choice([torch.int32, torch.int64])),
            torch.tensor(next_tokens),
            num_speculative_steps=steps,
            caps=torch.tensor(caps) if case.capped else None,
        )
        assert got.dtype == torch.int64
        assert got.shape == (len(rows), case.steps)
        assert got.tolist() == expected
        rows_computed += sum(len(row.token_ids) for row in rows)
        decoded = len(rows) * max(steps - 1, 0)
        rows_computed += 0 if shares else decoded
        rows_reused += decoded if shares else 0
        if shares and steps > 1:
            assert (draft.buffer.indices[len(rows) : config.max_num_reqs] == -1).all()
    assert speculator.stats.rows_computed == rows_computed
    assert speculator.stats.rows_reused == rows_reused


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    ("speculator_type", "draft_type"),
    [(AutoRegressiveSpeculator, SharingDraft), (AutoRegressiveSpeculator, PlainDraft)],
)
def test_speculator_without_hooks_recomputes_every_step(speculator_type, draft_type, padded):
    config = toy_config(4, padded=padded)
    table = toy_block_table(config)
    speculator = speculator_type(toy_draft(config, draft_type), config)
    got = speculator.propose(*simple_round(table, [3, 1, 5]))
    assert torch.equal(got, simple_drafts(table, [3, 1, 5], 4, shares=False))
    assert speculator.stats.rows_reused == 0


def test_sharing_changes_what_the_toy_drafts():
    # else no test here would notice a speculator that never shares
    table = toy_block_table(toy_config(5))
    simple_round(table, [3, 1, 5, 2])
    shared = simple_drafts(table, [3, 1, 5, 2], 5, shares=True)
    fresh = simple_drafts(table, [3, 1, 5, 2], 5, shares=False)
    assert torch.equal(shared[:, 0], fresh[:, 0])
    assert not torch.equal(shared, fresh)


def _observed(config, runner=None):
    """A speculator and the batches of its decode steps, copied."""
    seen: dict[int, StepBatch] = {}

    def keep(step: int, batch: StepBatch) -> None:
        copies = {k: v.clone() for k, v in vars(batch).items() if isinstance(v, torch.Tensor)}
        seen[step] = replace(batch, **copies)

    speculator = MTPSpeculator(toy_draft(config), config, runner=runner, observer=keep)
    return speculator, seen


def test_slots_and_lengths_advance_across_a_page():
    # vllm-project/vllm#41162: pages of 4, length 7; the second draft step lies in the next page
    config = toy_config(4)
    table = toy_block_table(config)
    speculator, seen = _observed(config)
    speculator.propose(*simple_round(table, [7]))
    pages = table.table[0].tolist()
    assert [seen[s].seq_lens.tolist() for s in (1, 2, 3)] == [[8], [9], [10]]
    assert [seen[s].positions.tolist() for s in (1, 2, 3)] == [[7], [8], [9]]
    assert [seen[s].slot_mapping.tolist() for s in (1, 2, 3)] == [
        [pages[1] * 4 + 3],
        [pages[2] * 4],
        [pages[2] * 4 + 1],
    ]


def test_request_map_of_decode_steps_is_one_row_a_request():
    # NVIDIA/TensorRT-LLM#16925: seq_lens [3,1,4,1], then [1,1,1,1]
    config = toy_config(2)
    table = toy_block_table(config)
    speculator, seen = _observed(config)
    target, rejected, tokens = simple_round(table, [3, 1, 4, 1])
    assert target.row_to_request.tolist() == [0, 0, 0, 1, 2, 2, 2, 2, 3]
    speculator.propose(target, rejected, tokens)
    assert seen[1].row_to_request.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("recorded", [False, True])
def test_steps_past_max_model_len_draft_nothing_and_write_nothing(recorded):
    # vllm-project/vllm#46074: drafts must not run into a page past max_model_len
    config = toy_config(5, padded=recorded, max_model_len=8)
    table = toy_block_table(config)
    speculator, seen = _observed(config, RecordedRunner() if recorded else None)
    if recorded:
        speculator.capture()
    got = speculator.propose(*simple_round(table, [7, 2]))
    assert got[0, :2].min() >= 0  # rows at positions 6 and 7
    assert got[0, 2:].tolist() == [-1, -1, -1]
    assert got[1].min() >= 0
    for step in (2, 3, 4):
        assert seen[step].slot_mapping[0] == -1
        assert seen[step].seq_lens[0] == 0
        assert seen[step].positions[0] == 7
        assert seen[step].seq_lens[1] == 2 + step


def test_requests_of_length_one_share_too():
    config = toy_config(3)
    table = toy_block_table(config)
    got = MTPSpeculator(toy_draft(config), config).propose(*simple_round(table, [1, 1, 1]))
    assert torch.equal(got, simple_drafts(table, [1, 1, 1], 3, shares=True))


def test_round_without_drafts_keeps_the_draft_cache_in_step():
    config = toy_config(3)
    table = toy_block_table(config)
    draft = toy_draft(config)
    speculator = MTPSpeculator(draft, config)
    target, rejected, tokens = simple_round(table, [5])
    got = speculator.propose(target, rejected, tokens, num_speculative_steps=0)
    assert (got == -1).all()
    assert (draft.cache.keys[target.slot_mapping] != 0).all()


def test_drafted_positions_are_rewritten_before_they_are_read():
    # xLLM-AI/xllm#2339: what skipping steps wrote comes from drafted tokens; the next round's
    # step 0 writes those slots again, from verified tokens, before any row reads them
    config = toy_config(3)
    table = toy_block_table(config)
    draft = toy_draft(config)
    speculator = MTPSpeculator(draft, config)
    target, rejected, tokens = simple_round(table, [4])
    speculator.propose(target, rejected, tokens)
    drafted = table.slots(torch.tensor([4, 5]), torch.zeros(2, dtype=torch.int32))
    draft.cache.keys[drafted] = 1234  # whatever they are
    verified = target_rows(table, [RequestRows(0, 4, [1, 2, 0])])
    got = speculator.propose(verified, rejected, tokens)
    oracle = DraftOracle(table.table[0].tolist(), 4, config.max_model_len, shares=True)
    oracle.propose(0, [i % VOCAB for i in range(4)], 0, 1, 3)
    assert got.tolist() == [oracle.propose(4, [1, 2, 0], 0, 1, 3)]


def test_no_request_is_no_work():
    config = toy_config(3)
    draft = toy_draft(config)
    empty = target_rows(toy_block_table(config), [])
    none = torch.zeros(0, dtype=torch.int64)
    got = MTPSpeculator(draft, config).propose(empty, none, none)
    assert got.shape == (0, 3)
    assert draft.forwards == 0


def test_padding_of_the_target_batch_is_ignored():
    config = toy_config(3, padded=True)
    table = toy_block_table(config)
    target, rejected, tokens = simple_round(table, [2, 3])

    def pad(x: torch.Tensor, value: int) -> torch.Tensor:
        filler = torch.full((4, *x.shape[1:]), value, dtype=x.dtype)
        return torch.cat([x, filler])

    padded = replace(
        target,
        input_ids=pad(target.input_ids, 2),
        positions=pad(target.positions, 7),
        hidden=pad(target.hidden, 99),
        slot_mapping=pad(target.slot_mapping, 5),
        row_to_request=pad(target.row_to_request, 1),
        num_tokens_padded=target.num_tokens + 4,
    )
    got = MTPSpeculator(toy_draft(config), config).propose(padded, rejected, tokens)
    assert torch.equal(got, simple_drafts(table, [2, 3], 3, shares=True))


def test_works_in_inference_mode():
    config = toy_config(3)
    table = toy_block_table(config)
    round_ = simple_round(table, [2, 3])
    speculator = MTPSpeculator(toy_draft(config), config)
    with torch.inference_mode():
        got = speculator.propose(*round_)
    assert torch.equal(got, simple_drafts(table, [2, 3], 3, shares=True))


@pytest.mark.parametrize("recorded", [False, True])
def test_works_with_content_checks(recorded, monkeypatch):
    monkeypatch.setenv("LIGHTNING_INDEXER_CHECK", "1")
    config = toy_config(5, padded=recorded, max_model_len=8)
    table = toy_block_table(config)
    speculator = MTPSpeculator(
        toy_draft(config), config, runner=RecordedRunner() if recorded else None
    )
    if recorded:
        speculator.capture()
    got = speculator.propose(*simple_round(table, [7, 2]))
    assert torch.equal(got, simple_drafts(table, [7, 2], 5, shares=True))


def test_bitwise_equal_over_twenty_rounds():
    config = toy_config(4)
    table = toy_block_table(config)
    speculator = MTPSpeculator(toy_draft(config), config)
    round_ = simple_round(table, [3, 2, 4])
    first = speculator.propose(*round_)
    for _ in range(20):
        assert torch.equal(speculator.propose(*round_), first)


def _bad_rounds():
    config = toy_config(2)
    table: BlockTable = toy_block_table(config)
    target, rejected, tokens = simple_round(table, [2, 3])
    good = {"target": target, "num_rejected": rejected, "next_tokens": tokens}
    short_hidden = with_hidden(target, target.hidden[:1])
    other_pages = replace(target, page_size=8)
    too_many_rows = replace(target, num_tokens=13)
    too_many_reqs = replace(target, num_reqs=5)
    return {
        "num_speculative_steps": good | {"num_speculative_steps": 3},
        "num_rejected": good | {"num_rejected": rejected[:1]},
        "next_tokens": good | {"next_tokens": tokens[:1]},
        "target.page_size": good | {"target": other_pages},
        "target.num_tokens": good | {"target": too_many_rows},
        "target.num_reqs": good | {"target": too_many_reqs},
        "target.hidden": good | {"target": short_hidden},
    }


@pytest.mark.parametrize("argument", sorted(_bad_rounds()))
def test_bad_round_is_refused_before_anything_runs(argument):
    # sgl-project/sglang#33197: sizes that differ are named, never broadcast
    config = toy_config(2)
    draft = toy_draft(config)
    speculator = MTPSpeculator(draft, config)
    with pytest.raises(ValueError, match=argument.replace(".", r"\.")):
        speculator.propose(**_bad_rounds()[argument])
    assert draft.forwards == 0
    assert speculator.stats.rounds == 0
