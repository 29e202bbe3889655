"""Masks as windows of visible positions, rows filled with hidden ones, RoPE as stock's."""

from dataclasses import dataclass

import pytest
import torch
from hf_models import DEEPSEEK, build, logits, patched, token_ids
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.deepseek_v32 import modeling_deepseek_v32 as stock

from counting import counts_examples
from lightning_indexer.adapters import transformers_indexer

DTYPES = (torch.bool, torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class Case:
    """Windows drawn at random, in [B, S, T]."""

    batch: int
    rows: int
    length: int
    topk: int
    dtype: torch.dtype
    seed: int

    def windows(self) -> tuple[torch.Tensor, torch.Tensor]:
        g = torch.Generator().manual_seed(self.seed)
        shape = (2, self.batch, self.rows)
        ends = torch.randint(0, self.length + 1, shape, generator=g).sort(dim=0).values
        return ends[0], ends[1]

    def mask(self) -> torch.Tensor:
        starts, ends = (bound.unsqueeze(-1) for bound in self.windows())
        position = torch.arange(self.length)
        visible = (position >= starts) & (position < ends)
        if self.dtype == torch.bool:
            return visible
        hidden = torch.finfo(self.dtype).min
        return torch.zeros(visible.shape, dtype=self.dtype).masked_fill(~visible, hidden)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    length = draw(st.integers(1, 40))
    return Case(
        batch=draw(st.integers(1, 3)),
        rows=draw(st.integers(1, 5)),
        length=length,
        topk=draw(st.integers(1, length)),
        dtype=draw(st.sampled_from(DTYPES)),
        seed=draw(st.integers(0, 2**31)),
    )


@given(case=cases())
@counts_examples("visible_windows")
def test_windows_are_those_of_the_mask(case: Case) -> None:
    starts, ends = transformers_indexer.visible_windows(case.mask())
    expected_starts, expected_ends = case.windows()
    empty = expected_starts == expected_ends
    assert torch.equal(ends - starts, (expected_ends - expected_starts).int())
    assert torch.equal(starts, expected_starts.int().masked_fill(empty, 0))


@given(case=cases())
@counts_examples("fill_rows")
def test_short_rows_are_filled_with_hidden_positions_once_each(case: Case) -> None:
    starts, ends = (bound.int() for bound in case.windows())
    indices = torch.full((case.batch, case.rows, case.topk), -1, dtype=torch.int32)
    for b in range(case.batch):
        for s in range(case.rows):
            chosen = torch.arange(int(starts[b, s]), int(ends[b, s]))[: case.topk]
            indices[b, s, : len(chosen)] = chosen
    filled = transformers_indexer._fill_rows(indices, starts, ends)
    assert torch.equal(filled[indices >= 0], indices[indices >= 0])
    for b in range(case.batch):
        for s in range(case.rows):
            row = filled[b, s].tolist()
            assert len(set(row)) == case.topk and set(row) <= set(range(case.length))
            window = range(int(starts[b, s]), int(ends[b, s]))
            assert not set(row[len(window) :]) & set(window)


def test_padding_on_the_right_is_a_window() -> None:
    model, ids = build(DEEPSEEK, 0), token_ids(0, 2, 64)
    mask = torch.ones_like(ids)
    mask[0, 50:] = 0
    expected = logits(model, ids, mask)[mask.bool()]
    with patched(model, attention=True):
        got = logits(model, ids, mask)[mask.bool()]
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("attention", [False, True])
def test_holes_are_refused(attention: bool) -> None:
    model, ids = build(DEEPSEEK, 0), token_ids(0, 2, 40)
    mask = torch.ones_like(ids)
    mask[1, 20:25] = 0
    with (
        patched(model, attention=attention),
        pytest.raises(
            ValueError, match=r"one run of positions.*position 20 hidden.*query 25, sequence 1"
        ),
    ):
        logits(model, ids, mask)


def test_biases_are_refused() -> None:
    mask = torch.zeros(1, 2, 8)
    mask[0, 1, 0] = -0.5
    with pytest.raises(ValueError, match=r"got a bias of -0\.5"):
        transformers_indexer.visible_windows(mask)


@pytest.mark.parametrize("style", ["half_split", "interleaved"])
def test_rope_has_the_bits_of_transformers(style: str) -> None:
    q, k = torch.randn(2, 5, 3, 24), torch.randn(2, 5, 1, 24)
    angle = torch.randn(2, 5, 8).repeat(1, 1, 2)
    cos, sin = angle.cos(), angle.sin()
    rotate = {
        "half_split": stock.apply_rotary_pos_emb,
        "interleaved": stock.apply_rotary_pos_emb_interleave,
    }[style]
    expected = rotate(q[..., :16], k[..., :16], cos, sin, unsqueeze_dim=2)
    for x, rotated in zip((q, k), expected, strict=True):
        got = transformers_indexer.rotate(x, cos.unsqueeze(2), sin.unsqueeze(2), style)
        assert torch.equal(got, torch.cat([rotated, x[..., 16:]], dim=-1))
