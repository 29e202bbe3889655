"""`IndexKCache`: what goes in comes out, and what must be saved with a page is listed."""

from __future__ import annotations

import pytest
import torch

from lightning_indexer.indexer.block_table import BlockTable
from lightning_indexer.indexer.index_k_cache import IndexKCache

DIM, PAGE = 8, 4
DTYPES = [torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float32]


def _keys(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, DIM, generator=torch.Generator().manual_seed(seed))


def _cache(dtype=torch.float8_e4m3fn, **options) -> IndexKCache:
    return IndexKCache(6, DIM, page_size=PAGE, dtype=dtype, **options)


def _read(cache: IndexKCache, table: BlockTable, lengths: list[int]) -> torch.Tensor:
    keys, scale = cache.read(table.table, torch.tensor(lengths, dtype=torch.int32))
    wide = keys.to(torch.float32)
    return wide if scale is None else wide * scale.unsqueeze(1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale_format", ["fp32", "ue8m0"])
def test_keys_come_back_in_order(dtype, scale_format):
    cache = _cache(dtype, scale_format=scale_format)
    table = BlockTable(2, 12, num_pages=6, page_size=PAGE)
    table.allocate(1, 7)
    table.allocate(0, 3)
    positions = torch.tensor([0, 1, 2, *range(7)])
    owner = torch.tensor([0] * 3 + [1] * 7, dtype=torch.int32)
    keys = _keys(10)
    cache.write(keys, table.slots(positions, owner))
    got = _read(cache, table, [3, 7])
    # half a unit of e4m3's last place: 2⁻⁴ of a value (and a little, for the fp32 quotient), 2⁻¹⁰
    # of the scale below its normal range; a power-of-two scale is at most 2·amax/448
    amax = keys.abs().amax(1, keepdim=True)
    bound = keys.abs() * (2.0**-4 + 2.0**-20) + 2.0**-10 * 2 * amax / 448
    if dtype != torch.float8_e4m3fn:
        bound = (keys.to(dtype).to(torch.float32) - keys).abs()
    assert ((got - keys).abs() <= bound).all()


def test_slot_minus_one_writes_nothing():
    cache = _cache()
    cache.write(_keys(3), torch.tensor([2, 5, 9]))
    before = cache.data.clone()
    cache.write(_keys(2, seed=1), torch.tensor([-1, -1]))
    assert torch.equal(cache.data, before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_restoring_the_state_tensors_restores_a_reused_page(dtype):
    # sgl-project/sglang#39156: a page came back without its index keys (or their scales)
    cache = _cache(dtype)
    table = BlockTable(2, 12, num_pages=2, page_size=PAGE)
    table.allocate(0, 8)
    everything = torch.arange(8)
    slots = table.slots(everything, torch.zeros(8, dtype=torch.int32))
    cache.write(_keys(8), slots)
    kept_table, expected = table.table[0].clone(), _read(cache, table, [8, 0])
    pages = kept_table[:2].long()
    saved = {name: tensor[pages].clone() for name, tensor in cache.state_tensors().items()}
    table.release(0)
    table.allocate(1, 8)  # the same pages
    reused = table.slots(everything, torch.ones(8, dtype=torch.int32))
    assert set(reused.tolist()) == set(slots.tolist())
    cache.write(_keys(8, seed=1) * 9, reused)
    assert not torch.equal(_read(cache, table, [0, 8]), expected)
    table.release(1)
    table.allocate(0, 8)
    for name, tensor in cache.state_tensors().items():
        tensor[table.table[0, :2].long()] = saved[name]
    assert torch.equal(_read(cache, table, [8, 0]), expected)


def test_target_and_draft_caches_are_listed_apart():
    # sgl-project/sglang#28896: the draft's own index keys were not restored
    target, draft = _cache(), _cache()
    listed = [tensor for cache in (target, draft) for tensor in cache.state_tensors().values()]
    assert len({tensor.data_ptr() for tensor in listed}) == 2
    draft.write(_keys(1), torch.tensor([3]))
    assert not target.data.any()
    assert all(draft.data.data_ptr() == t.data_ptr() for t in draft.state_tensors().values())


def test_read_with_total_needs_no_lengths_on_the_host():
    cache = _cache(torch.float32)
    table = BlockTable(1, 12, num_pages=3, page_size=PAGE)
    table.allocate(0, 5)
    keys = _keys(5)
    cache.write(keys, table.slots(torch.arange(5), torch.zeros(5, dtype=torch.int32)))
    got, scale = cache.read(table.table, torch.tensor([5], dtype=torch.int32), total=5)
    assert scale is None
    assert torch.equal(got[:5], keys)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8])
def test_other_dtype_is_refused(dtype):
    with pytest.raises(TypeError, match="dtype must be float8_e4m3fn"):
        _cache(dtype)


@pytest.mark.parametrize("sizes", [(0, 8, 4), (1, 0, 4), (1, 8, 0)])
def test_empty_cache_is_refused(sizes):
    with pytest.raises(ValueError, match="at least 1"):
        IndexKCache(sizes[0], sizes[1], page_size=sizes[2])
