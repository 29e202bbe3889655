from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from counting import AGREEMENT, counts_examples, tallies
from lightning_indexer.kernels.cache_layout import split_pages
from lightning_indexer.kernels.write_index_k import write_index_k
from lightning_indexer.testing import reference
from lightning_indexer.testing.caches import FLOATS, QUANTISED, Pool, make_pool
from lightning_indexer.testing.compare import assert_matches

REGIMES = ("normal", "wide", "tiny", "zero", "special")
KEY_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Case:
    kind: str
    count: int
    head_dim: int
    pages: int
    page_size: int
    dtype: torch.dtype
    slot_dtype: torch.dtype
    scale_format: str
    regime: str
    strided: bool
    seed: int

    def pool(self) -> Pool:
        return make_pool(self.kind, self.pages, self.page_size, self.head_dim, self.seed)

    def keys(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        shape = (self.count, self.head_dim)
        if self.strided:  # columns of a wider projection, every other row
            shape = (2 * self.count, self.head_dim + 3)
        x = torch.randn(shape, generator=generator)
        if self.regime == "wide":
            x *= torch.exp2(torch.randint(-20, 14, shape, generator=generator).float())
        elif self.regime == "tiny":
            x *= 2.0**-126
        elif self.regime == "zero":
            x *= 0.0
        elif self.regime == "special":
            odd = torch.randint(0, 40, shape, generator=generator)
            for code, value in enumerate((float("nan"), -float("nan"), float("inf"), -0.0, 1e-40)):
                x[odd == code] = value
        x = x.to(self.dtype)
        return x[::2, 3:] if self.strided else x

    def slots(self) -> torch.Tensor:
        """Mostly in the cache, some twice, some −1 or outside."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        capacity = self.pages * self.page_size
        shape = (self.count, 2) if self.strided else (self.count,)
        slots = torch.randint(-2, capacity + 2, shape, generator=generator, dtype=self.slot_dtype)
        return slots[:, 1] if self.strided else slots


def draw_cases(kinds: tuple[str, ...]) -> st.SearchStrategy[Case]:
    return st.builds(
        Case,
        kind=st.sampled_from(kinds),
        count=st.integers(1, 12),
        head_dim=st.sampled_from([4, 12, 16, 32]),
        pages=st.integers(1, 3),
        page_size=st.sampled_from([1, 4, 8]),
        dtype=st.sampled_from(KEY_DTYPES),
        slot_dtype=st.sampled_from([torch.int32, torch.int64]),
        scale_format=st.sampled_from(["fp32", "ue8m0"]),
        regime=st.sampled_from(REGIMES),
        strided=st.booleans(),
        seed=st.integers(0, 2**31),
    )


@given(case=draw_cases(QUANTISED))
@counts_examples("write_index_k")
@tallies(AGREEMENT, "write_index_k")
def test_every_byte_is_the_oracles_and_nothing_else_changes(case: Case) -> None:
    pool, k, slots = case.pool(), case.keys(), case.slots()
    options = {"page_size": case.page_size, "scale_format": case.scale_format}
    expected = pool.clone()
    expected.cache.copy_(reference.write_index_k(pool.cache, k, slots, **options))
    write_index_k(pool.cache, k, slots, **options)
    assert torch.equal(pool.backing, expected.backing)


@given(case=draw_cases(FLOATS))
@counts_examples("write_index_k")
@tallies(AGREEMENT, "write_index_k")
def test_float_cache_holds_the_keys_rounded_to_nearest_even(case: Case) -> None:
    pool, k, slots = case.pool(), case.keys(), case.slots()
    expected = pool.clone()
    expected.cache.copy_(reference.write_index_k(pool.cache, k, slots, page_size=case.page_size))
    write_index_k(pool.cache, k, slots, page_size=case.page_size)
    assert_matches(pool.backing, expected.backing.double(), 0.0)


@pytest.mark.parametrize("kind", ["nominal 4-D", "float32 permuted"])
def test_last_of_equal_slots_wins_whole(kind: str) -> None:
    # 300 writers of one slot are spread over many programs, which must not tear the row.
    k, slots = torch.randn(300, 16).bfloat16(), torch.full((300,), 5)
    pool = make_pool(kind, 2, 4, 16, seed=0)
    only_last = pool.clone()
    write_index_k(pool.cache, k, slots, page_size=4)
    write_index_k(only_last.cache, k[-1:], slots[-1:], page_size=4)
    assert torch.equal(pool.backing, only_last.backing)


def _written(k: torch.Tensor, **options: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Payload bytes and scales of `k` in a fresh cache."""
    count, dim = k.shape
    cache = torch.zeros((1, count, dim + 4), dtype=torch.uint8)
    write_index_k(cache, k, torch.arange(count), page_size=count, **options)
    values, scales = split_pages(cache, count, dim)
    return values[0], scales[0]


def test_payload_rounds_like_float8_e4m3fn_at_every_boundary() -> None:
    # Every e4m3 value, the midpoint after it, and the fp32 neighbours of both, both signs; 448
    # in each row makes the scale 1.
    grid = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    points = torch.cat([grid, (grid[:-1] + grid[1:]) / 2])
    away = torch.full_like(points, torch.inf)
    points = torch.cat([points, points.nextafter(away), points.nextafter(-away)])
    points = torch.cat([points, -points]).clamp(-448.0, 448.0)
    k = torch.cat([points.view(-1, 2), torch.full((len(points) // 2, 2), 448.0)], dim=1)
    payload, scales = _written(k)
    assert (scales == 1.0).all()
    assert torch.equal(payload, k.to(torch.float8_e4m3fn).view(torch.uint8))


def test_scale_is_the_power_of_two_ceiling() -> None:
    amax = torch.tensor([0.0, 1e-4, 448.0, 448.1, 896.0, 1.0, 3.0e38, float("inf")])
    k = amax[:, None] * torch.tensor([1.0, 0.0, 0.0, 0.0])
    k.nan_to_num_(nan=0.0, posinf=float("inf"))
    exact = _written(k)[1]
    rounded = _written(k, scale_format="ue8m0")[1]
    assert torch.equal(rounded[:-1], torch.exp2(exact[:-1].double().log2().ceil()).float())
    assert rounded[2:5].tolist() == [1.0, 2.0, 2.0]
    assert rounded[-1] == float("inf")


@pytest.mark.parametrize("scale_format", ["fp32", "ue8m0"])
def test_zero_key_has_zero_bytes_and_a_finite_positive_scale(scale_format: str) -> None:
    # ROCm/aiter#4291: scale 0 made 0·(1/0) = NaN.
    payload, scales = _written(torch.zeros(1, 128), scale_format=scale_format)
    assert (payload == 0).all() and 0 < float(scales) < 1e-6


def test_lanes_beyond_the_key_do_not_reach_its_scale() -> None:
    # ROCm/aiter#4291: width 100, padded to 128 lanes that hold poison.
    poisoned = torch.full((3, 128), 1e30)
    poisoned[:, :100] = torch.linspace(-2, 2, 100)
    payload, scales = _written(poisoned[:, :100])
    assert torch.allclose(scales, torch.tensor(2 / 448), rtol=1e-6, atol=0)
    assert payload[0, 0] == 0xFE and payload[0, 99] == 0x7E


def test_nan_is_0x7f_and_infinity_makes_the_scale_infinite() -> None:
    nan, inf = float("nan"), float("inf")
    payload, scales = _written(torch.tensor([[nan, -nan, 4.0, -4.0], [inf, -inf, nan, -1.0]]))
    assert payload.tolist() == [[0x7F, 0x7F, 0x7E, 0xFE], [0x7F, 0x7F, 0x7F, 0x80]]
    assert scales[0] == torch.tensor(4.0) / 448 and scales[1] == inf


def test_many_keys_and_repeated_slots_span_several_programs() -> None:
    case = Case(
        "one layer of a pool", 150, 16, 3, 8, torch.bfloat16, torch.int64, "fp32", "normal",
        strided=True, seed=5,
    )  # fmt: skip
    pool, k, slots = case.pool(), case.keys(), case.slots()
    expected = reference.write_index_k(pool.cache, k, slots, page_size=8)
    write_index_k(pool.cache, k, slots, page_size=8)
    assert torch.equal(pool.cache, expected)


@pytest.mark.parametrize("kind", ["nominal 4-D", "float16"])
@pytest.mark.parametrize("count, pages", [(0, 2), (3, 0)])
def test_no_keys_or_no_pages_write_nothing(kind: str, count: int, pages: int) -> None:
    pool = make_pool(kind, pages, 4, 8, seed=0)
    before = pool.clone()
    write_index_k(pool.cache, torch.ones(count, 8), torch.zeros(count).int(), page_size=4)
    assert torch.equal(pool.backing, before.backing)


def _example(kind: str = "nominal 4-D") -> Case:
    return Case(
        kind, 9, 16, 2, 4, torch.bfloat16, torch.int64, "fp32", "normal", strided=False, seed=3
    )


@pytest.mark.parametrize("slot", [-2, 8])
def test_check_mode_rejects_slots_outside_the_cache_before_writing(
    monkeypatch: pytest.MonkeyPatch, slot: int
) -> None:
    monkeypatch.setenv("LIGHTNING_INDEXER_CHECK", "1")
    pool = _example().pool()
    before = pool.clone()
    with pytest.raises(ValueError, match="slots"):
        write_index_k(pool.cache, torch.ones(3, 16), torch.tensor([0, -1, slot]), page_size=4)
    assert torch.equal(pool.backing, before.backing)
    write_index_k(pool.cache, torch.ones(2, 16), torch.tensor([7, -1]), page_size=4)
    assert not torch.equal(pool.backing, before.backing)


@pytest.mark.parametrize("kind", ["one layer of a pool", "bfloat16"])
def test_op_passes_opcheck(kind: str) -> None:
    case = _example(kind)
    op = torch.ops.lightning_indexer.write_index_k.default
    torch.library.opcheck(op, (case.pool().cache, case.keys(), case.slots(), 4, False))


def test_compiles_without_graph_breaks() -> None:
    case = _example()
    pool, expected = case.pool(), case.pool()
    write_index_k(expected.cache, case.keys(), case.slots(), page_size=4)
    compiled = torch.compile(write_index_k, fullgraph=True, backend="aot_eager")
    compiled(pool.cache, case.keys(), case.slots(), page_size=4)
    assert torch.equal(pool.backing, expected.backing)
