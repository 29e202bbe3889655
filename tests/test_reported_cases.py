"""Bugs reported against serving engines, each as the property that excludes it."""

import pytest
import torch

from lightning_indexer.kernels.backend import INTERPRET
from lightning_indexer.kernels.paged_mqa_logits import paged_mqa_logits
from lightning_indexer.kernels.slots import indices_to_slots
from lightning_indexer.kernels.topk import topk_indices


def _int32(*values: object) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor(v, dtype=torch.int32) for v in values)


def _scoring(batch: int, next_n: int, pages: int = 6) -> tuple[torch.Tensor, ...]:
    """q [B, N, 2, 8], a float cache of pages of 4 and weights."""
    torch.manual_seed(0)
    q = torch.randn(batch, next_n, 2, 8)
    return q, torch.randn(pages, 4, 8), torch.randn(batch * next_n, 2)


def test_context_beyond_the_block_table_is_rejected() -> None:
    # vllm-project/vllm#46074: draft tokens run a block past max_model_len.
    q, _, weights = _scoring(1, 3)
    (lengths, table), cache = _int32([130], [[0, 1]]), torch.randn(3, 64, 8)
    with pytest.raises(ValueError, match=r"block_table.*130.*2 pages of 64"):
        paged_mqa_logits(q, cache, weights, lengths, table, max_context_len=130)
    (table,) = _int32([[0, 1, 2]])
    scores = paged_mqa_logits(q, cache, weights, lengths, table, max_context_len=130)
    assert torch.isfinite(scores).sum(1).tolist() == [128, 129, 130]


def test_page_outside_the_cache_scores_nothing_and_is_an_error_in_check_mode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # local-inference-lab/b12x#160: page ids above the cache size were read.
    q, cache, weights = _scoring(1, 1, pages=3)
    lengths, table = _int32([10], [[0, 7, 2]])
    options = {"max_context_len": 12, "page_size": 4}
    scores = paged_mqa_logits(q, cache, weights, lengths, table, **options)
    assert torch.isfinite(scores)[0].nonzero().flatten().tolist() == [0, 1, 2, 3, 8, 9]
    monkeypatch.setenv("LIGHTNING_INDEXER_CHECK", "1")
    with pytest.raises(ValueError, match=r"block_table.*\[0, 3\), got 7"):
        paged_mqa_logits(q, cache, weights, lengths, table, **options)


def test_rows_of_a_request_read_its_whole_table_line() -> None:
    # vllm-project/vllm#48404: expanding [2, 4] tables into a width-3 buffer mixed requests.
    (table,) = _int32([[1, 2, 3, 4], [5, 6, 7, 8]])
    indices, requests = torch.arange(4).expand(4, 4).int(), torch.tensor([0, 0, 1, 1]).int()
    slots = indices_to_slots(indices, table, requests, 1)
    assert slots.tolist() == [[1, 2, 3, 4]] * 2 + [[5, 6, 7, 8]] * 2


def test_score_columns_past_a_narrow_table_are_never_looked_up() -> None:
    # flashinfer-ai/flashinfer#2486: scores 1024 wide over a table of 32 slots a request.
    torch.manual_seed(0)
    rows = 2 if INTERPRET else 8
    logits = torch.randn(rows, 1024)
    logits[:, 32:] = 1e30
    table = torch.full((rows, 33), 555, dtype=torch.int32)[:, :32]  # 555 lies behind the lines
    table[:] = torch.randperm(32 * rows).view(rows, 32)
    kept = topk_indices(logits, 16, None, torch.full((rows,), 32))
    best = logits[:, :32].argsort(1, descending=True)[:, :16].sort(1).values
    assert torch.equal(kept, best.int())
    requests = torch.arange(rows)
    assert torch.equal(indices_to_slots(kept, table, requests, 1), table.gather(1, best))
    unaware = topk_indices(logits, 16)  # lengths forgotten: positions that the table does not have
    assert (unaware >= 32).all()
    assert (indices_to_slots(unaware, table, requests, 1) == -1).all()


@pytest.mark.parametrize("batch, next_n", [(32, 1), (33, 2)])
def test_batch_without_any_key_selects_nothing(batch: int, next_n: int) -> None:
    # deepseek-ai/DeepGEMM#353: all lengths zero made the schedule read past the batch.
    q, cache, weights = _scoring(batch, next_n)
    lengths, table = torch.zeros(batch).int(), torch.zeros((batch, 1)).int()
    scores = paged_mqa_logits(q, cache, weights, lengths, table, max_context_len=4, page_size=4)
    assert torch.isneginf(scores).all()
    assert (topk_indices(scores[:2], 3) == -1).all()


def test_lengths_behind_the_batch_are_never_used() -> None:
    # deepseek-ai/DeepGEMM#344: idle workers read context_lens[batch].
    q, cache, weights = _scoring(2, 1)
    buffer, table = _int32([5, 6, 2**30], [[0, 1], [2, 3]])
    options = {"max_context_len": 8, "page_size": 4}
    sliced = paged_mqa_logits(q, cache, weights, buffer[:2], table, **options)
    alone = paged_mqa_logits(q, cache, weights, buffer[:2].clone(), table, **options)
    assert torch.equal(sliced, alone)
    assert torch.isfinite(sliced).sum(1).tolist() == [5, 6]


def test_slices_and_transposes_score_like_contiguous_tensors() -> None:
    # vllm-project/vllm#45292 and #40987: lengths, tables and weights sliced from wider buffers.
    q, cache, weights = _scoring(3, 2)
    lengths = torch.randint(1, 9, (8, 4), dtype=torch.int32)[:3, :2]
    table = torch.randint(0, 6, (3, 5), dtype=torch.int32)[:, :2]
    wide = torch.full((6, 5), float("nan"))
    wide[:, 1:3] = weights
    heads_first = q.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)
    options = {"max_context_len": 8, "page_size": 4}
    strided = paged_mqa_logits(heads_first, cache, wide[:, 1:3], lengths, table, **options)
    packed = paged_mqa_logits(
        q, cache, weights, lengths.contiguous(), table.contiguous(), **options
    )
    assert torch.equal(strided, packed)
