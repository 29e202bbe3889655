"""Edges of generation: what the target is given, how drafts are judged and drawn, and proofs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from lightning_indexer.indexer.buffer import SelectionKind
from lightning_indexer.speculator.autoregressive import AutoRegressiveSpeculator
from lightning_indexer.speculator.check import IndexSharingError, check_index_sharing
from lightning_indexer.speculator.generate import generate
from lightning_indexer.speculator.mtp import MTPSpeculator
from lightning_indexer.speculator.overlap import OverlapProbe
from lightning_indexer.speculator.rejection import rejection_sample
from lightning_indexer.speculator.sampling import (
    MAX_VOCAB,
    Purpose,
    SamplingParams,
    draw_tokens,
    token_probabilities,
    uniform_at,
)
from lightning_indexer.speculator.step_batch import StepBatch
from lightning_indexer.tinylm.config import MINIATURE
from lightning_indexer.tinylm.model import random_model
from lightning_indexer.tinylm.runtime import TinyDraft, build
from toy import (
    VOCAB,
    WIDTH,
    SharingDraft,
    ToyTarget,
    num_slots,
    plain_decoding,
    simple_round,
    toy_block_table,
    toy_config,
    toy_draft,
)

pytestmark = pytest.mark.once
SHARES = {"index_share_for_mtp_iteration": True}

# Generation.


class WatchedTarget(ToyTarget):
    """Keeps the page, position and slot of every row, and whether gradients were on."""

    def __init__(self, slots: int) -> None:
        super().__init__(slots)
        self.seen: list[tuple[int, int, int]] = []
        self.gradients: list[bool] = []

    def forward(self, batch: StepBatch) -> torch.Tensor:
        first_page = batch.block_table[batch.row_to_request.long(), 0]
        columns = (first_page, batch.positions, batch.slot_mapping)
        self.seen += zip(*(column.tolist() for column in columns), strict=True)
        self.gradients.append(torch.is_grad_enabled())
        return super().forward(batch)


def test_no_row_lies_past_the_end_and_no_prompt_token_runs_twice():
    config = toy_config(3)
    target, prompts = WatchedTarget(num_slots(config)), [[1] * 11, [2, 0] * 9 + [1], [0, 2, 1]]
    result = generate(
        target,
        prompts,
        5,  # which ends the second one at max_model_len
        block_table=toy_block_table(config),
        speculator=MTPSpeculator(toy_draft(config), config, draft_config=SHARES),
    )
    assert result.tokens == [plain_decoding(prompt, 5) for prompt in prompts]
    assert all(position < 24 and slot >= 0 for _, position, slot in target.seen)
    assert not any(target.gradients)
    # Each round has a row for the last known token; the first round's is the prompt's last
    prompt_rows = sum(len(prompt) for prompt in prompts)
    assert len(target.seen) == prompt_rows + result.rounds + result.drafted


class HalfRight(AutoRegressiveSpeculator):
    """Drafts of each round the first `right` tokens of what is to come; hears what was rejected."""

    def __init__(self, text: Sequence[int], right: int, steps: int) -> None:
        config = toy_config(steps)
        super().__init__(toy_draft(config), config)
        self.text, self.right = text, right
        self.calls: list[tuple[int, int, int]] = []

    def propose(self, target: StepBatch, num_rejected: Any, next_tokens: Any, **options: Any):
        kept = target.positions[: target.num_tokens - int(num_rejected)]
        known = int(kept[-1]) + 2  # the next token included
        self.calls.append((int(num_rejected), known, int(next_tokens)))
        ahead = self.text[known : known + self.config.num_speculative_steps]
        drafts = [t if j < self.right else (t + 1) % VOCAB for j, t in enumerate(ahead)]
        return torch.tensor([drafts])


@pytest.mark.parametrize("right", [0, 1, 2, 3])
def test_the_draft_hears_how_many_rows_were_rejected(right):
    prompt = [1, 2, 0]
    text = prompt + plain_decoding(prompt, 20)
    speculator = HalfRight(text, right, 3)
    target, table = ToyTarget(num_slots(speculator.config)), toy_block_table(speculator.config)
    result = generate(target, [prompt], 9, block_table=table, speculator=speculator)
    assert result.tokens == [text[3:12]]
    known = range(4, 12, right + 1)  # each round adds the drafts that stand and one more
    rejected = [0, *[3 - right] * (len(known) - 1)]
    following = [text[at - 1] for at in known]
    assert speculator.calls == list(zip(rejected, known, following, strict=True))


def test_one_request_of_a_speculator_of_one_can_sample():
    config = toy_config(2, max_num_reqs=1, vocab_size=VOCAB)
    speculator = MTPSpeculator(toy_draft(config), config, draft_config=SHARES)
    made = [
        generate(
            ToyTarget(num_slots(config)),
            [[1, 2]],
            6,
            block_table=toy_block_table(config),
            speculator=speculator,
            sampling=SamplingParams.of([5]),
        )
        for _ in range(2)
    ]
    assert made[0].tokens == made[1].tokens and len(made[0].tokens[0]) == 6


# Acceptance and draws.


def test_each_draft_is_judged_by_the_number_of_its_own_place():
    seeds, drafts = 50, 5
    accepted, _ = rejection_sample(
        torch.zeros(seeds, drafts + 1, 2),  # p is 1/2 everywhere
        torch.zeros(seeds, drafts, dtype=torch.int64),
        None,
        SamplingParams.of(range(seeds)),
        torch.full((seeds,), 70),
    )
    for seed, count in enumerate(accepted.tolist()):
        places = torch.arange(70, 70 + drafts)
        stands = (uniform_at(torch.tensor([seed]), places, Purpose.ACCEPT) < 0.5).tolist()
        assert count == ([*stands, False]).index(False)


def test_a_rejected_draft_that_leaves_no_rest_is_followed_by_what_the_target_says():
    # Token 1 has the chance 2^-60 in q and none in p: q − p is above 0 nowhere, and Σ q is 1
    accepted, following = rejection_sample(
        torch.tensor([[[90.0, 0.0], [0.0, 90.0]]]),
        torch.tensor([[1]]),
        torch.tensor([[[1.0, 2.0**-60]]], dtype=torch.float64),
        SamplingParams.of([3]),
        torch.tensor([4]),
    )
    assert (accepted.tolist(), following.tolist()) == ([0], [0])


def test_a_draw_is_the_first_token_whose_running_sum_exceeds_the_number():
    probs = torch.tensor([[0.5, 0.5], [0.0, 1.0], [0.25, 0.75]], dtype=torch.float64)
    uniform = torch.tensor([0.5, 2.0**-70, 0.25 - 2.0**-50], dtype=torch.float64)
    assert draw_tokens(probs, uniform).tolist() == [1, 1, 0]


def test_parameters_sample_as_they_are_by_default():
    params = SamplingParams.of([8, 9])
    assert (params.temperature.tolist(), params.top_p.tolist()) == ([1.0, 1.0], [1.0, 1.0])
    assert [int(purpose) for purpose in Purpose] == [0, 1, 2]  # uniform_at's formula has them


def _probabilities(logits: torch.Tensor, top_p: float = 1.0) -> torch.Tensor:
    return token_probabilities(logits[None], SamplingParams.of([0], top_p=top_p))[0]


@pytest.mark.parametrize(("bits", "stays"), [(39.5, True), (40.5, False)])
def test_what_lies_40_bits_below_the_best_is_left_out(bits, stays):
    probs = _probabilities(torch.tensor([0.0, -bits * math.log(2)], dtype=torch.float64))
    assert bool(probs[1] > 0) == stays


def test_weights_are_within_one_of_the_exponential():
    x = -torch.arange(4097, dtype=torch.float64) / 1024
    probs = _probabilities(x)
    weights = (probs / probs[0] * 2.0**40).tolist()
    exact = [2.0**40 * math.exp(value) for value in x.tolist()]
    # 1 for the floor; the series is 2^-47 off, and the division that recovers weights less
    assert all(-1.01 < w - e < 0.01 for w, e in zip(weights, exact, strict=True))


def test_a_share_of_1_keeps_the_least_weight_of_a_sum_that_fp64_rounds():
    logits = torch.zeros(2**14 + 1, dtype=torch.float64)
    logits[7] = -39.5 * math.log(2)  # weighs 1 of 2^54 + 1
    assert _probabilities(logits)[7] > 0
    assert _probabilities(logits, 0.999)[7] == 0


def test_the_widest_vocabulary_is_taken_and_a_wider_one_refused():
    logits = torch.zeros(MAX_VOCAB)
    assert _probabilities(logits)[-1] == 1 / MAX_VOCAB
    with pytest.raises(ValueError, match=rf"1 to {MAX_VOCAB} columns, got {MAX_VOCAB + 1}"):
        _probabilities(torch.zeros(MAX_VOCAB + 1))


# Overlap of selections.


def _tiny(topk: int = 4, page_size: int = 8) -> TinyDraft:
    lm = random_model(0, replace(MINIATURE, index_topk=topk))
    pages = 3 * -(-(topk + 21) // page_size)
    return build(lm, num_pages=pages, max_num_tokens=128, page_size=page_size)[1]


def _sharing(steps: int, draft: Any = None, **options: Any) -> MTPSpeculator:
    config = toy_config(steps)
    return MTPSpeculator(draft or toy_draft(config), config, draft_config=SHARES, **options)


def test_the_mean_of_one_measured_row_is_that_row_s():
    draft = _tiny(page_size=4)
    config = toy_config(3, hidden_size=draft.config.hidden_size)
    probed = MTPSpeculator(draft, config, draft_config=SHARES, measure_overlap_every=1)
    target, rejected, following = simple_round(toy_block_table(config), [2])
    probed.propose(replace(target, hidden=torch.ones(2, config.hidden_size)), rejected, following)
    assert probed.overlap.rows_by_step() == [1, 1]
    assert probed.overlap.by_step() == pytest.approx([2 / 3, 2 / 4])


@pytest.mark.parametrize(("steps", "measured"), [(0, 0), (1, 0), (2, 1), (4, 3)])
def test_a_probe_measures_every_round_and_each_later_step(steps, measured):
    probe = OverlapProbe(_sharing(steps))
    assert probe.every == 1
    assert probe.by_step() == [0.0] * measured
    assert probe.rows_by_step() == [0] * measured


def test_a_probe_needs_buffers_that_it_can_see():
    draft = toy_draft(toy_config(3))
    del draft.topk_buffers
    with pytest.raises(ValueError, match="share_mtp_topk_indices=True and 0 buffers"):
        OverlapProbe(_sharing(3, draft))


def test_a_fresh_selection_holds_no_appended_position():
    class Watched(SharingDraft):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.selecting: list[bool] = []

        def forward(self, batch: StepBatch) -> Any:
            if not self.skip_topk:
                self.selecting.append(bool((self.buffer.indices[:, WIDTH:] >= 0).any()))
            return super().forward(batch)

    draft = toy_draft(toy_config(4), Watched, append_columns=3)
    probed = _sharing(4, draft, append_new_positions=True, measure_overlap_every=1)
    probed.propose(*simple_round(toy_block_table(probed.config), [2, 3]))
    assert draft.selecting == [False] * 4  # step 0 and the shadows of three


# The proof that a draft shares.


def _check(draft: TinyDraft, page_size: int = 8) -> Any:
    sizes = {"hidden_size": draft.config.hidden_size, "index_topk": draft.config.index_topk}
    return check_index_sharing(draft, page_size=page_size, **sizes)


def _wrapped(draft: TinyDraft, change: Callable[[StepBatch, torch.Tensor, bool], Any]) -> TinyDraft:
    """`draft`, whose outputs go through change(batch, output, whether it reuses)."""
    forward = draft.forward
    indexer = draft.layer.self_attn.indexer
    draft.forward = lambda batch: change(batch, forward(batch), indexer.skip_topk)
    return draft


@pytest.mark.parametrize(("topk", "page_size"), [(4, 1), (4, 7), (2, 8), (4, 64)])
def test_a_right_model_passes_with_any_pages_and_few_keys(topk, page_size):
    report = _check(_tiny(topk, page_size), page_size)
    assert report.rows_checked == 3 * topk + 7 + 19 + 11


def test_the_proof_runs_whole_prompts_and_the_step_after_them():
    runs = []

    def watch(batch: StepBatch, output: torch.Tensor, reuses: bool) -> torch.Tensor:
        rows = draft.topk_buffers[0].indices[: batch.num_reqs].clone()
        runs.append((batch.positions.tolist(), rows, torch.is_grad_enabled()))
        return output

    draft = _wrapped(_tiny(), watch)
    _check(draft)
    (prompts, _, _), (step, plain, _), *probes = runs
    assert prompts == [*range(11), *range(23), *range(15)]
    assert step == [11, 23, 15]
    # Each of the others takes all keys but the first from one request
    for request, (positions, rows, _) in enumerate(probes):
        expected = plain.clone()
        expected[request, 1:] = -1
        assert positions == step
        assert torch.equal(rows, expected)
    assert len(probes) == 3
    assert not any(gradients for *_, gradients in runs)


def test_a_selection_from_an_earlier_run_does_not_pass_for_one():
    draft = _tiny()
    _check(draft)
    kept = draft.topk_buffers[0].indices

    rows = 3 * 4 + 7 + 19 + 11
    kept[:rows] = 0  # which every row can see
    forward = draft.forward

    def selects_nothing(batch: StepBatch) -> torch.Tensor:
        before = kept.clone()
        output = forward(batch)
        kept.copy_(before)
        return output

    draft.forward = selects_nothing
    with pytest.raises(IndexSharingError, match="selects nothing for some row of buffer 0"):
        _check(draft)


def test_a_row_that_selects_the_position_after_its_own_is_caught():
    def one_further(batch: StepBatch, output: torch.Tensor, reuses: bool) -> torch.Tensor:
        if not reuses:
            draft.topk_buffers[0].indices[0, 0] = 1  # row 0 sees position 0 alone
        return output

    draft = _wrapped(_tiny(), one_further)
    with pytest.raises(IndexSharingError, match="a position that it cannot see"):
        _check(draft)


def test_a_row_that_reaches_one_other_request_is_caught():
    def leaks(batch: StepBatch, output: torch.Tensor, reuses: bool) -> torch.Tensor:
        if reuses:
            output = output.clone()
            output[1] += output[0]
        return output

    with pytest.raises(IndexSharingError, match="row 0 of buffer 0 reaches other requests"):
        _check(_wrapped(_tiny(), leaks))


def test_the_proof_has_pages_of_64_tokens_by_default():
    def watch(batch: StepBatch, output: torch.Tensor, reuses: bool) -> torch.Tensor:
        sizes.add(batch.page_size)
        return output

    sizes: set[int] = set()
    draft = _wrapped(_tiny(page_size=64), watch)
    hidden_size, index_topk = draft.config.hidden_size, draft.config.index_topk
    check_index_sharing(draft, hidden_size=hidden_size, index_topk=index_topk)
    assert sizes == {64}


def test_the_states_for_logits_are_what_is_looked_at():
    _check(_wrapped(_tiny(), lambda batch, output, reuses: (output, torch.zeros_like(output))))


def test_the_proof_leaves_tracked_buffers_without_a_selection():
    draft = _tiny()
    (buffer,) = draft.topk_buffers
    buffer.track()
    buffer.new_generation()
    buffer.mark_written(3)
    _check(draft)
    assert buffer.state.kind is SelectionKind.EMPTY
