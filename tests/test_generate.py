"""`generate` against plain decoding by a plain-Python model."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from counting import AGREEMENT, counts_examples, tallies
from lightning_indexer.speculator.autoregressive import AutoRegressiveSpeculator
from lightning_indexer.speculator.batch import StepBatch
from lightning_indexer.speculator.generate import generate
from lightning_indexer.speculator.mtp import MTPSpeculator
from lightning_indexer.speculator.recorded import RecordedRunner
from toy import (
    VOCAB,
    ToyTarget,
    num_slots,
    plain_decoding,
    toy_block_table,
    toy_config,
    toy_draft,
)


@dataclass(frozen=True)
class Case:
    steps: int
    prompt_lens: tuple[int, ...]
    new_tokens: int
    padded: bool
    recorded: bool
    hooks: bool
    tight_budget: bool  # prompts come in small chunks
    tight_length: bool  # the longest request ends at max_model_len
    seed: int

    def prompts(self) -> list[list[int]]:
        rng = random.Random(self.seed)
        return [[rng.randrange(VOCAB) for _ in range(n)] for n in self.prompt_lens]


cases = st.builds(
    Case,
    steps=st.sampled_from([0, 1, 3]),
    prompt_lens=st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple),
    new_tokens=st.integers(1, 6),
    padded=st.booleans(),
    recorded=st.booleans(),
    hooks=st.booleans(),
    tight_budget=st.booleans(),
    tight_length=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)


def _assert_pages(_: int, batch: StepBatch) -> None:
    """Every row that sees keys has a page to write to: drafts have been allotted theirs."""
    assert torch.equal(batch.slot_mapping >= 0, batch.seq_lens > 0)


def _setup(case: Case):
    longest = max(case.prompt_lens) + case.new_tokens
    max_model_len = longest if case.tight_length else 28
    config = toy_config(
        case.steps, padded=case.padded, max_model_len=max_model_len, max_num_tokens=27,
        prefill_sizes=(3, 8, 27) if case.padded else (),
    )  # fmt: skip
    kind = MTPSpeculator if case.hooks else AutoRegressiveSpeculator
    runner = RecordedRunner() if case.recorded else None
    speculator = kind(toy_draft(config), config, runner=runner, observer=_assert_pages)
    if case.recorded:
        speculator.capture()
    return speculator, ToyTarget(num_slots(config)), toy_block_table(config)


@given(cases)
@counts_examples("generate")
@tallies(AGREEMENT, "generate")
def test_tokens_equal_plain_decoding(case: Case):
    speculator, target, table = _setup(case)
    budget = len(case.prompt_lens) * (case.steps + 1) if case.tight_budget else 27
    free, heard = table.num_free_pages, [[] for _ in case.prompt_lens]
    result = generate(
        target,
        case.prompts(),
        case.new_tokens,
        block_table=table,
        speculator=speculator,
        max_num_batched_tokens=budget,
        on_tokens=lambda request, tokens: heard[request].extend(tokens),
    )
    assert result.tokens == [plain_decoding(p, case.new_tokens) for p in case.prompts()]
    assert heard == result.tokens
    assert table.num_free_pages == free
    assert (table.table == -1).all()
    assert sum(result.drafted_by_position) == result.drafted
    assert sum(result.accepted_by_position) == result.accepted <= result.drafted
    # no row is run twice, and no draft in mid-prompt
    assert target.rows == sum(case.prompt_lens) + result.rounds + result.drafted
    assert result.rounds <= len(case.prompt_lens) * (case.new_tokens - 1)
    first_tokens = len(case.prompt_lens)
    emitted = first_tokens * case.new_tokens
    assert first_tokens + result.rounds + result.accepted >= emitted
    if not (case.tight_budget or case.tight_length) and case.steps > 0:
        drafted_rows = result.rounds * (case.steps - 1)  # every verified draft was made once
        assert speculator.stats.rows_reused == (drafted_rows if case.hooks else 0)
        assert result.drafted == result.rounds * case.steps


def test_plain_decoding_without_a_speculator():
    config = toy_config(0)
    prompts = [[0, 1, 2], [2], [1, 1]]
    result = generate(ToyTarget(num_slots(config)), prompts, 6, block_table=toy_block_table(config))
    assert result.tokens == [plain_decoding(p, 6) for p in prompts]
    assert result.rounds == 3 * 5
    assert result.drafted == result.accepted == 0
    assert result.acceptance_by_position() == []


def test_acceptance_by_position_is_a_share():
    case = Case(3, (2, 5, 3), 8, False, False, True, False, False, seed=1)
    speculator, target, table = _setup(case)
    result = generate(target, case.prompts(), 8, block_table=table, speculator=speculator)
    assert result.accepted > 0
    shares = result.acceptance_by_position()
    assert len(shares) == 3
    assert all(0 <= share <= 1 for share in shares)
    assert shares == sorted(shares, reverse=True)  # a draft counts only after those before it


def test_no_prompt_generates_nothing():
    config = toy_config(2)
    result = generate(ToyTarget(num_slots(config)), [], 4, block_table=toy_block_table(config))
    assert result.tokens == []


def test_pages_are_released_after_a_failure():
    config = toy_config(3)
    table = toy_block_table(config)
    free = table.num_free_pages
    speculator = MTPSpeculator(toy_draft(config, fail_at=5), config)
    with pytest.raises(RuntimeError, match="the draft broke"):
        generate(
            ToyTarget(num_slots(config)), [[1, 2], [0]], 8, block_table=table,
            speculator=speculator, max_num_batched_tokens=12,
        )  # fmt: skip
    assert table.num_free_pages == free
    assert not speculator.model.skip_topk


@pytest.mark.parametrize(
    ("prompts", "new_tokens", "budget", "message"),
    [
        ([[1], []], 4, 12, r"prompts\[1\] must have 1 to 20 tokens"),
        ([[0] * 21], 4, 12, r"prompts\[0\] must have 1 to 20 tokens .* got 21"),
        ([[1]] * 5, 4, 20, "prompts must be at most 4"),
        ([[1], [2]], 4, 5, "max_num_batched_tokens must be at least 6"),
        ([[1]], 0, 12, "max_new_tokens must be at least 1"),
    ],
)
def test_request_that_cannot_be_served_is_refused(prompts, new_tokens, budget, message):
    config = toy_config(2)
    table = toy_block_table(config)
    free = table.num_free_pages
    with pytest.raises(ValueError, match=message):
        generate(
            ToyTarget(num_slots(config)), prompts, new_tokens, block_table=table,
            speculator=MTPSpeculator(toy_draft(config), config), max_num_batched_tokens=budget,
        )  # fmt: skip
    assert table.num_free_pages == free
