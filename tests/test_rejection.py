"""Rejection sampling against a loop, and its special cases."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from counting import AGREEMENT, BATCHES, counts_examples, tallies
from lightning_indexer.speculator.recorded import RecordedRunner
from lightning_indexer.speculator.rejection import rejection_sample
from lightning_indexer.speculator.sampling import (
    Purpose,
    SamplingParams,
    draw_tokens,
    token_probabilities,
    uniform_at,
)
from lightning_indexer.speculator.verify import verify_greedy

pytestmark = pytest.mark.once


@dataclass(frozen=True)
class Case:
    requests: int
    drafts: int
    vocab: int
    chance: bool  # drafts have been drawn, else draft_probs is None
    prompts: bool
    greedy: bool
    seed: int

    def arguments(self) -> dict:
        generator = torch.Generator().manual_seed(self.seed)
        size = (self.requests, self.drafts + 1, self.vocab)
        one_of = torch.randint(4, (2, self.requests), generator=generator)
        q = torch.rand(size, generator=generator, dtype=torch.float64)[:, :-1]
        q = q * (torch.rand(q.shape, generator=generator) < 0.7)
        q[..., 0] += 0.1
        prompts = torch.randint(-1, 2, (self.requests,), generator=generator)
        temperature = torch.tensor([0.0, 0.5, 1.0, 2.0])[one_of[0]] * (not self.greedy)
        return {
            # few values: greedy ties happen
            "target_logits": torch.randint(-2, 3, size, generator=generator).float(),
            # -1 ends the drafts, and so does an id outside the vocabulary
            "draft_tokens": torch.randint(
                -1, self.vocab + 1, (self.requests, self.drafts), generator=generator
            ),
            "draft_probs": q / q.sum(2, keepdim=True) if self.chance else None,
            "params": SamplingParams(
                temperature,
                torch.tensor([0.4, 0.8, 1.0, 1.0])[one_of[1]],
                torch.randint(-(2**62), 2**62, (self.requests,), generator=generator),
            ),
            "positions": torch.randint(1000, (self.requests,), generator=generator),
            "prompt_tokens": prompts if self.prompts else None,
        }


def rows_of(arguments: dict, rows: torch.Tensor) -> dict:
    return {
        name: value.rows(rows) if isinstance(value, SamplingParams)
        else value[rows] if value is not None else None
        for name, value in arguments.items()
    }  # fmt: skip


cases = st.builds(
    Case,
    requests=st.integers(0, 5),
    drafts=st.integers(0, 4),
    vocab=st.integers(1, 5),
    chance=st.booleans(),
    prompts=st.booleans(),
    greedy=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)


def oracle(
    logits: torch.Tensor,
    drafts: list[int],
    draft_probs: torch.Tensor | None,
    params: SamplingParams,
    position: int,
) -> tuple[int, int]:
    """One request, one token after the other."""
    probs = [token_probabilities(row.unsqueeze(0), params)[0].tolist() for row in logits]

    def uniform(at: int, purpose: Purpose) -> torch.Tensor:
        return uniform_at(params.seed, torch.tensor([position + at]), purpose)

    def next_token(at: int, weights: list[float]) -> int:
        row = torch.tensor([weights], dtype=torch.float64)
        return int(draw_tokens(row, uniform(at, Purpose.TARGET)))

    for at, token in enumerate(drafts):
        p = probs[at]
        if not 0 <= token < len(p):
            return at, next_token(at, p)
        if draft_probs is None:
            q = [float(v == token) for v in range(len(p))]
        else:
            q = draft_probs[at].tolist()
        if not float(uniform(at, Purpose.ACCEPT)) * q[token] < p[token]:
            residual = [max(a - b, 0.0) for a, b in zip(p, q, strict=True)]
            return at, next_token(at, residual if any(residual) else p)
    return len(drafts), next_token(len(drafts), probs[-1])


@given(cases)
@counts_examples("rejection_sample")
@tallies(AGREEMENT, "rejection_sample")
def test_equals_one_request_and_one_token_after_the_other(case: Case):
    arguments = case.arguments()
    accepted, next_tokens = rejection_sample(**arguments)
    assert accepted.shape == next_tokens.shape == (case.requests,)
    for r in range(case.requests):
        prompt = arguments["prompt_tokens"]
        if prompt is not None and prompt[r] >= 0:
            expected = 0, int(prompt[r])
        else:
            expected = oracle(
                arguments["target_logits"][r],
                arguments["draft_tokens"][r].tolist(),
                arguments["draft_probs"][r] if case.chance else None,
                arguments["params"].rows(slice(r, r + 1)),
                int(arguments["positions"][r]),
            )
        assert (int(accepted[r]), int(next_tokens[r])) == expected


@given(cases)
@counts_examples("rejection_sample")
def test_temperature_zero_is_greedy_verification(case: Case):
    arguments = case.arguments()
    arguments["params"].temperature.zero_()
    got = rejection_sample(**arguments)
    target_tokens = arguments["target_logits"].argmax(2)
    drafts, prompts = arguments["draft_tokens"], arguments["prompt_tokens"]
    expected = verify_greedy(target_tokens, drafts, prompt_tokens=prompts)
    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[1], expected[1])


@given(cases)
@counts_examples("rejection_sample")
@tallies(BATCHES, "rejection_sample")
def test_request_alone_equals_itself_in_any_batch(case: Case):
    arguments = case.arguments()
    accepted, next_tokens = rejection_sample(**arguments)
    order = torch.randperm(case.requests, generator=torch.Generator().manual_seed(case.seed))
    shuffled = rejection_sample(**rows_of(arguments, order))
    assert torch.equal(shuffled[0], accepted[order])
    assert torch.equal(shuffled[1], next_tokens[order])
    for r in range(case.requests):
        alone = rejection_sample(**rows_of(arguments, torch.tensor([r])))
        assert [int(x) for x in alone] == [int(accepted[r]), int(next_tokens[r])]


@given(cases, st.integers(0, 4))
@counts_examples("rejection_sample")
def test_rows_after_the_drafts_do_not_matter(case: Case, length: int):
    arguments = case.arguments()
    length = min(length, case.drafts)
    arguments["draft_tokens"][:, length:] = -1
    padded = rejection_sample(**arguments)
    arguments["target_logits"] = arguments["target_logits"][:, : length + 1]
    arguments["draft_tokens"] = arguments["draft_tokens"][:, :length]
    if case.chance:
        arguments["draft_probs"] = arguments["draft_probs"][:, :length]
    cut = rejection_sample(**arguments)
    assert torch.equal(padded[0], cut[0])
    assert torch.equal(padded[1], cut[1])


def test_nothing_drafted_samples_from_the_target():
    logits = torch.tensor([0.5, 0.0, 1.0])
    params, positions = SamplingParams.of(range(50)), torch.arange(50)
    accepted, next_tokens = rejection_sample(
        logits.expand(50, 1, 3), torch.zeros(50, 0, dtype=torch.int64), None, params, positions
    )
    expected = draw_tokens(
        token_probabilities(logits.expand(50, 3), params),
        uniform_at(params.seed, positions, Purpose.TARGET),
    )
    assert (accepted == 0).all()
    assert torch.equal(next_tokens, expected)


@pytest.mark.parametrize("chance", [True, False])
def test_a_graph_can_hold_it(chance):
    now = Case(4, 3, 5, chance, True, False, seed=1).arguments()
    later = Case(4, 3, 5, chance, True, False, seed=2).arguments()
    results: list[torch.Tensor] = []
    runner = RecordedRunner()
    runner.capture("v", lambda: results.extend(rejection_sample(**now)), state=(), num_rows=4)
    for name, value in later.items():
        if isinstance(value, torch.Tensor):
            now[name].copy_(value)
    for name, value in vars(later["params"]).items():
        getattr(now["params"], name).copy_(value)
    runner.run("v", lambda: pytest.fail("not replayed"), state=(), num_rows=4)
    expected = rejection_sample(**later)
    assert torch.equal(results[0], expected[0])
    assert torch.equal(results[1], expected[1])


@pytest.mark.parametrize("argument", ["draft_tokens", "draft_probs", "params", "positions"])
def test_shapes_that_differ_are_refused(argument):
    arguments = Case(3, 2, 4, True, False, False, seed=0).arguments()
    other = Case(2, 1, 4, True, False, False, seed=0).arguments()
    with pytest.raises(ValueError, match=argument):
        rejection_sample(**arguments | {argument: other[argument]})
