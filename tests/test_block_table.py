"""`BlockTable`: pages are handed out once, and positions map to their slots."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from counting import counts_examples
from lightning_indexer.indexer.block_table import BlockTable, positions_to_slots


@dataclass(frozen=True)
class Case:
    requests: int
    page_size: int
    max_model_len: int
    num_pages: int
    seed: int


cases = st.builds(
    Case,
    requests=st.integers(1, 4),
    page_size=st.sampled_from([1, 3, 4]),
    max_model_len=st.integers(1, 14),
    num_pages=st.integers(1, 20),
    seed=st.integers(0, 2**32 - 1),
)


@given(cases)
@counts_examples("BlockTable")
def test_slots_are_never_shared_and_lie_where_the_table_says(case: Case):
    rng = random.Random(case.seed)
    table = BlockTable(
        case.requests, case.max_model_len, num_pages=case.num_pages, page_size=case.page_size
    )
    lengths = [0] * case.requests
    for _ in range(8):
        request, length = rng.randrange(case.requests), rng.randint(0, case.max_model_len)
        if rng.random() < 0.2:
            table.release(request)
            lengths[request] = 0
        elif table.can_allocate(request, length):
            table.allocate(request, length)
            lengths[request] = max(lengths[request], length)
        else:
            with pytest.raises(ValueError, match="are free"):
                table.allocate(request, length)
    pages = [-(-n // case.page_size) for n in lengths]
    assert table.num_free_pages == case.num_pages - sum(pages)
    owned = table.table[table.table >= 0].tolist()
    assert len(owned) == len(set(owned)) == sum(pages)
    assert all(0 <= page < case.num_pages for page in owned)

    places = [
        (rng.randrange(case.requests), rng.randrange(case.max_model_len + 2)) for _ in "12345"
    ]
    owner, positions = torch.tensor(places).unbind(1)
    slots = table.slots(positions, owner.to(torch.int32))
    assert slots.dtype == torch.int64
    for (request, position), slot in zip(places, slots.tolist(), strict=True):
        block, offset = divmod(position, case.page_size)
        page = int(table.table[request, block]) if block < table.pages_per_request else -1
        assert slot == (page * case.page_size + offset if page >= 0 else -1)


def test_length_past_max_model_len_is_refused_and_has_no_slot():
    # vllm-project/vllm#46074: max_model_len a multiple of the page, drafts one page past it
    table = BlockTable(1, 128, num_pages=4, page_size=64)
    assert table.table.shape == (1, 2)
    with pytest.raises(ValueError, match="length must be at most 128, got 130"):
        table.allocate(0, 130)
    assert table.num_free_pages == 4
    table.allocate(0, 128)
    slots = table.slots(torch.tensor([127, 128, 129]), torch.zeros(3, dtype=torch.int32))
    assert slots.tolist() == [127, -1, -1]


def test_failed_allocation_takes_no_page():
    table = BlockTable(2, 8, num_pages=2, page_size=4)
    table.allocate(0, 3)
    before = table.table.clone()
    with pytest.raises(ValueError, match="request 1 needs 2 more pages for 8 tokens, 1 are free"):
        table.allocate(1, 8)
    assert table.num_free_pages == 1
    assert torch.equal(table.table, before)


def test_growing_keeps_the_pages_of_before():
    table = BlockTable(2, 12, num_pages=6, page_size=4)
    table.allocate(0, 4)
    table.allocate(1, 4)
    first = table.table[0, 0].item()
    table.allocate(0, 12)
    table.allocate(0, 1)  # shrinking is not a thing
    assert table.table[0].tolist() == [first, 2, 3]


def test_foreign_positions_are_mapped_by_the_local_table():
    # sgl-project/sglang#31477: transferred positions, local slots 70..79; invalid ones stay −1
    local = torch.arange(70, 80, dtype=torch.int32).unsqueeze(0)
    positions = torch.tensor([0, 5, 9, -1, 12])
    slots = positions_to_slots(positions, local, torch.zeros(5, dtype=torch.int32), 1)
    assert slots.tolist() == [70, 75, 79, -1, -1]


def test_no_position_has_no_slot():
    table = BlockTable(1, 8, num_pages=2, page_size=4)
    table.allocate(0, 8)
    none = torch.tensor([-1, 7, -2, -4, -(2**31)])
    slots = table.slots(none, torch.zeros(5, dtype=torch.int32))
    assert slots.tolist() == [-1, 7, -1, -1, -1]
    empty = table.slots(none[:0], torch.zeros(0, dtype=torch.int32))
    assert empty.shape == (0,) and empty.dtype == torch.int64


def test_position_past_32_bits_has_no_slot_rather_than_another_ones():
    table = BlockTable(1, 8, num_pages=2, page_size=4)
    table.allocate(0, 8)
    far = torch.tensor([2**32, 2**32 + 1, 2**63 - 1, -(2**32) + 1, -(2**63), 2**31 - 1, 7])
    slots = table.slots(far, torch.zeros(7, dtype=torch.int32))
    assert slots.tolist() == [-1] * 6 + [7]


def test_padding_request_has_no_slot():
    table = BlockTable(1, 8, num_pages=2, page_size=4)
    table.allocate(0, 8)
    slots = table.slots(torch.tensor([0, 0]), torch.tensor([-1, 1], dtype=torch.int32))
    assert slots.tolist() == [-1, -1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_num_reqs": 0}, "max_num_reqs must be at least 1"),
        ({"max_model_len": 0}, "max_model_len must be at least 1"),
        ({"num_pages": 0}, "num_pages must be at least 1"),
        ({"page_size": 0}, "page_size must be at least 1"),
    ],
)
def test_empty_table_is_refused(change, message):
    sizes = {"max_num_reqs": 1, "max_model_len": 8, "num_pages": 2, "page_size": 4} | change
    with pytest.raises(ValueError, match=message):
        BlockTable(**sizes)
