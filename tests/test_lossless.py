"""Speculative sampling emits what plain sampling does, in distribution; wrong rules do not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from chi_square import FALSE_ALARM, counts_of, p_value
from lightning_indexer.speculator.rejection import rejection_sample
from lightning_indexer.speculator.sampling import (
    Purpose,
    SamplingParams,
    draw_tokens,
    token_probabilities,
    uniform_at,
)

pytestmark = pytest.mark.once

VOCAB, TOKENS = 4, 3
SAMPLES = 20_000
# logits of the token after each token: the target's, and a draft's that is often wrong
TARGET = torch.tensor(
    [[0.0, 0.7, -0.5, 0.2], [1.0, 0.0, 0.3, -0.4], [-0.2, 0.4, 0.0, 0.9], [0.5, 0.5, -0.3, 0.1]]
)
DRAFT = torch.tensor(
    [[0.9, -0.6, 0.4, 0.0], [0.0, 0.8, 0.3, -0.7], [1.1, 0.4, -0.2, 0.0], [-0.5, 0.5, 0.6, 0.0]]
)

Rule = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def emitted(
    drafts: int,
    params: SamplingParams,
    *,
    rule: Rule = rejection_sample,
    draft_purpose: Purpose = Purpose.DRAFT,
    greedy_drafts: bool = False,
) -> torch.Tensor:
    """[SAMPLES, TOKENS]: the first tokens after token 0, in as many rounds as they take."""
    tokens = torch.zeros(SAMPLES, TOKENS + drafts + 1, dtype=torch.int64)
    known = torch.zeros(SAMPLES, dtype=torch.int64)
    last = torch.zeros(SAMPLES, dtype=torch.int64)
    while int(known.min()) < TOKENS:
        chain, q = [last], []
        for j in range(drafts):
            probs = token_probabilities(DRAFT[chain[-1]], params)
            u = uniform_at(params.seed, known + j, draft_purpose)
            chain.append(DRAFT[chain[-1]].argmax(1) if greedy_drafts else draw_tokens(probs, u))
            q.append(probs)
        drafted = torch.stack(chain, dim=1)
        accepted, last = rule(
            TARGET[drafted],
            drafted[:, 1:],
            None if greedy_drafts or not drafts else torch.stack(q, dim=1),
            params,
            known,
        )
        live = known < TOKENS
        for j in range(drafts + 1):
            token = torch.where(accepted == j, last, drafted[:, (j + 1) % (drafts + 1)])
            place = (known + j).clamp_max(TOKENS + drafts).unsqueeze(1)
            written = (live & (j <= accepted)).unsqueeze(1)
            old = tokens.gather(1, place)
            tokens.scatter_(1, place, torch.where(written, token.unsqueeze(1), old))
        known = torch.where(live, known + accepted + 1, known)
    return tokens[:, :TOKENS]


def law(params: SamplingParams) -> torch.Tensor:
    """Chances of the VOCAB^TOKENS continuations of token 0 under plain sampling."""
    table = token_probabilities(TARGET, params.rows(slice(VOCAB)))
    return torch.einsum("a,ab,bc->abc", table[0], table, table).flatten()


def agreement(tokens: torch.Tensor, params: SamplingParams) -> float:
    """The p-value of the continuations under the law of plain sampling."""
    chances = law(params)
    counts = counts_of((tokens[:, 0] * VOCAB + tokens[:, 1]) * VOCAB + tokens[:, 2], VOCAB**TOKENS)
    assert (counts[chances == 0] == 0).all()
    return p_value(counts[chances > 0], chances[chances > 0])


def _params(temperature: float = 1.0, top_p: float = 1.0, first: int = 0) -> SamplingParams:
    seeds = range(first, first + SAMPLES)
    return SamplingParams.of(seeds, temperature=temperature, top_p=top_p)


@pytest.mark.parametrize("drafts", [0, 1, 2, 4])
@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.6, 1.0), (1.5, 0.7)])
def test_continuations_follow_the_law_of_plain_sampling(drafts, temperature, top_p):
    params = _params(temperature, top_p)
    assert agreement(emitted(drafts, params), params) > FALSE_ALARM


@pytest.mark.parametrize("drafts", [1, 3])
def test_drafts_chosen_without_chance_are_lossless_too(drafts):
    params = _params()
    assert agreement(emitted(drafts, params, greedy_drafts=True), params) > FALSE_ALARM


def _accepts_by_p_alone(logits, drafts, q, params, positions):
    """u < p in place of u · q < p."""
    return rejection_sample(logits, drafts, torch.ones_like(q), params, positions)


def _replaces_from_p(logits, drafts, q, params, positions):
    """After a rejection draws from p in place of max(p − q, 0)."""
    accepted, next_tokens = rejection_sample(logits, drafts, q, params, positions)
    p = token_probabilities(logits[torch.arange(len(drafts)), accepted], params)
    u = uniform_at(params.seed, positions + accepted, Purpose.TARGET)
    rejected = accepted < drafts.shape[1]
    return accepted, torch.where(rejected, draw_tokens(p, u), next_tokens)


def _accepts_everything(logits, drafts, q, params, positions):
    _, next_tokens = rejection_sample(logits, drafts, q, params, positions)
    return torch.full_like(positions, drafts.shape[1]), next_tokens


@pytest.mark.parametrize("rule", [_accepts_by_p_alone, _replaces_from_p, _accepts_everything])
def test_wrong_rule_is_noticed(rule):
    params = _params()
    assert agreement(emitted(2, params, rule=rule), params) < FALSE_ALARM


@pytest.mark.parametrize("shared", [Purpose.ACCEPT, Purpose.TARGET])
def test_random_numbers_used_twice_are_noticed(shared):
    params = _params()
    assert agreement(emitted(2, params, draft_purpose=shared), params) < FALSE_ALARM


def test_continuations_come_again_from_their_seeds_and_not_from_others():
    first = emitted(2, _params())
    assert torch.equal(emitted(2, _params()), first)
    assert not torch.equal(emitted(2, _params(first=SAMPLES)), first)


def _round(target_logits: torch.Tensor, draft_logits: torch.Tensor, count: int, top_p: float = 1.0):
    """`count` requests with two drafts each, drawn from their own logits, V columns wide."""
    params = SamplingParams.of(range(count), top_p=top_p)
    positions = torch.full((count,), 40)
    q = token_probabilities(draft_logits.expand(count, -1), params)
    drafts = [draw_tokens(q, uniform_at(params.seed, positions + j, Purpose.DRAFT)) for j in (0, 1)]
    logits = target_logits.expand(count, 3, -1)
    q = q.unsqueeze(1).expand(-1, 2, -1)
    return logits, torch.stack(drafts, dim=1), q, params, positions


def test_drafts_of_the_target_itself_are_all_accepted():
    logits = torch.tensor([0.2, -1.0, 0.9, 0.0, 0.3])
    accepted, next_tokens = rejection_sample(*_round(logits, logits, 2000, top_p=0.8))
    assert (accepted == 2).all()
    assert set(next_tokens.tolist()) == {0, 2, 3, 4}  # the bonus token is the target's


def test_drafts_the_target_never_samples_are_all_rejected():
    draft = torch.tensor([0.0, 0.0, -torch.inf, -torch.inf])
    accepted, next_tokens = rejection_sample(*_round(draft.flip(0), draft, 2000))
    assert (accepted == 0).all()
    assert set(next_tokens.tolist()) == {2, 3}


def test_no_rejection_is_replaced_by_a_token_the_draft_favours():
    target, draft = torch.tensor([1.0, 0.0, -1.0, 0.5]), torch.tensor([0.0, 1.0, -1.0, 1.5])
    arguments = _round(target, draft, 4000)
    accepted, next_tokens = rejection_sample(*arguments)
    p = token_probabilities(target[None], SamplingParams.of([0]))[0]
    rejected = accepted < 2
    assert rejected.sum() > 500
    assert (p > arguments[2][0, 0])[next_tokens[rejected]].all()


def test_rejection_that_leaves_no_residual_samples_from_the_target():
    # what rounding can do to equal p and q, here by far: no token has p > q
    logits = torch.tensor([0.0, 1.0, 0.5])
    _, drafts, q, params, positions = _round(logits, logits, 500)
    accepted, next_tokens = rejection_sample(
        logits.expand(500, 3, 3), drafts, torch.ones_like(q), params, positions
    )
    p = token_probabilities(logits.expand(500, 3), params)
    expected = draw_tokens(p, uniform_at(params.seed, positions + accepted, Purpose.TARGET))
    assert (accepted == 0).any()
    assert torch.equal(next_tokens, expected)
