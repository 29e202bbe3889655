"""Public reports of wrong index scores, as inputs of our own; each names its source."""

import pytest
import torch

from lightning_indexer.indexer.config import IndexerConfig
from lightning_indexer.indexer.rope import apply_rope, rope_tables
from lightning_indexer.kernels.backend import HAS_TRITON, INTERPRET, Target, tl
from lightning_indexer.kernels.mqa_logits import mqa_logits
from lightning_indexer.kernels.paged_mqa_logits import paged_mqa_logits
from lightning_indexer.kernels.read_index_k import read_index_k
from lightning_indexer.kernels.score_tile import operand_dtype
from lightning_indexer.kernels.select_topk import paged_select_topk, select_topk
from lightning_indexer.kernels.write_index_k import write_index_k
from lightning_indexer.testing import reference
from lightning_indexer.testing.compare import assert_matches
from scoring import BF16, FP8, same_bits, score_bound
from virtual_memory import DEVICES

NEG_INF = float("-inf")


def windows(rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The last rows of a causal square."""
    ends = torch.arange(length - rows + 1, length + 1, dtype=torch.int32)
    return torch.zeros_like(ends), ends


@pytest.mark.parametrize("length, size, head_dim", [(21, 8, 32), (9, 4, 64), (130, 64, 128)])
def test_decode_scores_and_selects_what_prefill_does(length: int, size: int, head_dim: int) -> None:
    # 1CatAI/1Cat-vLLM#250: decode read values and scales interleaved, and had lost the relu.
    torch.manual_seed(length)
    q, weights = torch.randn(1, 3, 4, head_dim).to(BF16), torch.randn(3, 4)
    cache = torch.zeros(4, size, 1, head_dim + 4, dtype=torch.uint8)
    table = torch.tensor([[2, 0, 3]], dtype=torch.int32)
    positions = torch.arange(length)
    slots = table[0, positions // size] * size + positions % size
    write_index_k(cache, torch.randn(length, head_dim), slots, page_size=size)
    lens = torch.tensor([length], dtype=torch.int32)
    paged = {"context_lens": lens, "block_table": table, "max_context_len": length}
    decode = paged_mqa_logits(q, cache, weights, **paged, page_size=size)
    k, k_scale = read_index_k(cache, table, lens, page_size=size)
    rows = q[0], k, weights, *windows(3, length)
    assert same_bits(mqa_logits(*rows, k_scale=k_scale), decode)
    kept = paged_select_topk(q, cache, weights, **paged, topk=5, page_size=size)
    assert torch.equal(select_topk(*rows, 5, k_scale=k_scale), kept)
    assert (torch.einsum("nhd,ld->nhl", q[0].float(), k.float()) < 0).any()  # the relu matters


@pytest.mark.parametrize(
    "style, before_relu, best",
    [
        ("half_split", [-1.2798, 4.3695, -0.8294, 2.0], 1),
        ("interleaved", [-3.4916, -8.4087, -7.1972, 2.0], 3),
    ],
)
def test_rope_layout_decides_the_selection(style: str, before_relu: list, best: int) -> None:
    # sgl-project/sglang#13439: rotated in the other layout, the indexer lost long retrieval.
    q = torch.tensor([[2.0, -1.0, -1.0, -2.0]])
    k = torch.tensor([[-1.0, -1, 0, 2], [0, -2, 2, 1], [-1, -2, 1, 1], [2, 2, 0, 0]])
    cos, sin = (x.float() for x in rope_tables(4, 4, 10000.0))
    q, k = apply_rope(q, cos[3:], sin[3:], style), apply_rope(k, cos, sin, style)
    assert torch.allclose((q @ k.T)[0], torch.tensor(before_relu), rtol=0, atol=5e-5)
    rows = q[:, None], k, torch.ones(1, 1), *windows(1, 4)
    assert torch.allclose(mqa_logits(*rows)[0], torch.tensor(before_relu).relu(), atol=5e-5)
    assert select_topk(*rows, 1).tolist() == [[best]]


def test_no_rope_layout_is_assumed() -> None:
    # huggingface/transformers#46842 (the flag was ignored), ml-explore/mlx-lm#1431 (one shared
    # class: right for GLM or for DeepSeek, never for both)
    sizes = dict.fromkeys(("hidden_size", "q_lora_rank", "index_n_heads", "index_topk"), 8)
    sizes |= {"index_head_dim": 8, "qk_rope_head_dim": 4}
    with pytest.raises(TypeError, match="rope_style"):
        IndexerConfig(**sizes)
    styles = {
        family: IndexerConfig.from_hf(sizes | {"model_type": family}).rope_style
        for family in ("deepseek_v32", "glm_moe_dsa")
    }
    assert styles == {"deepseek_v32": "half_split", "glm_moe_dsa": "interleaved"}


def test_selection_drops_keys_where_there_are_more_than_k() -> None:
    # 1bit-MONSTER/1bit-MONSTER#2421: wrong at 5 tokens and k = 2, and perfect at k = 8.
    k = torch.tensor([[3.0, 0], [1, 5], [-2, 4], [2, 2], [0, 3]])
    q, weights = torch.eye(2).expand(5, 2, 2), torch.tensor([[1.0, 0.5]]).expand(5, 2)
    scores = mqa_logits(q, k, weights, *windows(5, 5))
    expected = torch.tensor([3.0, 3.5, 2.0, 3.0, 1.5]).expand(5, 5)
    assert torch.equal(scores, expected.masked_fill(torch.ones(5, 5).triu(1).bool(), NEG_INF))
    kept = select_topk(q, k, weights, *windows(5, 5), 2)
    assert kept.tolist() == [[0, -1], [0, 1], [0, 1], [0, 1], [0, 1]]


def test_heads_are_weighted_after_the_relu() -> None:
    # ml-explore/mlx-lm#1189: sigmoid of the weights, a mean over heads and no relu.
    k = torch.tensor([[1.0, 1], [2, 4], [-3, 0]])
    rows = torch.eye(2)[None], k, torch.tensor([[2.0, -1.0]]), *windows(1, 3)
    assert mqa_logits(*rows).tolist() == [[1.0, 0.0, 0.0]]
    assert select_topk(*rows, 1).tolist() == [[0]]


@pytest.mark.parametrize("length, topk", [(12, 4), (5, 1), (200, 150)])
def test_first_positions_are_not_kept_unless_they_score(length: int, topk: int) -> None:
    # ml-explore/mlx-lm#1443: kept "sinks" would have hidden another fault.
    k = torch.arange(float(length))[:, None].expand(length, 8).contiguous()
    kept = select_topk(torch.ones(1, 1, 8), k, torch.ones(1, 1), *windows(1, length), topk)
    assert kept.tolist() == [list(range(length - topk, length))]


@pytest.mark.parametrize("length, heads", [(6_000, 4), *([] if INTERPRET else [(131_072, 32)])])
def test_needles_of_a_long_context_are_found(length: int, heads: int) -> None:
    # ml-explore/mlx-lm#1454: the sum over heads came back as zeros, and the last keys were kept.
    g = torch.Generator().manual_seed(0)
    q, k = torch.randn(1, heads, 64, generator=g), torch.randn(length, 64, generator=g)
    needles = [7, length // 3, length // 2, length - 1000, length - 2]
    k[needles] = 4 * q[0, :1]
    weights = torch.ones(1, heads)
    scores = mqa_logits(q, k, weights, *windows(1, length))
    expected = reference.mqa_logits(q, k, weights, *windows(1, length))
    assert_matches(scores, expected, score_bound(q, k, weights, None))
    assert len(scores.unique()) > length // 2
    assert select_topk(q, k, weights, *windows(1, length), 5).tolist() == [needles]


@pytest.mark.parametrize("channels", [(5, 5), (5, 77)])
def test_rotation_keeps_products_and_fp8_keeps_them_to_its_precision(channels: tuple) -> None:
    # vllm-project/vllm#55459 expects smaller errors after rotating an outlier channel away. That
    # holds for integers. e4m3 has the same relative precision for small elements as for the
    # outlier, whose own error is 0 as it sets the scale: here rotation makes the errors larger.
    g = torch.Generator().manual_seed(0)
    hadamard = torch.ones(1, 1)
    while len(hadamard) < 128:
        hadamard = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), hadamard)
    assert torch.equal(hadamard @ hadamard, 128 * torch.eye(128))
    q, k = torch.randn(2, 64, 128, generator=g)
    q[:, channels[0]] *= 50
    k[:, channels[1]] *= 50
    pairs = (q, k), tuple(x @ hadamard / 128**0.5 for x in (q, k))
    exact, rotated = (a.double() @ b.double().T for a, b in pairs)
    # 128 terms rounded by 2⁻²⁴ on either side
    assert ((rotated - exact).abs() <= 2.0**-16 * q.norm(dim=1)[:, None] * k.norm(dim=1)).all()
    for (a, b), product in zip(pairs, (exact, rotated), strict=True):
        (a_size, a_error), (b_size, b_error) = map(_size_and_error, (a, b))
        bound = (a_size + a_error) @ (b_size + b_error).T - a_size @ b_size.T
        assert_matches(_stored(a) @ _stored(b).T, product, bound)


def _size_and_error(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """|x|, and how far e4m3 rounds it: half of 2⁻³ of itself, or of the subnormals' 2⁻⁹·scale."""
    size = x.double().abs()
    return size, 2.0**-4 * size + 2.0**-10 * size.amax(1, keepdim=True) / 448


def _stored(x: torch.Tensor) -> torch.Tensor:
    """What an fp8 cache gives back of x [64, 128], in float64."""
    cache = torch.zeros(1, 64, 1, 132, dtype=torch.uint8)
    write_index_k(cache, x, torch.arange(64))
    table, lens = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([64])
    values, scales = read_index_k(cache, table, lens)
    return reference.to_float64(values) * scales.double()[:, None]


@pytest.mark.once  # thousands of keys, and what is measured is the format
@pytest.mark.parametrize("length, topk, seed", [(8192, 2048, 0), (3000, 1000, 1)])
def test_fp8_keys_select_what_bf16_keys_select_but_for_near_ties(
    length: int, topk: int, seed: int
) -> None:
    # InternLM/xtuner#2076 measured 99.4 to 99.5 % on activations and expects 99 % of random keys.
    # Scores of normal values lie closer together: 98.1 to 98.5 % are the same here, and the
    # others are near-ties by the rule for scores with an error e.
    g = torch.Generator().manual_seed(seed)
    q, k = torch.randn(4, 32, 128, generator=g).to(BF16), torch.randn(length, 128, generator=g)
    weights = torch.rand(4, 32, generator=g)
    bounds = torch.zeros(4, dtype=torch.int32), torch.full((4,), length, dtype=torch.int32)
    scale = k.abs().amax(1) / 448
    stored = (k / scale[:, None]).to(FP8)
    exact = mqa_logits(q, k.to(BF16), weights, *bounds)
    error = (mqa_logits(q, stored, weights, *bounds, k_scale=scale) - exact).abs().amax(1)
    kept = select_topk(q, stored, weights, *bounds, topk, k_scale=scale).long()
    threshold = exact.topk(topk).values[:, -1]
    assert (exact.gather(1, kept) >= (threshold - 2 * error)[:, None]).all()
    left_out = exact.scatter(1, kept, NEG_INF)
    assert (left_out <= (threshold + 2 * error)[:, None]).all()
    shared = (exact.gather(1, kept) >= threshold[:, None]).float().mean(1)
    assert ((shared > 0.97) & (shared < 1)).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_every_head_dim_scores_fp8_right_and_alike_on_every_run(head_dim: int, device: str) -> None:
    # deepseek-ai/DeepGEMM#433 (189 of 384 configurations failed, D = 128 did not) and #392 (bits
    # differed over 20 launches)
    rows, length = (4, 256) if device == "cpu" else (128, 4096)
    g = torch.Generator().manual_seed(0)
    q = torch.randn(rows, 16, head_dim, generator=g).to(FP8)
    k = torch.randn(length, head_dim, generator=g).to(FP8)
    weights, k_scale = torch.rand(rows, 16, generator=g), torch.rand(length, generator=g)
    arguments = [x.to(device) for x in (q, k, weights, *windows(rows, length))]
    first = mqa_logits(*arguments, k_scale=k_scale.to(device))
    for _ in range(3 if INTERPRET else 20):
        out = torch.full_like(first, float("nan"))
        assert same_bits(mqa_logits(*arguments, k_scale=k_scale.to(device), out=out), first)
    expected = reference.mqa_logits(q, k, weights, *windows(rows, length), k_scale=k_scale)
    # tensor cores align fp8 products before they add them, and keep some 13 bits of each
    bound = score_bound(q, k, weights, k_scale) * (1 if device == "cpu" else 2**11)
    assert_matches(first.cpu(), expected, bound)


@pytest.mark.skipif(not HAS_TRITON, reason="names Triton's types")
def test_only_cdna3_multiplies_fnuz() -> None:
    # sgl-project/sglang#29479: chosen by vendor, AMD's later GPUs got it too.
    devices = ("hip", "gfx942"), ("hip", "gfx950"), ("cuda", 80), ("cuda", 90)
    operands = [operand_dtype(Target(*device), torch.uint8) for device in devices]
    assert operands == [tl.float8e4b8, tl.float16, tl.float16, tl.float8e4nv]


@pytest.mark.parametrize("length", [-2, -1, 0, -(2**31)])
def test_length_that_another_rank_holds_is_an_empty_row(length: int) -> None:
    # vllm-project/vllm-ascend#12840: a padded request, cut to the keys of one rank, has
    # 0 − 2 = −2 of them there.
    torch.manual_seed(0)
    q, weights = torch.randn(2, 1, 2, 8), torch.rand(2, 2)
    cache, table = torch.randn(3, 4, 8), torch.tensor([[0, 1], [2, 0]], dtype=torch.int32)
    lens = torch.tensor([length, 3], dtype=torch.int32)
    options = {"max_context_len": 8, "page_size": 4}
    scores = paged_mqa_logits(q, cache, weights, lens, table, **options)
    assert torch.isfinite(scores).sum(1).tolist() == [0, 3]
    kept = paged_select_topk(q, cache, weights, lens, table, 4, **options)
    assert kept.tolist() == [[-1] * 4, [0, 1, 2, -1]]
    values, _ = read_index_k(cache, table, lens, page_size=4)
    assert torch.equal(values, cache[2, :3])
