from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attention_cases import spread_rows
from counting import AGREEMENT, counts_examples, tallies
from lightning_indexer.kernels.write_mla_kv import write_mla_kv
from lightning_indexer.testing.attention_reference import mla_row, pack_mla_row
from scoring import BF16, FP16, FP32, share, strided


@dataclass(frozen=True)
class Case:
    count: int
    capacity: int
    dtype: torch.dtype
    slot_dtype: torch.dtype
    scale_format: str
    regime: str
    layout: str
    seed: int

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Cache of noise, keys, and slots: some twice, some −1 or outside."""
        g = torch.Generator().manual_seed(self.seed)
        cache = torch.randint(0, 256, (self.capacity, 656), generator=g, dtype=torch.uint8)
        kv = torch.randn(self.count, 576, generator=g)
        if self.regime == "wide":
            kv *= torch.exp2(torch.randint(-20, 14, kv.shape, generator=g).float())
        elif self.regime == "tiny":
            kv *= 2.0**-126
        elif self.regime == "special":
            odd = torch.randint(0, 300, (self.count, 512), generator=g)
            for code, value in enumerate((float("nan"), -float("nan"), float("inf"), -0.0, 0.0)):
                kv[:, :512][odd == code] = value
        low, high = -2, self.capacity + 2
        slots = torch.randint(low, high, (self.count,), generator=g, dtype=self.slot_dtype)
        kv = kv.to(self.dtype)
        if self.layout == "strided":
            return spread_rows(cache), strided(kv), strided(slots)
        return cache, kv, slots


cases = st.builds(
    Case,
    count=st.integers(1, 9),
    capacity=st.integers(1, 8),
    dtype=st.sampled_from((BF16, FP16, FP32)),
    slot_dtype=st.sampled_from((torch.int32, torch.int64)),
    scale_format=st.sampled_from(("fp32", "ue8m0")),
    regime=st.sampled_from(("normal", "wide", "tiny", "special")),
    layout=st.sampled_from(("contiguous", "strided")),
    seed=st.integers(0, 2**31),
)
EXAMPLE = Case(9, 8, BF16, torch.int64, "fp32", "normal", "contiguous", seed=1)


def expected_cache(cache: torch.Tensor, case: Case) -> torch.Tensor:
    _, kv, slots = case.inputs()
    new = cache.clone()
    for row, slot in zip(kv, slots.tolist(), strict=True):
        if 0 <= slot < case.capacity:
            new[slot] = pack_mla_row(row, case.scale_format)
    return new


@share(2)
@given(case=cases)
@counts_examples("write_mla_kv")
@tallies(AGREEMENT, "write_mla_kv")
def test_every_byte_is_the_oracles_and_nothing_else_changes(case: Case) -> None:
    cache, kv, slots = case.inputs()
    expected = expected_cache(cache, case)
    around = cache._base.clone() if cache._base is not None else None
    write_mla_kv(cache, kv, slots, scale_format=case.scale_format)
    assert torch.equal(cache, expected)
    if around is not None:
        cache.copy_(case.inputs()[0])
        assert torch.equal(cache._base, around)


def test_last_of_equal_slots_wins_whole() -> None:
    # many writers of one slot are spread over several programs, which must not tear the row
    kv = torch.randn(40, 576)
    cache = torch.zeros(3, 656, dtype=torch.uint8)
    write_mla_kv(cache, kv, torch.ones(40, dtype=torch.int32))
    assert torch.equal(cache[1], pack_mla_row(kv[-1]))
    assert (cache[[0, 2]] == 0).all()


def test_what_is_written_is_near_what_was_given() -> None:
    kv = torch.randn(4, 576)
    cache = torch.zeros(4, 656, dtype=torch.uint8)
    write_mla_kv(cache, kv, torch.arange(4))
    back = torch.stack([mla_row(cache, i) for i in range(4)])
    amax = kv[:, :512].view(4, 4, 128).abs().amax(2).repeat_interleave(128, 1)
    assert ((back[:, :512] - kv[:, :512]).abs() <= amax / 448 * 16).all()  # half an ulp of 448
    assert torch.equal(back[:, 512:], kv[:, 512:].bfloat16().double())


@pytest.mark.parametrize("count, capacity", [(0, 3), (3, 0)])
def test_without_keys_or_slots_nothing_is_written(count: int, capacity: int) -> None:
    cache = torch.full((capacity, 656), 7, dtype=torch.uint8)
    write_mla_kv(cache, torch.ones(count, 576), torch.zeros(count).int())
    assert (cache == 7).all()


def test_op_passes_opcheck_and_compiles_without_graph_breaks() -> None:
    cache, kv, slots = EXAMPLE.inputs()
    expected = expected_cache(cache, EXAMPLE)
    op = torch.ops.lightning_indexer.write_mla_kv.default
    torch.library.opcheck(op, (cache.clone(), kv, slots, False))
    torch.compile(write_mla_kv, fullgraph=True, backend="aot_eager")(cache, kv, slots)
    assert torch.equal(cache, expected)
