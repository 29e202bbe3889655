"""Building batches: the target's rows, and the draft's step 0 and later steps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lightning_indexer.indexer.block_table import BlockTable
from lightning_indexer.speculator.batch import (
    DraftBatches,
    RequestRows,
    StepBatch,
    target_batch,
    with_hidden,
)

PAGE = 4


def _table(requests: int = 6, length: int = 16) -> BlockTable:
    table = BlockTable(requests, length, num_pages=requests * length // PAGE, page_size=PAGE)
    for request in range(requests):
        table.allocate(request, length)
    return table


def _batch(counts, starts=None, table=None) -> StepBatch:
    table = table or _table()
    starts = starts or [0] * len(counts)
    rows = [
        RequestRows(r, start, [10 * r + i for i in range(n)])
        for r, (start, n) in enumerate(zip(starts, counts, strict=True))
    ]
    return target_batch(rows, table.table, PAGE)


@pytest.mark.parametrize(
    ("counts", "owners"),
    [
        ([3, 1, 4, 1], [0, 0, 0, 1, 2, 2, 2, 2, 3]),
        ([1, 1, 1, 1], [0, 1, 2, 3]),
        ([2, 0, 1], [0, 0, 2]),
    ],
)
def test_rows_belong_to_their_requests(counts, owners):
    # NVIDIA/TensorRT-LLM#16925 and vllm-project/vllm#25869: no row for a request without tokens
    batch = _batch(counts)
    assert batch.row_to_request.tolist() == owners
    assert batch.row_to_request.dtype == torch.int32
    assert batch.query_start_loc.tolist() == [0, *torch.tensor(counts).cumsum(0).tolist()]


def test_ragged_rows_keep_token_order():
    # vllm-project/vllm#52500: 8 rows over 6 requests took the uniform path
    counts = [2, 1, 1, 2, 1, 1]
    batch = _batch(counts, starts=[5, 2, 7, 1, 3, 9])
    assert batch.num_tokens == batch.num_tokens_padded == 8
    assert batch.input_ids.tolist() == [0, 1, 10, 20, 30, 31, 40, 50]
    assert batch.positions.tolist() == [5, 6, 2, 7, 1, 2, 3, 9]
    assert batch.context_lens().tolist() == [6, 7, 3, 8, 2, 3, 4, 10]


def test_each_row_sees_itself_and_what_came_before():
    # vllm-project/vllm#38865: lengths [7,9] with three rows each are [5,6,7,7,8,9] by row
    batch = _batch([3, 3], starts=[4, 6])
    assert batch.seq_lens.tolist() == [7, 9]
    assert batch.context_lens().tolist() == [5, 6, 7, 7, 8, 9]
    assert batch.context_lens().dtype == torch.int32


def test_slots_follow_the_block_table():
    table = _table()
    batch = _batch([3, 2], starts=[3, 0], table=table)
    a, b = table.table[0].tolist(), table.table[1].tolist()
    assert batch.slot_mapping.tolist() == [
        a[0] * PAGE + 3, a[1] * PAGE, a[1] * PAGE + 1, b[0] * PAGE, b[0] * PAGE + 1
    ]  # fmt: skip
    assert batch.slot_mapping.dtype == torch.int64


def test_batch_of_nothing():
    batch = target_batch([], _table().table, PAGE)
    assert (batch.num_reqs, batch.num_tokens) == (0, 0)
    assert batch.query_start_loc.tolist() == [0]
    assert batch.block_table.shape == (0, 4)


def _drafts(max_model_len: int = 16) -> DraftBatches:
    return DraftBatches(
        max_num_reqs=6,
        max_num_tokens=10,
        max_model_len=max_model_len,
        page_size=PAGE,
        hidden_size=2,
        dtype=torch.float32,
        device=None,
    )


def _prefill(drafts, batch, rejected, tokens, *, padded=None, reqs=None) -> StepBatch:
    hidden = torch.arange(2.0 * batch.num_tokens).reshape(-1, 2) + 1
    return drafts.prefill(
        with_hidden(batch, hidden),
        torch.tensor(rejected),
        torch.tensor(tokens),
        num_tokens_padded=padded or batch.num_tokens,
        num_reqs_padded=reqs or batch.num_reqs,
    )


def test_step_zero_shifts_ids_and_puts_next_tokens_at_the_last_kept_rows():
    drafts = _drafts()
    step = _prefill(drafts, _batch([3, 4]), [0, 2], [77, 88])
    assert drafts.last_token_indices.tolist() == [2, 4, 0, 0, 0, 0]
    assert step.input_ids[:5].tolist() == [1, 2, 77, 11, 88]
    assert step.positions.tolist() == [0, 1, 2, 0, 1, 2, 3]
    assert step.seq_lens.tolist() == [3, 4]  # the target's lengths, rejected rows included
    assert step.context_lens().tolist() == [1, 2, 3, 1, 2, 3, 4]


def test_padding_of_step_zero_is_inert():
    # vllm-project/vllm#39542: arrays of more capacity than the batch has requests
    drafts = _drafts()
    _prefill(drafts, _batch([3, 3, 4]), [0, 0, 0], [1, 2, 3])  # leaves something behind
    step = _prefill(drafts, _batch([2, 1, 1]), [0, 0, 0], [7, 8, 9], padded=9, reqs=6)
    assert (step.num_reqs, step.num_tokens, step.num_tokens_padded) == (3, 4, 9)
    assert step.input_ids.tolist() == [1, 7, 8, 9, 0, 0, 0, 0, 0]
    assert step.slot_mapping[4:].tolist() == [-1] * 5
    assert step.row_to_request.tolist() == [0, 0, 1, 2, -1, -1, -1, -1, -1]
    assert step.context_lens().tolist() == [1, 2, 1, 1, 0, 0, 0, 0, 0]
    assert step.seq_lens.tolist() == [2, 1, 1, 0, 0, 0]
    assert step.query_start_loc.tolist() == [0, 2, 3, 4, 4, 4, 4]
    assert not step.hidden[4:].any()
    assert (step.block_table[3:] == -1).all()
    assert drafts.last_token_indices.tolist() == [1, 2, 3, 0, 0, 0]


def test_hidden_states_of_the_target_are_copied_with_their_padding():
    drafts, batch = _drafts(), _batch([2, 1])
    padded = replace(
        batch,
        hidden=torch.arange(10.0).reshape(5, 2),
        num_tokens_padded=5,
    )
    step = drafts.prefill(
        padded,
        torch.zeros(2, dtype=torch.int64),
        torch.ones(2),
        num_tokens_padded=8,
        num_reqs_padded=6,
    )
    assert torch.equal(step.hidden[:5], padded.hidden)
    assert not step.hidden[5:].any()


def _decode(drafts, step: int, reqs: int, *, padded=None) -> StepBatch:
    return drafts.decode(
        step,
        torch.arange(6),
        torch.ones(6, 2),
        num_reqs=reqs,
        num_reqs_padded=padded or reqs,
    )


def test_later_steps_advance_one_row_a_request():
    drafts, table = _drafts(), _table()
    _prefill(drafts, _batch([3, 4], starts=[2, 5], table=table), [0, 2], [1, 1])
    for s in (1, 2, 3):
        step = _decode(drafts, s, 2)
        positions = [4 + s, 6 + s]
        assert step.positions.tolist() == positions
        assert step.seq_lens.tolist() == [p + 1 for p in positions]
        assert step.context_lens().tolist() == [p + 1 for p in positions]
        assert step.row_to_request.tolist() == [0, 1]
        assert step.query_start_loc.tolist() == [0, 1, 2]
        owner = torch.tensor([0, 1], dtype=torch.int32)
        assert torch.equal(step.slot_mapping, table.slots(torch.tensor(positions), owner))


def test_padding_of_later_steps_is_inert():
    drafts = _drafts()
    _prefill(drafts, _batch([1, 1, 1, 1, 1, 1]), [0] * 6, [1] * 6)
    _prefill(drafts, _batch([2, 2]), [0, 0], [1, 1], padded=8, reqs=6)
    step = _decode(drafts, 1, 2, padded=4)
    assert step.slot_mapping[2:].tolist() == [-1, -1]
    assert step.seq_lens.tolist() == [3, 3, 0, 0]
    assert step.context_lens().tolist() == [3, 3, 0, 0]
    assert step.input_ids.tolist() == [0, 1, 0, 0]


def test_fewer_requests_than_in_step_zero_leave_the_others_inert():
    drafts = _drafts()
    _prefill(drafts, _batch([2, 2, 2]), [0, 0, 0], [1, 1, 1])
    step = _decode(drafts, 1, 2, padded=3)
    assert step.slot_mapping[2] == -1
    assert step.context_lens().tolist() == [3, 3, 0]


def test_positions_stop_at_max_model_len():
    drafts = _drafts(max_model_len=7)
    _prefill(drafts, _batch([3, 1], starts=[3, 0]), [0, 0], [1, 1])  # last positions 5 and 0
    kept = _decode(drafts, 1, 2)
    assert (kept.positions[0], kept.seq_lens[0]) == (6, 7)
    for s in (2, 3):
        clamped = _decode(drafts, s, 2)
        assert clamped.positions.tolist() == [6, s]
        assert clamped.seq_lens.tolist() == [0, 1 + s]
        assert clamped.slot_mapping[0] == -1
        assert drafts.drafted(s)[:2].tolist() == [False, True]


@pytest.mark.parametrize("columns", [2, 6])
def test_block_table_of_another_width_never_mixes_rows(columns):
    # vllm-project/vllm#48404: a copy bounded by the wrong stride mixed requests
    table = torch.arange(2 * columns, dtype=torch.int32).reshape(2, columns)
    rows = [RequestRows(r, 0, [1, 2]) for r in range(2)]
    drafts = _drafts()
    step = _prefill(drafts, target_batch(rows, table, PAGE), [0, 0], [1, 1])
    kept = min(columns, 4)  # no position below max_model_len lies in a later column
    assert torch.equal(step.block_table[:, :kept], table[:, :kept])
    assert (step.block_table[:, kept:] == -1).all()


def test_dummy_batch_can_touch_nothing():
    drafts = _drafts()
    _prefill(drafts, _batch([3, 4]), [0, 2], [77, 88])
    step = drafts.dummy(5, 3)
    assert (step.slot_mapping == -1).all()
    assert (step.block_table == -1).all()
    assert (step.row_to_request == -1).all()
    assert not step.seq_lens.any()
    assert not step.context_lens().any()
    assert not drafts.last_token_indices.any()
    assert (step.num_tokens, step.num_reqs) == (5, 3)


def test_batches_are_views_of_the_same_memory():
    drafts = _drafts()
    first = _prefill(drafts, _batch([2, 2]), [0, 0], [1, 1])
    addresses = {k: v.data_ptr() for k, v in vars(first).items() if isinstance(v, torch.Tensor)}
    for batch in (_decode(drafts, 1, 2), drafts.dummy(3, 1)):
        for name, address in addresses.items():
            assert getattr(batch, name).data_ptr() == address
