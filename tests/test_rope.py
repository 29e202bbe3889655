"""RoPE against complex rotations in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from counting import AGREEMENT, counts_examples, tallies
from lightning_indexer.indexer.rope import apply_rope, rope_tables

pytestmark = pytest.mark.once
STYLES = ["half_split", "interleaved"]


@dataclass(frozen=True)
class Case:
    style: str
    rows: int
    rotary: int
    rest: int
    theta: float
    seed: int


cases = st.builds(
    Case,
    style=st.sampled_from(STYLES),
    rows=st.integers(0, 5),
    rotary=st.integers(0, 4).map(lambda half: 2 * half),
    rest=st.integers(0, 3),
    theta=st.sampled_from([100.0, 1e4, 8e6]),
    seed=st.integers(0, 2**32 - 1),
)


def _pair(style: str, i: int, rotary: int) -> tuple[int, int]:
    return (i, i + rotary // 2) if style == "half_split" else (2 * i, 2 * i + 1)


@given(cases)
@counts_examples("rope")
@tallies(AGREEMENT, "rope")
def test_each_pair_is_rotated_by_its_angle(case: Case):
    generator = torch.Generator().manual_seed(case.seed)
    width = case.rotary + case.rest
    x = torch.randn(case.rows, width, generator=generator, dtype=torch.float64)
    positions = torch.randint(0, 200, (case.rows,), generator=generator)
    cos, sin = rope_tables(200, case.rotary, case.theta)
    got = apply_rope(x, cos[positions], sin[positions], case.style)
    expected = x.clone()
    for t in range(case.rows):
        for i in range(case.rotary // 2):
            a, b = _pair(case.style, i, case.rotary)
            angle = int(positions[t]) * case.theta ** (-2 * i / case.rotary)
            turned = complex(x[t, a], x[t, b]) * complex(math.cos(angle), math.sin(angle))
            expected[t, a], expected[t, b] = turned.real, turned.imag
    # angles of ≤ 200 are right to 200·2⁻⁵¹, elements are below 6
    assert torch.allclose(got, expected, rtol=0, atol=1e-11)
    assert torch.equal(got[:, case.rotary :], x[:, case.rotary :])


def test_styles_are_permutations_of_each_other_and_differ():
    cos, sin = rope_tables(10, 8, 1e4)
    x = torch.randn(10, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    order = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])  # half-split element of each interleaved one
    half_split = apply_rope(x, cos, sin, "half_split")
    assert torch.equal(apply_rope(x[:, order], cos, sin, "interleaved"), half_split[:, order])
    assert not torch.allclose(apply_rope(x, cos, sin, "interleaved"), half_split)


@pytest.mark.parametrize("style", STYLES)
def test_scores_depend_on_distance_alone(style):
    cos, sin = rope_tables(60, 8, 1e4)
    q, k = torch.randn(2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    near = apply_rope(q, cos[7], sin[7], style) @ apply_rope(k, cos[2], sin[2], style)
    far = apply_rope(q, cos[55], sin[55], style) @ apply_rope(k, cos[50], sin[50], style)
    assert torch.allclose(near, far, rtol=0, atol=1e-12)


@pytest.mark.parametrize("style", STYLES)
def test_position_zero_is_the_identity(style):
    cos, sin = rope_tables(1, 6, 1e4)
    x = torch.randn(3, 6, dtype=torch.float64)
    assert torch.equal(apply_rope(x, cos, sin, style), x)


@pytest.mark.parametrize("style", STYLES)
def test_bits_of_a_row_do_not_depend_on_the_batch(style):
    cos, sin = (table.to(torch.float32) for table in rope_tables(64, 16, 1e4))
    x = torch.randn(33, 24, generator=torch.Generator().manual_seed(2))
    positions = torch.arange(33)
    whole = apply_rope(x, cos[positions], sin[positions], style)
    for t in range(33):
        alone = apply_rope(x[t : t + 1], cos[positions[t : t + 1]], sin[[t]], style)
        assert torch.equal(alone[0], whole[t])
