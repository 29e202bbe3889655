"""Public reports of scores that did not fit, as inputs of our own; each names its source."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lightning_indexer.kernels import select_topk as module
from lightning_indexer.kernels.mqa_logits import mqa_logits
from lightning_indexer.kernels.select_topk import select_topk
from lightning_indexer.kernels.topk import topk_indices

MIB = 2**20


def inputs(rows: int, length: int, heads: int, head_dim: int) -> tuple[torch.Tensor, ...]:
    """Whole numbers, so that no sum rounds; the windows are the last rows of a causal square."""
    g = torch.Generator().manual_seed(0)
    q = torch.randint(-2, 3, (rows, heads, head_dim), generator=g).float()
    k = torch.randint(-2, 3, (length, head_dim), generator=g).float()
    ends = torch.arange(length - rows + 1, length + 1, dtype=torch.int32)
    return q, k, torch.randn(rows, heads, generator=g), torch.zeros_like(ends), ends


@pytest.mark.parametrize(
    "rows, length, budget, pieces",
    [(8, 1024, 4096, [4, 4]), (7, 300, 700, [2, 2, 2, 1]), (3, 64, 64, [1, 1, 1]), (5, 9, 45, [5])],
)
def test_request_above_the_budget_is_split_between_its_rows(
    rows: int, length: int, budget: int, pieces: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    # vllm-project/vllm#36178: only the keys were bounded, a long request still came as one piece.
    chunks, select = [], module.TOPK_OP
    monkeypatch.setattr(
        module, "TOPK_OP", lambda x, *a, **kw: (chunks.append(x.numel()), select(x, *a, **kw))
    )
    request = inputs(rows, length, 2, 8)
    split = select_topk(*request, length // 16 + 1, workspace_bytes=4 * budget)
    assert chunks == [length * piece for piece in pieces]
    assert torch.equal(split, select_topk(*request, length // 16 + 1))
    scores = mqa_logits(*request)
    assert torch.equal(split, topk_indices(scores, length // 16 + 1, *request[3:]))


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("count, length, pieces", [(11, 60, [4, 4, 3]), (6, 33, [4, 2])])
def test_many_rows_are_chunked_by_bytes(
    count: int, length: int, pieces: list[int], clean: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # vllm-project/vllm#41063: a budget divided by all rows gave chunks of one key, and results
    # depended on whether the scores had been filled with −inf first.
    launches, score, select = [], module.MQA_LOGITS_OP, module.TOPK_OP

    def score_into(*args: object, out: torch.Tensor) -> None:
        out.fill_(float("-inf") if clean else 1e30)
        score(*args, out=out)

    monkeypatch.setattr(module, "MQA_LOGITS_OP", score_into)
    monkeypatch.setattr(
        module, "TOPK_OP", lambda x, *a, **kw: (launches.append(x.shape), select(x, *a, **kw))
    )
    rows = inputs(count, length, 2, 8)
    got = select_topk(*rows, 5, workspace_bytes=4 * length * 4 + 3 * length)  # less than a row more
    assert launches == [(piece, length) for piece in pieces]
    assert torch.equal(got, topk_indices(mqa_logits(*rows), 5, *rows[3:]))


@pytest.mark.parametrize(
    "length, rows", [(200_000, 83), (300_000, 55), (450_000, 37), (600_000, 27), (16_777_216, 1)]
)
def test_longer_contexts_get_fewer_rows_a_chunk_and_never_more_bytes(
    length: int, rows: int
) -> None:
    # NVIDIA/TensorRT-LLM#15459 (a chunk of so many tokens took 16 GB at 500K keys) and the sizes of
    # vllm-project/vllm#41063: 8192 rows under 64 MiB
    workspace = module._workspace(8192, length, 64 * MIB, torch.empty(0))
    assert workspace.shape == (rows, length)
    assert workspace.nbytes <= 64 * MIB


@pytest.mark.once
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("count, length, heads", [(64, 16_384, 64), (16, 40_000, 128)])
def test_scores_are_summed_over_heads_piece_by_piece(count: int, length: int, heads: int) -> None:
    # sgl-project/sglang#33246: a [rows, heads, keys] tensor, 256 MiB here, ran out of memory past
    # 128K. The report allows 32 MiB at this length; a first call's libraries take some too.
    rows, out = inputs(count, length, heads, 128), torch.zeros(count, length)
    assert 4 * count * length * heads >= 256 * MIB
    assert _growth(lambda: mqa_logits(*rows, out=out)) < 64 * MIB


def _growth(call: Callable[[], object]) -> int:
    """Bytes by which the resident set rises above what it was, at most, during the call."""
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark falls to the present
    before = _high_water()
    call()
    return _high_water() - before


def _high_water() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024
