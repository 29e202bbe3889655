"""Random numbers against an integer oracle, and their law."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from chi_square import FALSE_ALARM, counts_of, p_value
from counting import AGREEMENT, counts_examples, tallies
from lightning_indexer.speculator.sampling import Purpose, uniform_at

pytestmark = pytest.mark.once

int64 = st.integers(-(2**63), 2**63 - 1)


def mix64(z: int) -> int:
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


def uniform_oracle(seed: int, position: int, purpose: int) -> float:
    """`uniform_at` in Python's integers."""
    gamma, mixed = 0x9E3779B97F4A7C15, 0
    for word in (seed, purpose, position):
        mixed = mix64((mixed + (word + 1) * gamma) % 2**64)
    return (2 * (mixed >> 12) + 1) / 2**53


def test_mix_of_the_oracle_is_that_of_splitmix64():
    # the first outputs of SplitMix64 from state 0, as published with it
    outputs = [mix64(i * 0x9E3779B97F4A7C15 % 2**64) for i in (1, 2, 3)]
    assert outputs == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


@given(seeds=st.lists(int64, min_size=1, max_size=9), first=int64, purpose=st.sampled_from(Purpose))
@counts_examples("uniform_at")
@tallies(AGREEMENT, "uniform_at")
def test_uniform_numbers_equal_the_integer_oracle(seeds, first, purpose):
    positions = [min(first, 2**63 - 5) + i for i in range(5)]
    got = uniform_at(torch.tensor(seeds).unsqueeze(1), torch.tensor(positions), purpose)
    assert got.dtype == torch.float64
    assert got.tolist() == [[uniform_oracle(s, p, purpose) for p in positions] for s in seeds]
    assert ((got > 0) & (got < 1)).all()


STREAMS = {
    "positions": lambda s: (uniform_at(s, s * 0 + 7, Purpose.DRAFT),
                            uniform_at(s, s * 0 + 8, Purpose.DRAFT)),
    "purposes": lambda s: (uniform_at(s, s * 0 + 7, Purpose.ACCEPT),
                           uniform_at(s, s * 0 + 7, Purpose.TARGET)),
    "seeds": lambda s: (uniform_at(2 * s, s * 0, Purpose.DRAFT),
                        uniform_at(2 * s + 1, s * 0, Purpose.DRAFT)),
    "positions of one seed": lambda s: (uniform_at(s * 0, 2 * s, Purpose.TARGET),
                                        uniform_at(s * 0, 2 * s + 1, Purpose.TARGET)),
}  # fmt: skip


@pytest.mark.parametrize("stream", STREAMS)
def test_uniform_numbers_are_uniform_and_pairwise_independent(stream):
    first, second = STREAMS[stream](torch.arange(20_000))
    cells = (first * 16).long() * 16 + (second * 16).long()
    assert p_value(counts_of(cells, 256), torch.full((256,), 1 / 256)) > FALSE_ALARM


def test_pairs_of_one_number_are_not_independent():
    # the control: the test above notices two purposes that share their numbers
    number = uniform_at(torch.arange(20_000), torch.tensor(7), Purpose.ACCEPT)
    cells = (number * 16).long() * 17
    assert p_value(counts_of(cells, 256), torch.full((256,), 1 / 256)) < FALSE_ALARM
