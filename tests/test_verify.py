"""Greedy verification against a loop."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from counting import AGREEMENT, counts_examples, tallies
from lightning_indexer.speculator.verify import verify_greedy

pytestmark = pytest.mark.once


@dataclass(frozen=True)
class Case:
    requests: int
    drafts: int
    vocab: int
    seed: int


cases = st.builds(
    Case,
    requests=st.integers(0, 6),
    drafts=st.integers(0, 5),
    vocab=st.integers(1, 3),
    seed=st.integers(0, 2**32 - 1),
)


@given(cases)
@counts_examples("verify_greedy")
@tallies(AGREEMENT, "verify_greedy")
def test_accepts_the_longest_right_prefix(case: Case):
    generator = torch.Generator().manual_seed(case.seed)
    size = (case.requests, case.drafts + 1)
    target = torch.randint(0, case.vocab, size, generator=generator)
    drafts = torch.randint(-1, case.vocab, (case.requests, case.drafts), generator=generator)
    accepted, next_tokens = verify_greedy(target, drafts)
    assert accepted.shape == next_tokens.shape == (case.requests,)
    for r in range(case.requests):
        expected = 0
        while expected < case.drafts and drafts[r, expected] == target[r, expected]:
            expected += 1
        assert accepted[r] == expected
        assert next_tokens[r] == target[r, expected]


def test_nothing_drafted_is_never_accepted():
    accepted, next_tokens = verify_greedy(torch.tensor([[-1, 5]]), torch.tensor([[-1]]))
    assert accepted.tolist() == [0]
    assert next_tokens.tolist() == [-1]


def test_request_in_mid_prompt_accepts_nothing_and_goes_on_with_its_prompt():
    target, drafts = torch.tensor([[4, 5], [4, 5]]), torch.tensor([[4], [4]])
    prompt = torch.tensor([7, -1])
    accepted, next_tokens = verify_greedy(target, drafts, prompt_tokens=prompt)
    assert accepted.tolist() == [0, 1]
    assert next_tokens.tolist() == [7, 5]
