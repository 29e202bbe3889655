"""The kinds of the public reports on caches and tables, in sizes and values of our own choice.

The reports themselves are in the test files of the ops.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import lightning_indexer as li
from counting import counts_examples
from lightning_indexer.testing import reference
from scoring import share

sizes = {
    "pages": st.integers(1, 4),
    "size": st.sampled_from([1, 2, 4, 8]),
    "dim": st.sampled_from([4, 8, 36, 128]),
    "seed": st.integers(0, 2**31),
}


def _int32(*values: object) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor(v, dtype=torch.int32) for v in values)


def _bits(pair: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return pair[0].view(torch.uint8), pair[1].view(torch.int32)


def _filled(pages: int, size: int, dim: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A full fp8 cache [P, S, 1, D+4] and its keys."""
    keys = torch.randn(pages * size, dim, generator=torch.Generator().manual_seed(seed))
    cache = torch.zeros(pages, size, 1, dim + 4, dtype=torch.uint8)
    li.write_index_k(cache, keys, torch.arange(len(keys)), page_size=size)
    return cache, keys


@share(4)
@given(layers=st.integers(2, 5), **sizes)
@counts_examples("read_index_k")
def test_each_layer_of_a_pool_reads_its_own_values_and_scales(
    layers: int, pages: int, size: int, dim: int, seed: int
) -> None:
    # ROCm/ATOM#1466 and deepseek-ai/DeepGEMM#311
    pool = torch.zeros(pages, layers, size * (dim + 4), dtype=torch.uint8)
    caches = [_filled(pages, size, dim, seed + layer) for layer in range(layers)]
    for layer, (_, keys) in enumerate(caches):
        li.write_index_k(pool[:, layer], keys, torch.arange(len(keys)), page_size=size)
    arguments = _int32([range(pages)], [pages * size])
    options = {"page_size": size, "head_dim": dim}
    for layer, (cache, _) in enumerate(caches):
        found = [
            _bits(li.read_index_k(x, *arguments, **options))
            for x in (pool[:, layer], pool[:, layer].clone(), cache)
        ]
        for other in found[1:]:
            assert all(map(torch.equal, found[0], other))


@share(4)
@given(source=st.integers(0, 31), target=st.integers(0, 31), **sizes)
@counts_examples("read_index_k")
def test_any_token_moves_to_any_place_with_its_scale(
    source: int, target: int, pages: int, size: int, dim: int, seed: int
) -> None:
    # sgl-project/sglang#31218
    cache, keys = _filled(pages, size, dim, seed)
    source, target = source % len(keys), target % len(keys)
    arguments = _int32([range(pages)], [len(keys)])
    values, scales = _bits(li.read_index_k(cache, *arguments, page_size=size))
    flat = cache.view(pages, -1)
    for width, first in ((dim, 0), (4, size * dim)):
        plane = flat[:, first : first + size * width].view(pages, size, width)
        plane[target // size, target % size] = plane[source // size, source % size].clone()
    rows = torch.arange(len(keys))
    rows[target] = source
    moved = _bits(li.read_index_k(cache, *arguments, page_size=size))
    assert torch.equal(moved[0], values[rows])
    assert torch.equal(moved[1], scales[rows])


@share(4)
@given(width=st.integers(1, 130), count=st.integers(1, 4), scale=st.sampled_from([0.0, 1e-9, 3.0]))
@pytest.mark.parametrize("poison", [1e30, float("nan"), float("inf")])
@counts_examples("write_index_k")
def test_key_of_any_width_is_quantised_by_its_own_elements(
    poison: float, width: int, count: int, scale: float
) -> None:
    # ROCm/aiter#4291: a key of zeros, and 100 elements before 28 lanes of poison
    width = -(-width // 4) * 4
    around = torch.full((count, width + 30), poison)
    keys = around[:, 7 : 7 + width]
    keys.copy_(scale * torch.linspace(-1, 1, width))
    cache = torch.zeros(1, 4, 1, width + 4, dtype=torch.uint8)
    expected = reference.write_index_k(cache, keys, torch.arange(count), page_size=4)
    li.write_index_k(cache, keys, torch.arange(count), page_size=4)
    assert torch.equal(cache, expected)
    _, scales = li.read_index_k(cache, *_int32([[0]], [count]), page_size=4)
    assert torch.isfinite(scales).all()
    assert (scales > 0).all()


@share(4)
@given(
    positions=st.lists(st.integers(-2, 60) | st.integers(0, 5), min_size=4, max_size=9),
    pages=st.lists(st.just(-1) | st.integers(0, 500), min_size=1, max_size=6),
    size=st.sampled_from([1, 3, 4, 64]),
)
@counts_examples("indices_to_slots")
def test_position_without_a_page_here_has_no_slot(
    positions: list[int], pages: list[int], size: int
) -> None:
    # ROCm/ATOM#1831, NVIDIA/TensorRT-LLM#12657 and sgl-project/sglang#31477: another table's
    # positions, some of them past this one's, whose line 777 follows
    wide = torch.full((1, len(pages) + 3), 777, dtype=torch.int32)
    table = wide[:, : len(pages)]
    table[0] = torch.tensor(pages)
    (indices, owner) = _int32([positions], [0])
    known = [
        pages[p // size] * size + p % size
        if 0 <= p < len(pages) * size and pages[p // size] >= 0
        else -1
        for p in positions
    ]
    assert li.indices_to_slots(indices, table, owner, size).tolist() == [known]


@share(4)
@given(tokens=st.integers(1, 16), taken=st.integers(1, 16), dim=sizes["dim"], seed=sizes["seed"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float32])
@counts_examples("read_index_k")
def test_restored_pages_read_as_before_whoever_had_them(
    dtype: torch.dtype, tokens: int, taken: int, dim: int, seed: int
) -> None:
    # sgl-project/sglang#39156 and sgl-project/sglang#28896
    g = torch.Generator().manual_seed(seed)
    cache = li.IndexKCache(4, dim, page_size=4, dtype=dtype)
    table = li.BlockTable(2, 16, num_pages=4, page_size=4)

    def write(request: int, count: int) -> torch.Tensor:
        """Slots of `count` new tokens."""
        table.allocate(request, count)
        owner = torch.full((count,), request, dtype=torch.int32)
        slots = table.slots(torch.arange(count), owner)
        cache.write(torch.randn(count, dim, generator=g), slots)
        return slots

    def read() -> tuple[torch.Tensor, torch.Tensor | None]:
        return cache.read(table.table[:1], torch.tensor([tokens], dtype=torch.int32))

    write(0, tokens)
    pages = table.table[0, : -(-tokens // 4)].long().clone()
    before = [x if x is None else x.clone() for x in read()]
    saved = {name: x[pages].clone() for name, x in cache.state_tensors().items()}
    table.release(0)
    write(1, taken)
    table.release(1)
    table.allocate(0, tokens)
    pages = table.table[0, : -(-tokens // 4)].long()
    for name, x in cache.state_tensors().items():
        x[pages] = saved[name]
    for a, b in zip(read(), before, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a.float(), b.float())
