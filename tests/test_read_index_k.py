from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from counting import AGREEMENT, POISONED, counts_examples, tallies
from lightning_indexer.kernels.read_index_k import read_index_k
from lightning_indexer.kernels.write_index_k import write_index_k
from lightning_indexer.testing import reference
from lightning_indexer.testing.caches import FLOATS, QUANTISED, Pool, make_pool
from lightning_indexer.testing.compare import assert_matches

POISON = 0x55


@dataclass(frozen=True)
class Case:
    kind: str
    requests: int
    blocks: int
    pages: int
    page_size: int
    head_dim: int
    garbage: bool  # pages outside the cache, lengths below 0 and past the table
    slack: int  # rows of the output past the last key
    strided: bool
    seed: int

    def pool(self) -> Pool:
        return make_pool(self.kind, self.pages, self.page_size, self.head_dim, self.seed)

    def table(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed + 1)
        low, high = (-2, self.pages + 2) if self.garbage else (0, self.pages)
        shape = (2 * self.requests, self.blocks + 1)
        table = torch.randint(low, high, shape, dtype=torch.int32, generator=generator)
        return table[::2, 1:] if self.strided else table[: self.requests, 1:].contiguous()

    def lengths(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed + 2)
        low, high = (-3, 3) if self.garbage else (0, 1)
        shape = (self.requests, 2)
        high += self.blocks * self.page_size
        lengths = torch.randint(low, high, shape, dtype=torch.int32, generator=generator)
        return lengths[:, 1] if self.strided else lengths[:, 1].long()

    def total(self) -> int:
        return int(self.lengths().clamp(min=0).sum()) + self.slack

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        return reference.read_index_k(
            self.pool().cache,
            self.table(),
            self.lengths(),
            page_size=self.page_size,
            head_dim=self.head_dim,
            total=self.total(),
        )


def draw_cases(kinds: tuple[str, ...]) -> st.SearchStrategy[Case]:
    return st.builds(
        Case,
        kind=st.sampled_from(kinds),
        requests=st.integers(0, 5),
        blocks=st.integers(1, 3),
        pages=st.integers(1, 4),
        page_size=st.sampled_from([1, 4, 8]),
        head_dim=st.sampled_from([4, 12, 16, 32]),
        garbage=st.booleans(),
        slack=st.sampled_from([0, 0, 5]),
        strided=st.booleans(),
        seed=st.integers(0, 2**31),
    )


@given(case=draw_cases(QUANTISED))
@counts_examples("read_index_k")
@tallies(AGREEMENT, "read_index_k")
@tallies(POISONED, "read_index_k")
def test_gathered_values_and_scales_are_the_cached_ones(case: Case) -> None:
    total, dim = case.total(), case.head_dim
    payload = torch.full((total + 2, dim + 3), POISON, dtype=torch.uint8)
    scale_rows = torch.full((total + 2, 2), float(POISON))
    values, scales = payload.view(torch.float8_e4m3fn)[1:-1, 1 : dim + 1], scale_rows[1:-1, 1]
    returned = read_index_k(
        case.pool().cache,
        case.table(),
        case.lengths(),
        page_size=case.page_size,
        out=(values, scales),
    )
    assert returned[0] is values and returned[1] is scales
    expected_values, expected_scales = case.expected()
    assert_matches(values, expected_values, 0.0)
    assert_matches(scales, expected_scales.double(), 0.0)
    payload[1:-1, 1 : dim + 1] = POISON
    scales.fill_(POISON)
    assert (payload == POISON).all() and (scale_rows == POISON).all()


@given(case=draw_cases(FLOATS))
@counts_examples("read_index_k")
@tallies(AGREEMENT, "read_index_k")
def test_float_cache_is_gathered_unchanged(case: Case) -> None:
    values, scales = read_index_k(
        case.pool().cache,
        case.table(),
        case.lengths(),
        page_size=case.page_size,
        total=case.total(),
    )
    assert scales is None
    assert_matches(values, case.expected()[0], 0.0)


def _pages(*entries: int) -> torch.Tensor:
    return torch.tensor([entries], dtype=torch.int32)


def _lengths(*lengths: int) -> torch.Tensor:
    return torch.tensor(lengths, dtype=torch.int32)


@pytest.mark.parametrize("kind", QUANTISED)
def test_every_bit_pattern_is_copied(kind: str) -> None:
    pool = make_pool(kind, 2, 64, 4, seed=0)
    page = pool.cache[1].reshape(-1)  # a view: pages are contiguous
    page[:256] = torch.arange(256, dtype=torch.uint8)
    page[256:264] = torch.tensor([1, 0, 0xA0, 0x7F, 1, 0, 0xA0, 0xFF])  # NaNs with a payload
    values, scales = read_index_k(pool.cache, _pages(1), _lengths(64), head_dim=4)
    assert torch.equal(values.view(torch.uint8).flatten(), page[:256])
    assert torch.equal(scales.view(torch.uint8), page[256:512])


def test_what_was_written_is_read_back() -> None:
    pool = make_pool("one layer of a pool", 4, 8, 16, seed=0)
    k = torch.randint(-7, 8, (20, 16)).float()
    k[:, 0] = 448.0  # the scale is 1, and small integers are e4m3 values
    table = _pages(2, 0, 3)
    slots = torch.tensor([int(table[0, i // 8]) * 8 + i % 8 for i in range(20)])
    write_index_k(pool.cache, k, slots, page_size=8)
    values, scales = read_index_k(pool.cache, table, _lengths(20), page_size=8, head_dim=16)
    assert torch.equal(values.float(), k) and (scales == 1).all()


def test_key_without_a_page_can_never_be_selected() -> None:
    # local-inference-lab/b12x#160: page ids above the cache size were read out of bounds.
    pool = make_pool("padded flat pages", 3, 4, 8, seed=0)
    values, scales = read_index_k(
        pool.cache, _pages(0, 7, 2), _lengths(14), page_size=4, head_dim=8
    )
    missing = torch.tensor([4, 5, 6, 7, 12, 13])  # page 7, and positions past the table
    assert (values.view(torch.uint8)[missing] == 0).all() and scales[missing].isnan().all()
    floats = make_pool("float16", 3, 4, 8, seed=0).cache
    values, _ = read_index_k(floats, _pages(0, 7, 2), _lengths(14), page_size=4)
    assert values[missing].isnan().all()


def test_requests_and_keys_span_several_programs() -> None:
    case = Case("nominal 4-D", 70, 3, 9, 4, 16, garbage=True, slack=3, strided=True, seed=1)
    values, scales = read_index_k(
        case.pool().cache, case.table(), case.lengths(), page_size=4, total=case.total()
    )
    assert_matches(values, case.expected()[0], 0.0)
    assert_matches(scales, case.expected()[1].double(), 0.0)


@pytest.mark.parametrize("kind", ["nominal 3-D", "float16"])
@pytest.mark.parametrize("lengths", [[], [0, 0], [-4]])
def test_no_keys_give_no_rows(kind: str, lengths: list[int]) -> None:
    table = torch.zeros((len(lengths), 2), dtype=torch.int32)
    cache = make_pool(kind, 2, 4, 8, seed=0).cache
    values, scales = read_index_k(cache, table, _lengths(*lengths), page_size=4)
    assert values.shape == (0, 8)
    assert scales is None or scales.shape == (0,)


def test_cache_without_pages_gives_rows_without_keys() -> None:
    cache = torch.zeros((0, 4, 1, 12), dtype=torch.uint8)
    values, scales = read_index_k(cache, _pages(0), _lengths(3), page_size=4)
    assert (values.view(torch.uint8) == 0).all() and scales.isnan().all()
    for table in (_pages(), torch.zeros((0, 3), dtype=torch.int32)):
        lengths = _lengths(*[2] * len(table))
        values, scales = read_index_k(
            make_pool("nominal 3-D", 2, 4, 8, seed=0).cache, table, lengths, page_size=4, total=3
        )
        assert (values.view(torch.uint8) == 0).all() and scales.isnan().all()


def test_too_few_rows_raise_before_writing() -> None:
    cache = make_pool("nominal 3-D", 2, 4, 8, seed=0).cache
    values, scales = torch.full((4, 8), 1.0).to(torch.float8_e4m3fn), torch.full((4,), 7.0)
    with pytest.raises(ValueError, match="at least 5, got 4"):
        read_index_k(cache, _pages(0, 1), _lengths(5), page_size=4, out=(values, scales))
    assert (values.float() == 1).all() and (scales == 7).all()


@pytest.mark.parametrize(
    "name, table, length",
    [("context_lens", (0, 1), 9), ("context_lens", (0, 1), -1), ("block_table", (0, 2), 5)],
)
def test_check_mode_rejects_garbage_before_writing(
    monkeypatch: pytest.MonkeyPatch, name: str, table: tuple[int, ...], length: int
) -> None:
    monkeypatch.setenv("LIGHTNING_INDEXER_CHECK", "1")
    cache = make_pool("float32", 2, 4, 8, seed=0).cache
    values = torch.full((10, 8), 1.0)
    with pytest.raises(ValueError, match=name):
        read_index_k(cache, _pages(*table), _lengths(length), page_size=4, out=(values, None))
    assert (values == 1).all()
    # A garbage entry beyond the length is nobody's page.
    read_index_k(cache, _pages(1, 99), _lengths(4), page_size=4, out=(values, None))


@pytest.mark.parametrize("kind", ["one layer of a pool", "bfloat16"])
def test_op_passes_opcheck(kind: str) -> None:
    case = Case(kind, 3, 2, 3, 4, 8, garbage=True, slack=2, strided=True, seed=2)
    out = [torch.zeros((case.total(), 8), dtype=case.pool().cache.dtype)]
    if kind in QUANTISED:
        out.append(torch.zeros(case.total()))
    op = torch.ops.lightning_indexer.read_index_k.default
    arguments = (case.pool().cache, case.table(), case.lengths(), 4)
    torch.library.opcheck(op, arguments, {"out": out})


def test_compiles_without_graph_breaks_when_total_is_given() -> None:
    case = Case("nominal 4-D", 3, 2, 3, 4, 8, garbage=False, slack=1, strided=False, seed=2)
    arguments = (case.pool().cache, case.table(), case.lengths())
    compiled = torch.compile(read_index_k, fullgraph=True, backend="aot_eager")
    values, scales = compiled(*arguments, page_size=4, total=case.total())
    assert_matches(values, case.expected()[0], 0.0)
    assert_matches(scales, case.expected()[1].double(), 0.0)
