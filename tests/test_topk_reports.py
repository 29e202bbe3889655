"""Public reports of wrong top-k selections, as inputs of our own; each names its source."""

import pytest
import torch

from lightning_indexer.kernels.backend import INTERPRET
from lightning_indexer.kernels.topk import topk_indices

INF, NAN = float("inf"), float("nan")
POISON = 0x7FFFFFFF
MANY_ROWS = 2 if INTERPRET else 33  # the interpreter takes seconds for rows of thousands


def ramp(length: int, start: float, step: float) -> torch.Tensor:
    return (start + torch.arange(length, dtype=torch.float64) * step).to(torch.float32)


def select(row: torch.Tensor, k: int) -> list[int]:
    """The selection of one row from a fresh, poisoned output."""
    out = torch.full((1, k), POISON, dtype=torch.int32)
    return topk_indices(row.reshape(1, -1), k, out=out)[0].tolist()


def padded(valid: list[int], k: int) -> list[int]:
    return valid + [-1] * (k - len(valid))


@pytest.mark.parametrize(
    "row, k",
    [
        # vllm-project/vllm#51782: a candidate buffer of 16384 entries
        *((ramp(n, 1.0, 0.245 / 16385), 2048) for n in (16383, 16384, 16385, 16512)),
        (ramp(16385, 1.0, 0.245 / 16385), 512),
        (ramp(16385, 1.0, 0.245 / 16385), 1024),
        (ramp(8192, 1.0, 2.0**-16), 2048),  # sgl-project/sglang#36807: one fp16 bucket of 8192
        (ramp(16448, 1.0, 2.0**-16), 2048),  # local-inference-lab/b12x#55: 4096 shared slots
        (ramp(4096, 1.0, 2.0**-19), 1024),  # sgl-project/sglang#35257: top 12 bits of fp16
        (ramp(8192, 1e-12, 1e-12), 512),  # sgl-project/sglang#37591: all 0 in fp16
        (ramp(8192, 70000.0, 1.0), 512),  # sgl-project/sglang#37591: all inf in fp16
    ],
)
def test_scores_that_share_a_coarse_bin_are_still_told_apart(row: torch.Tensor, k: int) -> None:
    assert select(row, k) == list(range(len(row) - k, len(row)))


def test_long_ragged_rows_ignore_garbage_past_their_end() -> None:
    # vllm-project/vllm#52149 (134,249 tokens in a row 262,144 wide)
    length, width = (20_001, 24_000) if INTERPRET else (134_249, 262_144)
    logits = torch.full((MANY_ROWS, width), NAN)
    logits[:, length::2] = 1e30
    logits[:, :length] = ramp(length, 1.0, 2.0**-20)
    got = topk_indices(logits, 2048, None, torch.full((MANY_ROWS,), length))
    assert (got == torch.arange(length - 2048, length)).all()


def test_row_of_equal_scores_selects_the_first_positions_on_every_run() -> None:
    # vllm-project/vllm#52149, flashinfer-ai/flashinfer#2584
    length, runs = (9_000, 3) if INTERPRET else (131_072, 20)
    row = torch.full((length,), 0.25)
    assert all(select(row, 2048) == list(range(2048)) for _ in range(runs))


def test_few_winners_over_a_plateau_fill_every_slot() -> None:
    # sgl-project/sglang#30512: slots left unwritten when few scores lie above the k-th
    row = torch.full((4096,), 0.5)
    row[8 * torch.arange(500)] = 2 + 0.001 * torch.arange(500)
    got = select(row, 2048)
    assert len(set(got)) == 2048
    assert max(p for p in got if p % 8 or p >= 4000) == 1769
    assert sum(got) == 2_367_317


def test_positives_over_zeros_give_one_answer_on_every_run() -> None:
    # flashinfer-ai/flashinfer#2584: entropy collapse in RL from ties cut at random
    row = torch.zeros(10_000)
    row[97 * torch.arange(100)] = 1.0 + torch.arange(100)
    first = select(row, 2048)
    assert {97 * i for i in range(100)} < set(first)
    assert all(select(row, 2048) == first for _ in range(2 if INTERPRET else 50))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_outlier_does_not_merge_the_scores_below_it(dtype: torch.dtype) -> None:
    # NVIDIA/TensorRT-LLM#16457: linear bins over [0, 65504] hold 1.0 and 1.25 together
    row = torch.zeros(1024, dtype=dtype)
    row[3], row[900], row[5] = 1.0, 1.25, 65504.0
    assert select(row, 2) == [5, 900]


@pytest.mark.parametrize("stop", [0, 1, 511, 512, 513])
@pytest.mark.parametrize("sign", [1, -1])
def test_nan_of_either_sign_is_never_selected(stop: int, sign: int) -> None:
    # vllm-project/vllm#50201: numbers at the end of a row of NaN
    row = torch.full((1243,), NAN).copysign(torch.tensor(float(sign)))
    row[1243 - stop :] = torch.arange(stop, dtype=torch.float32)
    assert select(row, 512) == padded(list(range(1243 - min(stop, 512), 1243)), 512)


def test_row_with_fewer_numbers_than_k_ends_in_minus_one() -> None:
    # vllm-project/vllm#49896: the NaN bit pattern came back as a position
    row = torch.full((1243,), NAN)
    row[::6] = torch.arange(0, 1243, 6, dtype=torch.float32)
    assert select(row, 512) == padded(list(range(0, 1243, 6)), 512)


@pytest.mark.parametrize("k", [1, 4])
def test_row_of_nan_is_an_empty_row(k: int) -> None:
    # microsoft/onnxruntime-genai#2195 (wrote at INT_MAX), vllm-project/vllm#49896
    assert select(torch.full((16,), NAN), k) == [-1] * k


def test_nan_moves_no_other_score() -> None:
    # triton-lang/triton#5999
    assert select(torch.tensor([INF, 3.141593, NAN, -1.0]), 3) == [0, 1, 3]


def test_plus_infinity_is_the_greatest_score() -> None:
    # triton-lang/triton#6635
    row = ramp(28, 1.0, 0.01)
    row[[0, 1, 26, 27]] = INF
    assert select(row, 16) == [0, 1, *range(14, 28)]


def test_very_negative_scores_beat_the_padding_lanes() -> None:
    # NVIDIA/cudnn-frontend#446: everything below −65504 shared the bin of the fill value
    row = ramp(777, -70000.0, -1.0)
    assert select(row, 512) == list(range(512))
    batch = topk_indices(row.expand(3, -1), 512)
    assert (batch == torch.arange(512)).all()


def test_minus_infinity_is_never_selected() -> None:
    # NVIDIA/cudnn-frontend#410, tenstorrent/tt-metal#53326
    row = torch.full((1, 1000), -INF)
    row[0, 7 * torch.arange(100)] = torch.arange(100, dtype=torch.float32)
    row[0, 700:] = 1e30
    got = topk_indices(row, 512, None, torch.tensor([700]))
    assert got[0].tolist() == padded(list(range(0, 700, 7)), 512)
    lone = torch.full((10,), -INF)
    lone[3] = 1.0
    assert select(lone, 8) == padded([3], 8)


def test_zeros_of_both_signs_tie() -> None:
    # NVIDIA/cccl#9470
    row = torch.zeros(64)
    row[::2] = -0.0
    row[10], row[50] = 2.0, 1.0
    assert select(row, 16) == [*range(15), 50]


def test_plateau_is_cut_at_the_smallest_positions_in_any_batch() -> None:
    # jundot/omlx#2243, vllm-project/vllm#57815: the cut changed with the run and with neighbours
    row = (torch.arange(4096) // 8).to(torch.bfloat16)  # bf16 has 8 bits: plateaus of 8 to 16
    alone = select(row, 2044)
    by_score = torch.sort(row.float(), descending=True, stable=True).indices[:2044]
    assert alone == sorted(by_score.tolist())
    assert all(select(row, 2044) == alone for _ in range(1 if INTERPRET else 20))
    wide = torch.full((1, 16384), INF, dtype=torch.bfloat16)
    wide[0, :4096] = row
    for rows in (2, 3) if INTERPRET else (64, 65):
        ends = torch.full((rows,), 16384)
        ends[0] = 4096
        got = topk_indices(wide.expand(rows, -1), 2044, None, ends)
        assert got[0].tolist() == alone
    exact = torch.arange(4096, dtype=torch.float32) // 8
    assert sum(select(exact, 2044)) == 6_282_218


def test_equal_maxima_select_the_first() -> None:
    # pegainfer-project/pegainfer#265: a three-way tie had two answers in 50 runs
    row = torch.zeros(10_000, dtype=torch.bfloat16)
    row[[5, 700, 9000]] = 2.0
    assert all(select(row, 1) == [5] for _ in range(2 if INTERPRET else 50))


@pytest.mark.parametrize("k, expected", [(2, [4, 5]), (8, [0, 1, 2, 3, 4, 5, -1, -1])])
def test_positions_count_from_the_start_of_the_row(k: int, expected: list[int]) -> None:
    # vllm-project/vllm#56749: absolute columns read another request's keys
    logits = torch.arange(10, dtype=torch.float32)[None]
    assert topk_indices(logits, k, torch.tensor([4]), torch.tensor([10])).tolist() == [expected]


def test_short_row_ends_in_minus_one() -> None:
    # vllm-project/vllm#25945, flashinfer-ai/flashinfer#5187 (k above the width)
    assert select(torch.tensor([0.1, 0.5, 0.2, 0.4, 0.3]), 8) == padded([0, 1, 2, 3, 4], 8)
    got = topk_indices(ramp(64, 0.0, 1.0).expand(3, -1), 2048, None, torch.tensor([64, 10, 0]))
    assert got.tolist() == [padded(list(range(n)), 2048) for n in (64, 10, 0)]


def test_row_t_of_a_causal_square_holds_t_plus_one_positions() -> None:
    # radixark/miles#1122, huggingface/transformers#45820
    logits = ramp(8, 0.0, 1.0).expand(8, -1)
    ends = torch.arange(1, 9)
    assert topk_indices(logits, 8, None, ends).tolist() == [
        padded(list(range(t)), 8) for t in range(1, 9)
    ]
    assert topk_indices(logits, 4, None, ends).tolist() == [
        padded(list(range(max(t - 4, 0), t)), 4) for t in range(1, 9)
    ]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_negative_length_is_an_empty_row(dtype: torch.dtype) -> None:
    # sgl-project/sglang#31123 (unsigned compare), vllm-project/vllm#51593 (hang)
    lengths = torch.tensor([100, 101, 90, -4, 3, -(2**31), -1, 0], dtype=dtype)
    got = topk_indices(ramp(300, 1.0, 1.0).expand(8, -1), 128, None, lengths)
    assert got.tolist() == [padded(list(range(max(n, 0))), 128) for n in lengths.tolist()]


@pytest.mark.parametrize("k", [1, 3, 705, 1000, 2047, 2049])
def test_odd_k_is_as_good_as_any(k: int) -> None:
    # NVIDIA/cudnn-frontend#406
    row = torch.randperm(705, generator=torch.Generator().manual_seed(0)).float()
    best = sorted(row.argsort(descending=True)[:k].tolist())
    assert topk_indices(row.expand(2, -1), k).tolist() == [padded(best, k)] * 2


def test_packed_requests_select_their_own_keys() -> None:
    # sgl-project/sglang#12457 (packed keys, no row start), sgl-project/sglang#12583 (one running
    # offset for queries and keys): the first key is the best one for every query.
    logits = torch.zeros(3, 77)
    logits[:, 0] = 9.0
    rows = torch.tensor([39, 40, 76])  # the last of 40 rows, the first and the last of 37
    got = topk_indices(logits, 3, torch.where(rows < 40, 0, 40), rows + 1)
    assert got.tolist() == [[0, 1, 2], [0, -1, -1], [0, 1, 2]]
    values = torch.arange(11, dtype=torch.float32).expand(5, -1)
    cached = topk_indices(values, 1, torch.tensor([0, 0, 0, 5, 5]), torch.tensor([3, 4, 5, 10, 11]))
    assert cached.flatten().tolist() == [2, 3, 4, 4, 5]


def test_resuming_a_prefix_selects_as_one_pass_does() -> None:
    # JustVugg/colibri#1554, huggingface/transformers#48363 (step by step against one-shot)
    length, splits = (10, [9, 6, 5]) if INTERPRET else (100, [96, 88, 76, 52, 50])
    logits = torch.randn(length, length, generator=torch.Generator().manual_seed(1))
    ends = torch.arange(1, length + 1)
    whole = topk_indices(logits, 4, None, ends)
    for n in splits:
        assert torch.equal(topk_indices(logits[:n, :n], 4, None, ends[:n]), whole[:n])
        assert torch.equal(topk_indices(logits[n:], 4, None, ends[n:]), whole[n:])


def test_left_padding_is_never_selected() -> None:
    # huggingface/transformers#48363: three pads with the best scores
    logits = ramp(8, 1.0, 0.1).repeat(8, 1)
    logits[:, :3] = 100.0
    got = topk_indices(logits, 2, torch.full((8,), 3), torch.arange(1, 9))
    expected = [[-1, -1]] * 3 + [[0, -1]] + [[t - 4, t - 3] for t in range(4, 8)]
    assert got.tolist() == expected


@pytest.mark.parametrize("garbage", [1e30, NAN, -INF])
def test_padding_around_the_windows_has_no_effect(garbage: float) -> None:
    # NVIDIA/TensorRT-LLM#16789 (torch.empty, padded stride), GeeeekExplorer/nano-vllm#213
    # (slots of the chunk's future not written yet)
    buffer = torch.full((2, 256), garbage)
    logits = buffer[:, :16]
    logits[0, :5] = ramp(5, 1.0, 1.0)
    logits[1, 5:12] = ramp(7, -3.0, 1.0)
    got = topk_indices(logits, 8, torch.tensor([0, 5]), torch.tensor([5, 12]))
    assert got.tolist() == [padded(list(range(5)), 8), padded(list(range(7)), 8)]


def test_last_of_many_rows_is_computed() -> None:
    # fla-org/native-sparse-attention#23: documents of 781 and 1267 tokens, 65 row tiles
    starts = torch.tensor([0] * 781 + [781] * 1267)
    ends = torch.arange(1, 2049)
    if INTERPRET:
        starts, ends = starts[-5:], ends[-5:]
    logits = torch.zeros(len(ends), 2048)
    logits[torch.arange(len(ends)), ends - 1] = 1.0
    assert torch.equal(topk_indices(logits, 1, starts, ends)[:, 0], (ends - 1 - starts).int())
