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


@pytest.mark.parametrize("page, pages, next_n, past", [(64, 2, 3, 2), (16, 1, 2, 1), (4, 5, 4, 3)])
def test_context_beyond_the_block_table_is_rejected(
    page: int, pages: int, next_n: int, past: int
) -> None:
    # vllm-project/vllm#46074: draft tokens run a block past max_model_len.
    q, _, weights = _scoring(1, next_n)
    length = page * pages + past
    (lengths, table), cache = _int32([length], [range(pages)]), torch.randn(pages + 1, page, 8)
    options = {"max_context_len": length, "page_size": page}
    with pytest.raises(ValueError, match=rf"block_table.*{length}.*{pages} pages of {page}"):
        paged_mqa_logits(q, cache, weights, lengths, table, **options)
    (table,) = _int32([range(pages + 1)])
    scores = paged_mqa_logits(q, cache, weights, lengths, table, **options)
    assert torch.isfinite(scores).sum(1).tolist() == list(range(length - next_n + 1, length + 1))


@pytest.mark.parametrize("bad, place, length", [(7, 1, 10), (3, 0, 12), (2**31 - 1, 2, 9)])
def test_page_outside_the_cache_scores_nothing_and_is_an_error_in_check_mode(
    bad: int, place: int, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # local-inference-lab/b12x#160: page ids above the cache size were read.
    q, cache, weights = _scoring(1, 1, pages=3)
    lengths, table = _int32([length], [[0, 1, 2]])
    table[0, place] = bad
    options = {"max_context_len": 12, "page_size": 4}
    scores = paged_mqa_logits(q, cache, weights, lengths, table, **options)
    seen = [p for p in range(length) if p // 4 != place]
    assert torch.isfinite(scores)[0].nonzero().flatten().tolist() == seen
    monkeypatch.setenv("LIGHTNING_INDEXER_CHECK", "1")
    with pytest.raises(ValueError, match=rf"block_table.*\[0, 3\), got {bad}"):
        paged_mqa_logits(q, cache, weights, lengths, table, **options)


@pytest.mark.parametrize(
    "requests, next_n, pages, page", [(2, 2, 4, 1), (3, 4, 5, 2), (5, 1, 3, 7)]
)
def test_rows_of_a_request_read_its_whole_table_line(
    requests: int, next_n: int, pages: int, page: int
) -> None:
    # vllm-project/vllm#48404: expanding [2, 4] tables into a width-3 buffer mixed requests.
    table = torch.arange(1, requests * pages + 1, dtype=torch.int32).view(requests, pages)
    rows = requests * next_n
    indices = torch.arange(pages * page, dtype=torch.int32).expand(rows, -1)
    owners = torch.arange(requests, dtype=torch.int32).repeat_interleave(next_n)
    slots = indices_to_slots(indices, table, owners, page).view(requests, next_n, -1)
    for request in range(requests):
        first = page * (1 + request * pages)
        assert slots[request].tolist() == [list(range(first, first + pages * page))] * next_n


@pytest.mark.parametrize("width, slots, k", [(1024, 32, 16), (300, 7, 5), (70, 64, 6)])
def test_score_columns_past_a_narrow_table_are_never_looked_up(
    width: int, slots: int, k: int
) -> None:
    # flashinfer-ai/flashinfer#2486: scores 1024 wide over a table of 32 slots a request.
    torch.manual_seed(width)
    rows = 2 if INTERPRET else 8
    logits = torch.randn(rows, width)
    logits[:, slots:] = 1e30
    table = torch.full((rows, slots + 1), 555, dtype=torch.int32)[:, :slots]  # 555: behind a line
    table[:] = torch.randperm(slots * rows).view(rows, slots)
    kept = topk_indices(logits, k, None, torch.full((rows,), slots))
    best = logits[:, :slots].argsort(1, descending=True)[:, :k].sort(1).values
    assert torch.equal(kept, best.int())
    requests = torch.arange(rows)
    assert torch.equal(indices_to_slots(kept, table, requests, 1), table.gather(1, best))
    unaware = topk_indices(logits, k)  # lengths forgotten: positions that the table does not have
    assert (unaware >= slots).all()
    assert (indices_to_slots(unaware, table, requests, 1) == -1).all()


@pytest.mark.parametrize("batch, next_n", [(32, 1), (33, 2), (1, 4), (64, 1)])
def test_batch_without_any_key_selects_nothing(batch: int, next_n: int) -> None:
    # deepseek-ai/DeepGEMM#353: all lengths zero made the schedule read past the batch.
    q, cache, weights = _scoring(batch, next_n)
    lengths, table = torch.zeros(batch).int(), torch.zeros((batch, 1)).int()
    scores = paged_mqa_logits(q, cache, weights, lengths, table, max_context_len=4, page_size=4)
    assert torch.isneginf(scores).all()
    assert (topk_indices(scores[:2], 3) == -1).all()


@pytest.mark.parametrize("behind", [2**30, -(2**31), 7])
@pytest.mark.parametrize("lengths", [[5, 6], [8], [0, 3, 8, 1, 7]])
def test_lengths_behind_the_batch_are_never_used(lengths: list[int], behind: int) -> None:
    # deepseek-ai/DeepGEMM#344: idle workers read context_lens[batch].
    batch = len(lengths)
    q, cache, weights = _scoring(batch, 1)
    buffer, table = _int32([*lengths, behind], [[i, 5 - i] for i in range(batch)])
    options = {"max_context_len": 8, "page_size": 4}
    sliced = paged_mqa_logits(q, cache, weights, buffer[:-1], table, **options)
    alone = paged_mqa_logits(q, cache, weights, buffer[:-1].clone(), table, **options)
    assert torch.equal(sliced, alone)
    assert torch.isfinite(sliced).sum(1).tolist() == lengths


@pytest.mark.parametrize("batch, next_n", [(3, 2), (1, 4), (8, 1)])
def test_slices_and_transposes_score_like_contiguous_tensors(batch: int, next_n: int) -> None:
    # vllm-project/vllm#45292 (lengths [8, 4] cut to [3, 2]) and vllm-project/vllm#40987: queries
    # heads first; lengths, tables and weights cut from wider buffers.
    q, cache, weights = _scoring(batch, next_n)
    lengths = torch.randint(1, 9, (8, 4), dtype=torch.int32)[:batch, :next_n]
    table = torch.randint(0, 6, (batch, 5), dtype=torch.int32)[:, :2]
    wide = torch.full((batch * next_n, 5), float("nan"))
    wide[:, 1:3] = weights
    heads_first = q.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)
    options = {"max_context_len": 8, "page_size": 4}
    strided = paged_mqa_logits(heads_first, cache, wide[:, 1:3], lengths, table, **options)
    packed = paged_mqa_logits(
        q, cache, weights, lengths.contiguous(), table.contiguous(), **options
    )
    assert torch.equal(strided, packed)
