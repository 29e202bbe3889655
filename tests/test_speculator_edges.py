"""Edges of a round: one token, a full batch, dummies, padding, slot 0, the least limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from lightning_indexer.indexer.block_table import BlockTable
from lightning_indexer.speculator.batch import DraftBatches, target_batch
from lightning_indexer.speculator.config import SpeculatorConfig
from lightning_indexer.speculator.draft_sampler import DraftSampler
from lightning_indexer.speculator.generate import GenerationResult
from lightning_indexer.speculator.mtp import MTPSpeculator
from lightning_indexer.speculator.recorded import RecordedRunner
from lightning_indexer.speculator.runner import CapturingRunner
from lightning_indexer.speculator.sampling import SamplingParams
from lightning_indexer.speculator.schedule import Request, row_budget, schedule
from lightning_indexer.speculator.stats import SpeculatorStats
from lightning_indexer.speculator.step_batch import RequestRows, StepBatch
from toy import (
    VOCAB,
    DraftOracle,
    SharingDraft,
    simple_drafts,
    simple_round,
    target_rows,
    toy_block_table,
    toy_config,
    toy_draft,
)

pytestmark = pytest.mark.once
SHARES = {"index_share_for_mtp_iteration": True}


class WatchedDraft(SharingDraft):
    """Keeps what every forward was given."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.batches: list[StepBatch] = []  # views that later ones overwrite, but for slots
        self.gradients: list[bool] = []

    def forward(self, batch: StepBatch) -> Any:
        self.batches.append(replace(batch, slot_mapping=batch.slot_mapping.clone()))
        self.gradients.append(torch.is_grad_enabled())
        return super().forward(batch)


def _speculator(config: SpeculatorConfig, *, runner: Any = None, **options: Any) -> MTPSpeculator:
    columns = {"append_columns": config.num_speculative_steps}
    columns = columns if options.get("append_new_positions") else {}
    draft = toy_draft(config, WatchedDraft, **columns)
    return MTPSpeculator(draft, config, draft_config=SHARES, runner=runner, **options)


# Rounds.


@pytest.mark.parametrize("steps", [1, 3])
def test_a_round_over_a_single_token_drafts(steps):
    speculator = _speculator(toy_config(steps))
    table = toy_block_table(speculator.config)
    drafts = speculator.propose(*simple_round(table, [1]))
    assert torch.equal(drafts, simple_drafts(table, [1], steps, shares=True))
    assert speculator.stats.rounds == 1


def test_forwards_run_without_gradients():
    speculator = _speculator(toy_config(3, padded=True), runner=RecordedRunner())
    assert torch.is_grad_enabled()
    speculator.capture()
    captured = len(speculator.model.gradients)
    plain = _speculator(toy_config(3))
    plain.propose(*simple_round(toy_block_table(plain.config), [2, 1]))
    assert captured > 0 and len(plain.model.gradients) == 3
    assert not any(speculator.model.gradients + plain.model.gradients)


@pytest.mark.parametrize(("rows", "padded"), [(1, 3), (3, 3), (4, 8), (8, 8), (9, 12), (12, 12)])
def test_step_0_is_padded_to_the_smallest_size_that_holds_it(rows, padded):
    speculator = _speculator(toy_config(1, padded=True))
    lengths = [rows - 2, 1, 1] if rows > 2 else [rows]
    speculator.propose(*simple_round(toy_block_table(speculator.config), lengths))
    assert speculator.model.batches[0].num_tokens_padded == padded


@pytest.mark.parametrize(("reqs", "padded"), [(1, 1), (2, 2), (3, 4), (4, 4)])
def test_later_steps_are_padded_to_the_smallest_size_that_holds_them(reqs, padded):
    speculator = _speculator(toy_config(2, padded=True))
    speculator.propose(*simple_round(toy_block_table(speculator.config), [1] * reqs))
    assert speculator.model.batches[1].num_tokens_padded == padded


def test_a_captured_round_of_a_fused_length_runs_no_python_of_the_draft():
    speculator = _speculator(
        toy_config(3, padded=True, fused_steps=(2, 3)), runner=RecordedRunner()
    )
    speculator.capture()
    for steps in (2, 3):
        before, table = speculator.model.forwards, toy_block_table(speculator.config)
        drafts = speculator.propose(*simple_round(table, [2, 1]), num_speculative_steps=steps)
        assert torch.equal(drafts[:, :steps], simple_drafts(table, [2, 1], steps, shares=True))
        assert speculator.model.forwards == before


def test_a_capture_that_fails_between_its_steps_leaves_no_graph():
    speculator = _speculator(toy_config(3, padded=True), runner=RecordedRunner())
    right = speculator.model.compact_topk_indices

    def breaks(rows: torch.Tensor) -> None:
        raise RuntimeError("compaction broke")

    speculator.model.compact_topk_indices = breaks
    with pytest.raises(RuntimeError, match="compaction broke"):
        speculator.capture()
    speculator.model.compact_topk_indices = right
    before, table = speculator.model.forwards, toy_block_table(speculator.config)
    drafts = speculator.propose(*simple_round(table, [2, 1]))
    assert torch.equal(drafts, simple_drafts(table, [2, 1], 3, shares=True))
    assert speculator.model.forwards == before + 3  # all of them in Python


def test_graphs_that_are_forgotten_let_go_of_their_work():
    class Counted:
        resets = 0

        def replay(self) -> None: ...

        def reset(self) -> None:
            self.resets += 1

    class Runner(CapturingRunner):
        def _record(self, step: Any) -> Counted:
            recordings.append(Counted())
            return recordings[-1]

    for forget in (lambda runner: runner.watch(()), lambda runner: runner.end_capture(failed=True)):
        recordings: list[Counted] = []
        runner = Runner()
        for key in ("a", "b", "a"):
            runner.capture(key, lambda: None, state=(), num_rows=1)
        assert [r.resets for r in recordings] == [1, 0, 0]
        runner.end_capture()
        assert [r.resets for r in recordings] == [1, 0, 0]
        forget(runner)
        assert [r.resets for r in recordings] == [1, 1, 1]


def test_a_position_in_slot_0_is_appended_like_any_other():
    # Pages come back in the order of release, so that a later one can be page 0.
    speculator = _speculator(toy_config(3), append_new_positions=True)
    table = toy_block_table(speculator.config)
    table.table[0] = torch.tensor([3, 0, 1, 2, 4, 5], dtype=torch.int32)
    tokens = [i % VOCAB for i in range(4)]
    batch = target_rows(table, [RequestRows(0, 0, tokens)])
    zero = torch.zeros(1, dtype=torch.int64)
    drafts = speculator.propose(batch, zero, zero + 1)
    assert speculator.model.batches[1].slot_mapping.tolist() == [0]
    oracle = DraftOracle(table.table[0].tolist(), 4, 24, True, append_columns=3)
    assert drafts.tolist() == [oracle.propose(0, tokens, 0, 1, 3)]
    assert speculator.model.buffer.indices[0].tolist() == oracle.rows[-1]


# Batches.


def _batches(most: int = 8, reqs: int = 4) -> DraftBatches:
    return DraftBatches(
        max_num_reqs=reqs,
        max_num_tokens=most,
        max_model_len=16,
        page_size=4,
        hidden_size=3,
        dtype=torch.float32,
        device=None,
    )


def _rows(counts: Sequence[int], start: int = 2) -> StepBatch:
    table = BlockTable(4, 16, num_pages=16, page_size=4)
    for request in range(4):
        table.allocate(request, 16)
    rows = [RequestRows(r, start, [10 * r + i + 1 for i in range(n)]) for r, n in enumerate(counts)]
    return target_rows(table, rows)


def test_a_target_batch_carries_no_hidden_states_yet():
    table = torch.zeros(1, 1, dtype=torch.int32)
    assert target_batch([RequestRows(0, 0, [1, 2])], table, 4).hidden.shape == (2, 0)


@pytest.mark.parametrize("rejected", [3, 4, -1])
def test_a_request_that_keeps_none_of_its_rows_is_a_dummy(rejected):
    batches = _batches()
    batch = batches.prefill(
        _rows([2, 3, 3]),
        torch.tensor([0, 0, rejected]),
        torch.tensor([7, 8, 9]),
        num_tokens_padded=8,
        num_reqs_padded=3,
    )
    assert batches.last_token_indices.tolist() == [1, 4, 0, 0]
    assert batch.input_ids.tolist() == [2, 7, 12, 13, 8, 22, 23, 0]  # no 9
    assert batches.drafted(0).tolist() == [True, True, False, False]
    later = batches.decode(1, torch.ones(3), torch.zeros(3, 3), num_reqs=3, num_reqs_padded=4)
    assert later.seq_lens.tolist() == [5, 6, 0, 0]
    assert later.slot_mapping[2:].tolist() == [-1, -1]


def test_what_pads_a_target_batch_is_not_read():
    whole = _rows([2, 3])
    padded = replace(
        whole,
        query_start_loc=torch.cat([whole.query_start_loc, torch.tensor([99, 77])]).int(),
        seq_lens=torch.cat([whole.seq_lens, torch.tensor([55, 44])]).int(),
    )
    arguments = {"num_rejected": torch.tensor([1, 0]), "next_tokens": torch.tensor([7, 8])}
    sizes = {"num_tokens_padded": 8, "num_reqs_padded": 4}
    batches = _batches()
    batch = batches.prefill(padded, **arguments, **sizes)
    assert batch.query_start_loc.tolist() == [0, 2, 5, 5, 5]
    assert batch.seq_lens.tolist() == [4, 5, 0, 0]
    assert batch.positions.tolist() == [2, 3, 2, 3, 4, 0, 0, 0]
    assert batch.slot_mapping.tolist()[5:] == [-1] * 3
    assert batches.last_positions.tolist() == [2, 4, 0, 0]
    assert batches.drafted(0).tolist() == [True, True, False, False]
    # As a graph of 4 requests does, which does not know how many of them are live
    later = batches.decode(1, torch.ones(4), torch.zeros(4, 3), num_reqs=4, num_reqs_padded=4)
    assert later.seq_lens.tolist() == [4, 6, 0, 0]


def test_as_many_requests_as_rows_fit():
    batches = _batches(most=4)
    zeros = torch.zeros(4, dtype=torch.int64)
    sizes = {"num_reqs_padded": 4}
    batches.prefill(_rows([1] * 4), zeros, zeros, num_tokens_padded=4, **sizes)
    later = batches.decode(1, zeros, torch.zeros(4, 3), num_reqs=4, **sizes)
    assert later.query_start_loc.tolist() == [0, 1, 2, 3, 4]
    assert later.positions.tolist() == [3] * 4
    assert batches.dummy(4, 4).query_start_loc.tolist() == [0, 1, 2, 3, 4]


def test_a_row_sees_nothing_where_its_request_has_no_tokens():
    batch = _rows([2, 3])
    assert batch.max_context_len == 16
    assert batch.context_lens().tolist() == [3, 4, 3, 4, 5]
    none = replace(batch, seq_lens=torch.tensor([0, 5], dtype=torch.int32))
    assert none.context_lens().tolist() == [0, 0, 3, 4, 5]


# Limits, budgets and counters.

LIMITS: dict[str, Any] = {
    "num_speculative_steps": 0,
    "max_num_reqs": 1,
    "max_num_tokens": 1,
    "max_model_len": 1,
    "hidden_size": 1,
    "page_size": 1,
    "vocab_size": 1,
    "prefill_sizes": (1,),
    "decode_sizes": (1,),
}
POSITIVE = sorted(name for name, value in LIMITS.items() if value == 1)


def test_the_least_limits_are_taken():
    config = SpeculatorConfig(**LIMITS)
    table = BlockTable(1, 1, num_pages=1, page_size=1)
    assert row_budget(None, 1, table, config) == row_budget(1, 1, table, config) == 1


@pytest.mark.parametrize("name", POSITIVE)
def test_limits_below_1_are_refused(name):
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        SpeculatorConfig(**(LIMITS | {name: 0}))


@pytest.mark.parametrize(
    ("name", "reqs", "length", "asked"),
    [("max_num_reqs", 2, 1, 1), ("max_model_len", 1, 2, 1), ("max_num_tokens", 1, 1, 2)],
)
def test_a_speculator_that_is_too_small_is_refused(name, reqs, length, asked):
    table = BlockTable(2, length, num_pages=4, page_size=1)
    with pytest.raises(ValueError, match=f"^speculator's {name} must be at least 2, got 1$"):
        row_budget(asked, reqs, table, SpeculatorConfig(**LIMITS))


@pytest.mark.parametrize("budget", [8, 9, 12, 40])
def test_prompts_get_what_the_drafts_leave_of_the_budget(budget):
    drafting = Request(0, [1] * 6, 4, 9, computed=5, drafts=[1, 2, 3])
    prompts = [Request(i, [1] * 7, 7, 9) for i in (1, 2)]
    rows = [entry.num_rows for entry in schedule([drafting, *prompts], budget)]
    assert rows[0] == 4
    assert sum(rows) == min(budget, 4 + 7 + 7)


def test_counters_start_at_0_and_tell_reused_from_computed_rows():
    stats = SpeculatorStats()
    assert not any(vars(stats).values())
    stats.count_forward(3, reused=True)
    stats.count_forward(4, reused=False)
    assert stats == SpeculatorStats(forwards=2, rows_computed=4, rows_reused=3)


def test_acceptance_is_0_where_nothing_was_drafted():
    result = GenerationResult([], drafted_by_position=[4, 0], accepted_by_position=[3, 0])
    assert result.acceptance_by_position() == [0.75, 0.0]


def test_graphs_hold_the_tensors_of_drawing_only_in_rounds_that_draw():
    sampler = DraftSampler(toy_config(2, vocab_size=VOCAB))
    sampler.begin(SamplingParams.of([1]))
    assert any(t is sampler.draft_probs for t in sampler.tensors())
    assert len(sampler.tensors()) == 5
    sampler.begin(None)
    assert sampler.tensors() == ()
    assert DraftSampler(toy_config(2)).tensors() == ()
