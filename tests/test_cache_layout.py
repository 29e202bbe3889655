"""The page's bytes, and reports of caches that were read or written under another layout."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from counting import counts_examples
from lightning_indexer.kernels.cache_layout import check_cache, split_pages
from lightning_indexer.kernels.read_index_k import read_index_k
from lightning_indexer.kernels.write_index_k import write_index_k
from lightning_indexer.testing.caches import QUANTISED, make_pool


def _int32(*values: object) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor(v, dtype=torch.int32) for v in values)


@given(
    kind=st.sampled_from(QUANTISED),
    pages=st.integers(1, 3),
    page_size=st.sampled_from([1, 4, 6, 64]),
    head_dim=st.sampled_from([2, 4, 12, 128]),
    seed=st.integers(0, 2**31),
)
@counts_examples("cache layout")
def test_values_come_first_and_then_the_scales(
    kind: str, pages: int, page_size: int, head_dim: int, seed: int
) -> None:
    if page_size * head_dim % 4:
        page_size *= 2
    cache = make_pool(kind, pages, page_size, head_dim, seed).cache
    check_cache(cache, page_size, head_dim)
    values, scales = split_pages(cache, page_size, head_dim)
    for page in range(pages):
        raw = cache[page].reshape(-1)
        data = page_size * head_dim
        assert torch.equal(values[page].flatten(), raw[:data])
        assert torch.equal(scales[page].view(torch.uint8), raw[data : data + 4 * page_size])


def test_nominal_view_is_planar() -> None:
    # deepseek-ai/DeepGEMM#311: [blocks, block, 1, D+4] looks interleaved, token by token.
    cache = torch.arange(48, dtype=torch.uint8).view(1, 4, 1, 12)
    cache.view(-1)[32:] = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(torch.uint8)
    values, scales = read_index_k(cache, *_int32([[0]], [4]), page_size=4)
    assert values.view(torch.uint8).flatten().tolist() == list(range(32))
    assert scales.tolist() == [1, 2, 3, 4]


def test_payload_bytes_are_e4m3fn() -> None:
    # sgl-project/sglang#39628: bytes of e4m3fn read as e4m3fnuz are half the value.
    cache = torch.zeros((1, 4, 1, 5), dtype=torch.uint8)
    cache.view(-1)[:4] = torch.tensor([0x40, 0x38, 0x7E, 0xC0])
    values, _ = read_index_k(cache, *_int32([[0]], [4]), page_size=4)
    assert values.float().flatten().tolist() == [2, 1, 448, -2]


def test_layer_views_of_one_pool_keep_their_own_scales() -> None:
    # ROCm/ATOM#1466: as_strided with an absolute offset made every layer read layer 0.
    pool = torch.zeros((2, 3, 4 * 12), dtype=torch.uint8)
    for layer in range(3):
        k = torch.zeros(8, 8)
        k[:, 0] = 448.0 * (layer + 1)
        write_index_k(pool[:, layer], k, torch.arange(8), page_size=4)
    for layer in (1, 2):
        arguments = _int32([[0, 1]], [8])
        view, copy = pool[:, layer], pool[:, layer].clone()
        values, scales = read_index_k(view, *arguments, page_size=4, head_dim=8)
        assert (scales == layer + 1).all()
        assert torch.equal(scales, read_index_k(copy, *arguments, page_size=4, head_dim=8)[1])
        assert (values[:, 0].float() == 448).all()


@pytest.mark.parametrize("source, target", [(3, 70), (65, 1)])
def test_moved_token_takes_its_values_and_scale_along(source: int, target: int) -> None:
    # sgl-project/sglang#31218: rows of pages were taken for rows of tokens.
    cache = make_pool("nominal 4-D", 2, 64, 8, seed=0).cache
    values, scales = split_pages(cache, 64, 8)
    old_values, old_scales = (x.clone().flatten(0, 1) for x in (values, scales))
    for plane in (values, scales.view(torch.int32)):
        plane[target // 64, target % 64] = plane[source // 64, source % 64]
    rows = torch.arange(128)
    rows[target] = source
    got_values, got_scales = read_index_k(cache, *_int32([[0, 1]], [128]))
    assert torch.equal(got_values.view(torch.uint8), old_values[rows])
    assert torch.equal(got_scales.view(torch.int32), old_scales[rows].view(torch.int32))


def test_pages_may_be_megabytes_apart() -> None:
    # vLLM lays layers out inside a block: one layer's pages are a huge stride apart.
    pool = torch.zeros(3 * 2**20 + 2**10, dtype=torch.uint8)
    cache = pool.as_strided((4, 64, 1, 12), (2**20, 12, 12, 1), 64)
    k = torch.randn(6, 8)
    slots = torch.tensor([0, 63, 64, 200, 255, -1])
    write_index_k(cache, k, slots)
    packed = torch.zeros((4, 64, 1, 12), dtype=torch.uint8)
    write_index_k(packed, k, slots)
    assert torch.equal(cache, packed)
    table, lengths = _int32([[3, 0, 1, 2]], [256])
    got, expected = read_index_k(cache, table, lengths), read_index_k(packed, table, lengths)
    assert torch.equal(got[0].view(torch.uint8), expected[0].view(torch.uint8))
    assert torch.equal(got[1], expected[1])


@pytest.mark.parametrize(
    "shape, strides, offset, message",
    [
        ((2, 4, 1, 11), None, 0, "shape"),
        ((2, 47), None, 0, "shape"),
        ((2, 4, 2, 12), None, 0, "shape"),
        ((2, 4, 1, 12), (96, 24, 24, 2), 0, "contiguous"),
        ((2, 4, 1, 12), (50, 12, 12, 1), 0, "aligned"),
        ((2, 4, 1, 12), None, 2, "multiple of 4"),
    ],
)
def test_cache_that_cannot_be_read_in_place_is_rejected(
    shape: tuple[int, ...], strides: tuple[int, ...] | None, offset: int, message: str
) -> None:
    backing = torch.zeros(256, dtype=torch.uint8)
    strides = strides or torch.empty(shape, device="meta").stride()
    cache = backing.as_strided(shape, strides, offset)
    with pytest.raises(ValueError, match=f"cache.*{message}"):
        write_index_k(cache, torch.ones(1, 8), torch.zeros(1).int(), page_size=4)
    assert (backing == 0).all()
    with pytest.raises(ValueError, match=f"cache.*{message}"):
        read_index_k(cache, *_int32([[0]], [1]), page_size=4, head_dim=8)
