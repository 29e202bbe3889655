"""Public reports of wrongly prepared queries and keys, as inputs of our own; each is named."""

import pytest
import torch

from lightning_indexer.indexer.rope import apply_rope, rope_tables
from lightning_indexer.kernels.mqa_logits import mqa_logits
from lightning_indexer.kernels.prepare_index_k import prepare_index_k
from lightning_indexer.kernels.prepare_index_q import prepare_index_q
from lightning_indexer.kernels.prepare_ragged_index_k import prepare_ragged_index_k
from lightning_indexer.kernels.read_index_k import read_index_k
from lightning_indexer.kernels.select_topk import select_topk
from lightning_indexer.kernels.write_index_k import write_index_k

STYLES = ["half_split", "interleaved"]
FORMATS = ["fp32", "ue8m0"]
D = 128


def sylvester(size: int) -> torch.Tensor:
    """The Hadamard matrix of ±1."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix)
    return matrix


def quantised(x: torch.Tensor, scale_format: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes and scales of rows [n, D], written to a cache and read back."""
    cache = torch.zeros(1, len(x), D + 4, dtype=torch.uint8)
    write_index_k(cache, x, torch.arange(len(x)), page_size=len(x), scale_format=scale_format)
    table, lens = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([len(x)])
    values, scales = read_index_k(cache, table, lens, page_size=len(x))
    return values.view(torch.uint8), scales


@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("style", STYLES)
def test_fused_preparation_keeps_rotation_and_transform(style: str, scale_format: str) -> None:
    # NVIDIA/TensorRT-LLM#15158: the fused concatenation and quantisation had lost the transform.
    # Of small integers and quarter turns every step but the last is exact, so that the unfused
    # steps, in whatever order they add, have equal bytes and scales.
    g = torch.Generator().manual_seed(0)
    heads, position = 3, 2
    q = torch.randint(-8, 9, (heads, D), generator=g).float()
    weights = torch.rand(1, heads, generator=g)
    cos = torch.tensor([1.0, 0.0, -1.0, 0.0]).repeat(1, 8)
    sin = torch.tensor([0.0, 1.0, 0.0, -1.0]).repeat(1, 8)
    cos_table, sin_table = torch.zeros(2, 4, 32)
    cos_table[position], sin_table[position] = cos, sin
    options = {"rope_style": style, "hadamard": True, "scale_format": scale_format}
    x, folded = prepare_index_q(
        q[None], weights, torch.tensor([position]), cos_table, sin_table, **options
    )
    rotated = apply_rope(q, cos, sin, style) @ sylvester(D)
    payload, scale = quantised(rotated * torch.tensor(D**-0.5), scale_format)
    assert torch.equal(x[0].view(torch.uint8), payload)
    factor = torch.tensor(D**-0.5 * heads**-0.5, dtype=torch.float32)
    assert torch.equal(folded[0], weights[0] * factor * scale)
    for other in ({"hadamard": False}, {"rope_style": STYLES[1 - STYLES.index(style)]}):
        lost, _ = prepare_index_q(
            q[None], weights, torch.tensor([position]), cos_table, sin_table, **options | other
        )
        assert not torch.equal(lost[0].view(torch.uint8), payload)


def test_rotation_layout_decides_the_selection() -> None:
    # sgl-project/sglang#13439, huggingface/transformers#46842: rotated in the other layout.
    q = torch.tensor([[[2.0, -1.0, -1.0, -2.0]]])
    k = torch.tensor([[-1.0, -1, 0, 2], [0, -2, 2, 1], [-1, -2, 1, 1], [2, 2, 0, 0]])
    cos, sin = (x.float() for x in rope_tables(4, 4, 10000.0))
    chosen = {}
    for style in STYLES:
        options = {"rope_style": style, "scale_format": None}
        x, weights = prepare_index_q(
            q, torch.ones(1, 1), torch.tensor([3]), cos, sin, scale=1.0, **options
        )
        keys = prepare_index_q(k[:, None], torch.ones(4, 1), None, cos, sin, **options)[0][:, 0]
        window = torch.tensor([0]).int(), torch.tensor([4]).int()
        chosen[style] = select_topk(x, keys, weights, *window, 1).item()
    assert chosen == {"half_split": 1, "interleaved": 3}
    with pytest.raises(TypeError, match="rope_style"):
        prepare_index_q(q, torch.ones(1, 1), None, cos[3:], sin[3:])


@pytest.mark.parametrize("hadamard", [False, True])
def test_prefill_and_decode_caches_score_alike(hadamard: bool) -> None:
    # 1CatAI/1Cat-vLLM#250: keys prepared for a ragged prefill and keys inserted one by one, as
    # decode does, are the same bytes, and score the same.
    g = torch.Generator().manual_seed(0)
    count, size = 9, 4
    k, q = torch.randn(count, D, generator=g).bfloat16(), torch.randn(2, 3, D, generator=g)
    norm = torch.randn(D, generator=g), torch.randn(D, generator=g)
    cos, sin = (x.float() for x in rope_tables(16, 64, 10000.0))
    positions, slots = torch.arange(count), torch.tensor([8, 9, 10, 11, 0, 1, 2, 3, 4])
    options = {"rope_style": "half_split", "hadamard": hadamard, "scale_format": "ue8m0"}
    keys, scale = prepare_ragged_index_k(k, *norm, positions, cos, sin, eps=1e-6, **options)
    cache = torch.zeros(3, size, D + 4, dtype=torch.uint8)
    for i in range(count):
        one = slice(i, i + 1)
        prepare_index_k(
            k[one], *norm, positions[one], cos, sin, cache, slots[one],
            eps=1e-6, page_size=size, **options,
        )  # fmt: skip
    table, lens = torch.tensor([[2, 0, 1]]).int(), torch.tensor([count])
    stored, stored_scale = read_index_k(cache, table, lens, page_size=size)
    assert torch.equal(stored.view(torch.uint8), keys.view(torch.uint8))
    assert torch.equal(stored_scale, scale)
    x, weights = prepare_index_q(
        q, torch.rand(2, 3, generator=g), torch.tensor([7, 8]), cos, sin, **options
    )
    window = torch.zeros(2).int(), torch.tensor([8, 9]).int()
    scores = [
        mqa_logits(x, a, weights, *window, k_scale=b)
        for a, b in ((keys, scale), (stored, stored_scale))
    ]
    assert torch.equal(*scores)
    assert scores[0][1].unique().numel() > 3


@pytest.mark.parametrize("scale_format", FORMATS)
def test_zero_query_has_zero_bytes_and_finite_weights(scale_format: str) -> None:
    # ROCm/aiter#4291: a scale of 0 made 0·(1/0) = NaN.
    tables = torch.ones(2, 32), torch.ones(2, 32)
    options = {"rope_style": "interleaved", "hadamard": True, "scale_format": scale_format}
    x, weights = prepare_index_q(torch.zeros(2, 3, D), torch.ones(2, 3), None, *tables, **options)
    assert (x.view(torch.uint8) == 0).all()
    assert ((weights > 0) & (weights < 1e-6)).all()
