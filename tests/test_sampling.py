"""Probabilities and draws: exact oracles, laws, and batch independence."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from chi_square import FALSE_ALARM, counts_of, p_value
from counting import AGREEMENT, BATCHES, counts_examples, tallies
from lightning_indexer.speculator.recorded import RecordedRunner
from lightning_indexer.speculator.sampling import (
    Purpose,
    SamplingParams,
    draw_tokens,
    token_probabilities,
    uniform_at,
)

pytestmark = pytest.mark.once


@dataclass(frozen=True)
class Case:
    rows: int
    vocab: int
    regime: str
    dtype: torch.dtype
    seed: int

    def logits(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        size = (self.rows, self.vocab)
        if self.regime == "ties":
            logits = torch.randint(-2, 3, size, generator=generator).double()
        else:
            logits = torch.randn(size, generator=generator, dtype=torch.float64) * 3
        if self.regime == "masked":
            logits[torch.rand(size, generator=generator) < 0.4] = -math.inf
            logits[:, self.vocab // 2] = 0
        return logits.to(self.dtype)

    def params(self) -> SamplingParams:
        generator = torch.Generator().manual_seed(self.seed + 1)
        return SamplingParams(
            torch.tensor([0.0, 0.3, 1.0, 2.5])[torch.randint(4, (self.rows,), generator=generator)],
            torch.tensor([0.05, 0.5, 0.9, 1.0])[
                torch.randint(4, (self.rows,), generator=generator)
            ],
            torch.randint(-(2**62), 2**62, (self.rows,), generator=generator),
        )


cases = st.builds(
    Case,
    rows=st.integers(1, 6),
    vocab=st.sampled_from([1, 2, 5, 33, 260]),
    regime=st.sampled_from(["normal", "ties", "masked"]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 2**32 - 1),
)


def softmax_oracle(logits: list[float], temperature: float) -> list[float]:
    """In Python floats, with another exponential and exact sums."""
    greatest = max(logits)
    powers = [math.exp((x - greatest) / temperature) for x in logits]
    whole = math.fsum(powers)
    return [power / whole for power in powers]


@given(cases)
@counts_examples("token_probabilities")
@tallies(AGREEMENT, "token_probabilities")
def test_probabilities_equal_softmax_of_the_top_p_set(case: Case):
    logits, params = case.logits(), case.params()
    probs = token_probabilities(logits, params)
    assert probs.dtype == torch.float64
    for row, t, top_p, got in zip(
        logits.double().tolist(), params.temperature.tolist(), params.top_p.tolist(),
        probs.tolist(), strict=True,
    ):  # fmt: skip
        order = sorted(range(case.vocab), key=lambda v: (-row[v], v))
        if t == 0:
            assert [v for v, p in enumerate(got) if p] == [order[0]]
            assert got[order[0]] == 1
            continue
        plain = softmax_oracle(row, t)
        kept = sum(p > 0 for p in got)
        assert all(got[v] > 0 for v in order[:kept])  # a prefix: equals by smaller id first
        share = math.fsum(plain[v] for v in order[:kept])
        if top_p < 1:
            assert share >= top_p - 1e-9
            assert kept == 1 or share - plain[order[kept - 1]] < top_p + 1e-9
        else:
            assert share > 1 - case.vocab * 2.0**-39
        for v in order[:kept]:
            assert abs(got[v] - plain[v] / share) < 1e-9


@given(cases)
@counts_examples("token_probabilities")
@tallies(BATCHES, "token_probabilities")
def test_row_has_the_same_bits_alone_and_in_any_batch(case: Case):
    logits, params = case.logits(), case.params()
    probs = token_probabilities(logits, params)
    order = torch.randperm(case.rows, generator=torch.Generator().manual_seed(case.seed))
    assert torch.equal(token_probabilities(logits[order], params.rows(order)), probs[order])
    strided = logits.t().contiguous().t()
    assert torch.equal(token_probabilities(strided, params), probs)
    u = uniform_at(params.seed, torch.arange(case.rows), Purpose.TARGET)
    tokens = draw_tokens(probs, u)
    for r in range(case.rows):
        alone = slice(r, r + 1)
        assert torch.equal(token_probabilities(logits[alone], params.rows(alone)), probs[alone])
        assert torch.equal(draw_tokens(probs[alone], u[alone]), tokens[alone])


@given(cases)
@counts_examples("token_probabilities")
def test_temperature_zero_is_argmax(case: Case):
    params = SamplingParams.of([3] * case.rows, temperature=0, top_p=0.3)
    logits = case.logits()
    tokens = draw_tokens(token_probabilities(logits, params), torch.rand(case.rows).double())
    assert torch.equal(tokens, logits.argmax(dim=1))


def _one_row(logits: list[float], **options) -> list[float]:
    params = SamplingParams.of([0], **options)
    return token_probabilities(torch.tensor([logits]), params)[0].tolist()


def test_what_is_not_a_number_is_never_sampled():
    assert _one_row([math.nan, 0, -math.inf, 0]) == [0, 0.5, 0, 0.5]
    assert _one_row([math.inf, 0, math.nan, math.inf]) == [0.5, 0, 0, 0.5]


def test_row_without_a_finite_logit_is_uniform():
    assert _one_row([-math.inf, math.nan]) == [0.5, 0.5]


def test_top_p_takes_equals_by_smaller_id():
    assert _one_row([1, 1, 1, 1], top_p=0.5) == [0.5, 0.5, 0, 0]
    assert _one_row([1, 1, 1, 1], top_p=1e-9) == [1, 0, 0, 0]


def test_all_of_a_wide_flat_row_is_kept_at_top_p_one():
    probs = token_probabilities(torch.zeros(1, 20_001), SamplingParams.of([0]))
    assert (probs == 1 / 20_001).all()


def test_bits_are_those_recorded_so_that_old_seeds_replay():
    logits = (torch.arange(2**16, dtype=torch.float64) / -93_000).unsqueeze(0)
    probs = token_probabilities(logits, SamplingParams.of([0], temperature=1.0))
    digest = hashlib.sha256(probs.numpy().astype("<f8").tobytes()).hexdigest()
    assert digest == "7fd8495980b8f78e3fa7ac680f3d7ff3e7977e8269f135e2f0447860762b1edb"


def test_small_temperature_is_nearly_greedy():
    assert _one_row([1, 1.001, 0], temperature=1e-5) == [0, 1, 0]
    assert _one_row([-3e38, 3e38, 0], temperature=1e-38) == [0, 1, 0]


@pytest.mark.parametrize("temperature", [-1.0, math.nan])
def test_unusable_temperature_on_the_device_is_greedy(temperature):
    params = SamplingParams(
        torch.tensor([temperature]), torch.tensor([1.0]), torch.zeros(1, dtype=torch.int64)
    )
    assert token_probabilities(torch.tensor([[0.0, 1.0, 1.0]]), params).tolist() == [[0, 1, 0]]


@pytest.mark.parametrize(("top_p", "kept"), [(-1.0, 1), (0.0, 1), (7.0, 3), (math.nan, 3)])
def test_top_p_out_of_range_on_the_device_is_the_nearest(top_p, kept):
    params = SamplingParams(
        torch.tensor([1.0]), torch.tensor([top_p]), torch.zeros(1, dtype=torch.int64)
    )
    assert (token_probabilities(torch.tensor([[2.0, 1.0, 0.0]]), params) > 0).sum() == kept


def draw_oracle(probs: list[float], uniform: float) -> int:
    """In Python's integers: probabilities in units of 2^-62."""
    units = [int(p * 2**62) for p in probs]
    place = int(uniform * float(sum(units)))
    running = 0
    for token, unit in enumerate(units):
        running += unit
        if running > place:
            return token
    raise AssertionError("an empty row")


@given(cases, st.sampled_from([2.0**-53, 0.5, 1 - 2.0**-53, None]))
@counts_examples("draw_tokens")
@tallies(AGREEMENT, "draw_tokens")
def test_draws_equal_the_integer_oracle_and_have_a_chance(case: Case, number):
    probs = token_probabilities(case.logits(), case.params())
    generator = torch.Generator().manual_seed(case.seed)
    halved = probs * torch.rand(case.rows, 1, generator=generator, dtype=torch.float64)
    u = torch.rand(case.rows, generator=generator, dtype=torch.float64)
    u = u if number is None else torch.full_like(u, number)
    for rows in (probs, halved):  # a residual's sum is below 1
        tokens = draw_tokens(rows, u)
        assert tokens.tolist() == list(map(draw_oracle, rows.tolist(), u.tolist()))
        assert (rows.gather(1, tokens.unsqueeze(1)) > 0).all()


def test_row_of_zeros_draws_something_in_range():
    tokens = draw_tokens(torch.zeros(2, 3, dtype=torch.float64), torch.tensor([0.1, 0.9]).double())
    assert ((tokens >= 0) & (tokens < 3)).all()


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.5, 1.0), (2.0, 0.7)])
def test_draws_follow_their_law(temperature, top_p):
    seeds = torch.arange(40_000)
    params = SamplingParams.of(seeds.tolist(), temperature=temperature, top_p=top_p)
    row = torch.tensor([0.3, -1.0, 1.2, 0.3, -0.4])
    probs = token_probabilities(row.expand(len(seeds), 5), params)
    tokens = draw_tokens(probs, uniform_at(params.seed, seeds * 0 + 11, Purpose.TARGET))
    law = probs[0]
    assert (counts_of(tokens, 5)[law == 0] == 0).all()
    assert p_value(counts_of(tokens, 5)[law > 0], law[law > 0]) > FALSE_ALARM


def test_a_graph_can_hold_a_draw():
    params, logits = SamplingParams.of([0, 1], temperature=[1.0, 0.0]), torch.zeros(2, 9)
    position, tokens = torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)

    def step() -> None:
        probs = token_probabilities(logits, params)
        tokens.copy_(draw_tokens(probs, uniform_at(params.seed, position, Purpose.DRAFT)))

    runner = RecordedRunner()
    runner.capture("draw", step, state=(), num_rows=2)
    logits.copy_(torch.randn(2, 9, generator=torch.Generator().manual_seed(5)))
    params.seed.add_(77)
    position.add_(3)
    step()
    expected = tokens.clone()
    tokens.fill_(-1)
    runner.run("draw", lambda: pytest.fail("not replayed"), state=(), num_rows=2)
    assert torch.equal(tokens, expected)


@pytest.mark.gpu
def test_a_gpu_gives_the_bits_of_a_cpu():
    logits = torch.randn(64, 50_021, generator=torch.Generator().manual_seed(3)) * 4
    logits[:, ::7] = 1.0  # equals at the top-p boundary
    params = SamplingParams.of(range(64), temperature=[0.0, 0.5, 1.0, 2.0] * 16, top_p=0.9)
    there = SamplingParams(params.temperature.cuda(), params.top_p.cuda(), params.seed.cuda())
    probs = token_probabilities(logits, params)
    probs_there = token_probabilities(logits.cuda(), there)
    assert torch.equal(probs_there.cpu(), probs)
    places = torch.arange(64)
    u = uniform_at(params.seed, places, Purpose.TARGET)
    u_there = uniform_at(there.seed, places.cuda(), Purpose.TARGET)
    assert torch.equal(u_there.cpu(), u)
    assert torch.equal(draw_tokens(probs_there, u_there).cpu(), draw_tokens(probs, u))
