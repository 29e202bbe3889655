"""Scales of quantised queries reach the scores through the weights, each head's its own."""

import pytest
import torch

from lightning_indexer.kernels.mqa_logits import mqa_logits
from lightning_indexer.kernels.prepare_index_q import prepare_index_q

HEADS, HEAD_DIM, KEYS = 3, 16, 20


@pytest.mark.parametrize("scale_format", ["fp32", "ue8m0"])
def test_scores_of_quantised_queries_are_those_of_the_floats(scale_format: str) -> None:
    # Small integers beside 448, times another power of two for each head: all of it is exact.
    g = torch.Generator().manual_seed(0)
    q = torch.randint(-4, 5, (4, HEADS, HEAD_DIM), generator=g).float()
    q[:, :, 0] = 448.0
    q *= 2.0 ** torch.randint(-6, 7, (4, HEADS, 1), generator=g)
    weights = torch.randn(4, HEADS, generator=g)
    args = q, weights, None, torch.ones(4, 0), torch.zeros(4, 0)
    x, folded = prepare_index_q(*args, rope_style="half_split", scale_format=scale_format)
    y, plain = prepare_index_q(*args, rope_style="half_split", scale_format=None)
    assert torch.equal(y, q)
    assert len((q / x.float())[:, :, 0].unique()) > 3
    k = torch.randint(-3, 4, (KEYS, HEAD_DIM), generator=g).to(torch.float8_e4m3fn)
    windows = torch.zeros(4, dtype=torch.int32), torch.full((4,), KEYS, dtype=torch.int32)
    expected = mqa_logits(y, k.float(), plain, *windows)
    assert torch.equal(mqa_logits(x, k, folded, *windows), expected)
    assert len(expected.unique()) > KEYS
