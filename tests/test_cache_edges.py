"""Caches at their edges: single rows, repeated slots, rounding, missing keys, row ids."""

from typing import Any

import pytest
import torch

from fault_tools import launches
from lightning_indexer.kernels import read_index_k as read_module
from lightning_indexer.kernels import write_index_k as write_module
from lightning_indexer.kernels.backend import INTERPRET, tl, triton
from lightning_indexer.kernels.cache_layout import split_pages
from lightning_indexer.kernels.compact import compact_topk_indices
from lightning_indexer.kernels.e4m3 import E4M3_VALUES, as_bytes, as_values
from lightning_indexer.kernels.read_index_k import read_index_k
from lightning_indexer.kernels.slots import indices_to_slots
from lightning_indexer.kernels.write_index_k import write_index_k, write_keys_on_cpu
from lightning_indexer.kernels.write_mla_kv import _write_on_cpu, write_mla_kv

NAN = float("nan")
own_slots, request_of = write_module.own_slots, read_module._request_of


def int32(*values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


# e4m3


@pytest.mark.once
def test_every_byte_has_the_value_of_its_fields() -> None:
    assert E4M3_VALUES.shape == (256,)
    for byte, value in enumerate(E4M3_VALUES.tolist()):
        exponent, mantissa = byte >> 3 & 15, byte & 7
        size = (8 + mantissa) * 2.0 ** (exponent - 10) if exponent else mantissa * 2.0**-9
        if byte & 0x7F == 0x7F:
            assert value != value
        else:
            assert value == (-size if byte & 0x80 else size)


@pytest.mark.once
def test_bytes_and_values_are_views_of_each_other() -> None:
    raw, floats = torch.arange(256, dtype=torch.uint8), torch.ones(3)
    values = as_values(raw)
    assert values.dtype == torch.float8_e4m3fn
    assert as_values(values) is values and as_values(floats) is floats
    assert as_bytes(raw) is raw and torch.equal(as_bytes(values), raw)


# writing keys


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_bfloat16_caches_round_to_nearest_even_at_every_boundary(dtype: torch.dtype) -> None:
    """bfloat16 numbers, the points halfway to the next, and what lies next to those."""
    grid = torch.tensor([1.0, 1.0078125, 1.9921875, 2.0, 3.0, 0.0, 2.0**-10, 250.0])
    halves = (grid + (grid.bfloat16().view(torch.int16) + 1).view(torch.bfloat16).float()) / 2
    points = torch.cat([grid, halves])
    if dtype == torch.float32:
        huge = torch.full_like(points, 3e38)
        points = torch.cat([points, points.nextafter(huge), points.nextafter(-huge)])
    k = torch.cat([points, -points]).to(dtype).view(-1, 4)
    bits = [0] * k.numel()
    for i, x in enumerate(k.double().flatten().tolist()):
        around = [grid_value(x, step) for step in (0, 1)]
        bits[i] = min((abs(size - abs(x)), near & 1, near) for near, size in around)[2]
    cache = torch.zeros(1, len(k), 4, dtype=torch.bfloat16)
    write_index_k(cache, k, torch.arange(len(k)), page_size=len(k))
    assert (cache.view(torch.int16).flatten() & 0x7FFF).tolist() == bits
    assert torch.equal(cache[0].signbit(), k.signbit())


def grid_value(x: float, step: int) -> tuple[int, float]:
    """Bits and value of the bfloat16 at or below |x|, or of the one `step` above it."""
    bits = (int(torch.tensor(abs(x)).view(torch.int32)) >> 16) + step
    return bits, torch.tensor(bits, dtype=torch.int16).view(torch.bfloat16).double().item()


@pytest.mark.parametrize("scale_format", ["fp32", "ue8m0"])
def test_neither_a_nan_nor_lanes_past_the_key_count_in_its_scale(scale_format: str) -> None:
    k = torch.full((2, 16), 1e30)
    k[:, :12] = 0.4375
    k[1, 3] = NAN
    cache = torch.zeros(1, 2, 16, dtype=torch.uint8)
    write_index_k(cache, k[:, :12], torch.arange(2), page_size=2, scale_format=scale_format)
    values, scales = split_pages(cache, 2, 12)
    assert scales is not None
    assert scales.tolist() == [[2.0**-10] * 2]
    assert values[0, 0].tolist() == [0x7E] * 12
    assert values[0, 1].tolist() == [0x7E] * 3 + [0x7F] + [0x7E] * 8


@pytest.mark.parametrize("head_dim", [1, 1024, 1025])
def test_the_narrowest_and_very_wide_keys_are_written(head_dim: int) -> None:
    k = torch.arange(3.0 * head_dim).view(3, head_dim)
    cache = torch.full((2, 2, head_dim), -1.0)
    write_index_k(cache, k, int32(3, 0, 1), page_size=2)
    assert torch.equal(cache.flatten(0, 1), torch.stack([k[1], k[2], -torch.ones(head_dim), k[0]]))


def test_keys_without_columns_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^k must have at least one column, got \[2, 0\]$"):
        write_index_k(torch.zeros(1, 2, 0), torch.zeros(2, 0), int32(0, 1), page_size=2)


def test_a_key_goes_to_a_cache_of_one_slot() -> None:
    cache = torch.zeros(1, 1, 3)
    write_index_k(cache, torch.tensor([[1.0, 2.0, 3.0]]), int32(0), page_size=1)
    assert cache.tolist() == [[[1, 2, 3]]]


@pytest.mark.parametrize("count, pages", [(0, 2), (3, 0)])
def test_writing_no_keys_or_to_no_slots_launches_nothing(count: int, pages: int) -> None:
    rows, slots = torch.zeros(pages * 2, 656, dtype=torch.uint8), torch.zeros(count).int()
    with launches() as launched:
        write_index_k(torch.zeros(pages, 2, 4), torch.ones(count, 4), slots, page_size=2)
        write_mla_kv(rows, torch.ones(count, 576), slots)
    assert launched == []
    assert (rows == 0).all()


class Stores:
    """Stands in for a tensor, and notes where rows are put."""

    dtype = torch.float32

    def __init__(self, *shape: int) -> None:
        self.shape = shape
        self.rows: list[Any] = []

    def __setitem__(self, rows: Any, value: torch.Tensor) -> None:
        parts = rows if isinstance(rows, tuple) else (rows,)
        assert all(len(part) == len(value) for part in parts)
        self.rows += zip(*(part.tolist() for part in parts), strict=True)


REPEATED = (5, 2, 5, -1, 2, 0, 2, 8, 3, 0)


@pytest.mark.once
def test_a_cpu_stores_each_slot_once() -> None:
    """Which of two stores to one row is the later is left to chance where threads share them."""
    slots = int32(*REPEATED)
    keys: Any = Stores(4, 2, 4)
    write_keys_on_cpu(keys, None, torch.ones(10, 4), slots, 2, False)
    assert sorted(keys.rows) == [(0, 0), (1, 0), (1, 1), (2, 1)]
    parts: Any = [Stores(8, width) for width in (512, 4, 64)]
    values, scales, rope = parts
    _write_on_cpu(values, scales, rope, torch.ones(10, 576), slots, False)
    for part in parts:
        assert sorted(part.rows) == [(0,), (2,), (3,), (5,)]


@triton.jit
def _own_slots_kernel(
    slots_ptr, out_ptr, written_ptr, n, capacity, BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr
):
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    slot, written = own_slots(slots_ptr, 1, offs_n, n, capacity, BLOCK_N, BLOCK_S)
    tl.store(out_ptr + offs_n, slot)
    tl.store(written_ptr + offs_n, written.to(tl.int8))


@pytest.mark.interpreter
@pytest.mark.parametrize("block_s", [1, 2, 16])
@pytest.mark.parametrize("block_n", [1, 4, 16])
def test_of_equal_slots_the_last_is_written_alone(block_n: int, block_s: int) -> None:
    """Within a program and across programs; two stores to one row could tear it on a GPU."""
    slots = int32(*REPEATED, 5, 2)  # two more, past the keys
    slot, written = torch.zeros(16, dtype=torch.int64), torch.zeros(16, dtype=torch.int8)
    grid = (triton.cdiv(10, block_n),)
    _own_slots_kernel[grid](slots, slot, written, 10, 8, BLOCK_N=block_n, BLOCK_S=block_s)
    assert slot[:10].tolist() == list(REPEATED)
    assert written.tolist() == [0, 0, 1, 0, 0, 0, 1, 0, 1, 1] + [0] * 6


# rows of an MLA cache


def test_a_row_goes_to_a_cache_of_one_slot_and_slots_past_the_keys_are_not_read() -> None:
    cache = torch.full((3, 656), 7, dtype=torch.uint8)
    write_mla_kv(cache[:1], torch.ones(1, 576), int32(0))
    assert (cache[0] != 7).all() and (cache[1:] == 7).all()
    cache.fill_(7)
    write_mla_kv(cache, torch.ones(3, 576)[:1], int32(1, 2, 0)[:1])
    assert (cache[1] != 7).all() and (cache[[0, 2]] == 7).all()


@pytest.mark.parametrize("slot", [-2, 3])
def test_check_mode_refuses_slots_outside_the_rows(
    slot: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIGHTNING_INDEXER_CHECK", "1")
    cache = torch.full((3, 656), 7, dtype=torch.uint8)
    with pytest.raises(ValueError, match=rf"^slots must be in \[-1, 3\), got {slot}"):
        write_mla_kv(cache, torch.ones(2, 576), int32(0, slot))
    assert (cache == 7).all()
    write_mla_kv(cache, torch.ones(2, 576), int32(-1, 2))
    assert (cache[:2] == 7).all() and (cache[2] != 7).all()


# reading keys


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.bfloat16, 0x7FC0),
        (torch.float16, 0x7E00),
        (torch.float32, 0x7FC00000),
        (torch.uint8, 0),
    ],
)
def test_missing_keys_have_the_same_bits_on_every_device(dtype: torch.dtype, expected: int) -> None:
    """The quiet NaN without a payload; of bytes, zeros with a scale that is one."""
    quantised = dtype == torch.uint8
    cache = torch.ones(2, 4, 12 if quantised else 8, dtype=dtype)
    values, scales = read_index_k(cache, int32([1, 9]), int32(6), page_size=4)
    raw = values.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[values.element_size()])
    assert (raw[4:] == expected).all() and (raw[:4] != expected).all()
    assert (scales is not None) == quantised
    if scales is not None:
        assert (scales[4:].view(torch.int32) == 0x7FC00000).all()


@pytest.mark.parametrize("kind", ["bytes", "floats"])
def test_single_and_very_wide_values_are_read(kind: str) -> None:
    for dim in (1, 2048, 2049):
        if kind == "bytes":
            k = torch.full((4, dim), 448.0)
            cache = torch.zeros(1, 4, dim + 4, dtype=torch.uint8)
        else:
            k = torch.arange(4.0 * dim).view(4, dim)
            cache = torch.zeros(1, 4, dim)
        write_index_k(cache, k, torch.arange(4), page_size=4)
        values, _ = read_index_k(cache, int32([0]), int32(4), page_size=4)
        assert torch.equal(values.float(), k)


def test_four_million_absurd_lengths_add_up_without_wrapping_around() -> None:
    lengths = torch.tensor([2**62]).expand(2**22)
    table = torch.zeros(2**22, 0, dtype=torch.int32)
    with pytest.raises(ValueError, match=f"must be at least {2**62}, got 3$"):
        read_index_k(torch.zeros(1, 4, 4), table, lengths, page_size=4, total=3)


@triton.jit
def _request_of_kernel(ends_ptr, request_ptr, start_ptr, B, STEPS: tl.constexpr):
    offs = tl.arange(0, 16)
    request, start = request_of(offs.to(tl.int64), ends_ptr, B, STEPS)
    tl.store(request_ptr + offs, request)
    tl.store(start_ptr + offs, start)


@pytest.mark.interpreter
@pytest.mark.parametrize("ends", [[], [3], [0, 4], [2, 2, 9], [0, 5, 5, 7], [1, 2, 3, 4, 5, 6, 8]])
def test_rows_past_the_last_request_are_of_none(ends: list[int]) -> None:
    """What lies behind the ends is not looked at: zeros there would end before every row."""
    memory = torch.tensor([*ends, 0, 0])
    request, start = torch.full((16,), -1, dtype=torch.int32), torch.full((16,), -1)
    steps = len(ends).bit_length()
    _request_of_kernel[(1,)](memory, request, start, len(ends), STEPS=steps)
    expected = [sum(end <= row for end in ends) for row in range(16)]
    assert request.tolist() == expected
    assert start.tolist() == [ends[r - 1] if r else 0 for r in expected]


# slots of indices


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_the_smallest_entry_of_a_table_has_no_slot(dtype: torch.dtype) -> None:
    out = torch.zeros(1, 3, dtype=dtype)
    indices_to_slots(int32([0, 5, 9]), int32([-(2**31), -1, 2]), int32(0), 4, out=out)
    assert out.tolist() == [[-1, -1, 9]]


# row ids


@pytest.mark.parametrize("holder", [0, 1])
def test_row_ids_in_one_of_two_buffers_move_the_other_as_well(holder: int) -> None:
    ids, other = int32([2], [0], [1], [7]), int32([10], [11], [12], [13])
    buffers = [ids, other] if holder == 0 else [other, ids]
    compact_topk_indices(buffers, ids[:3, 0])
    assert ids.flatten().tolist() == [1, 2, 0, 7]
    assert other.flatten().tolist() == [12, 10, 11, 13]


def test_wide_rows_that_hold_the_row_ids_are_moved_whole() -> None:
    """Several programs read the ids, one of which moves them."""
    wide = torch.arange(3, dtype=torch.int32)[:, None].repeat(1, 600)
    wide[:, 0] = int32(2, 0, 1)
    compact_topk_indices(wide, wide[:, 0])
    assert wide[:, 1:].tolist() == [[i] * 599 for i in (2, 0, 1)]
    assert wide[:, 0].tolist() == [1, 2, 0]


def test_no_row_ids_launch_nothing() -> None:
    buffer = int32([1], [2])
    with launches() as launched:
        compact_topk_indices([buffer], int32())
        compact_topk_indices([torch.zeros(2, 0, dtype=torch.int32)], int32(1))
    assert launched == []
    with launches() as launched:
        compact_topk_indices([buffer], int32(1))
    assert launched == ["_compact_kernel"] * INTERPRET
    assert buffer.tolist() == [[2], [2]]
