"""Inputs that the tests of sparse MLA attention share."""

from dataclasses import dataclass
from functools import cache

import torch
from hypothesis import strategies as st

from lightning_indexer.testing.attention_reference import (
    attention_error_bounds,
    pack_mla_row,
    sparse_mla_attention,
)
from lightning_indexer.testing.compare import assert_matches
from scoring import BF16, FP16, FP32, strided

DTYPES = {"bf16": BF16, "fp16": FP16, "fp32": FP32}
#: (Dqk, v_dim): all of it values, a RoPE part, odd widths, and more slices than one.
DIMS = ((16, 16), (40, 32), (33, 5), (24, 1), (100, 100), (144, 128), (300, 140))
HEADS = (1, 2, 3, 8, 16, 17, 40)
INDICES = ("full", "holes", "tail", "repeated", "outside", "empty rows")
FP8_DIM, FP8_V_DIM = 576, 512


@dataclass(frozen=True)
class AttentionCase:
    """A call; tensors follow from it. `fp8` has rows of 656 bytes and their dims."""

    rows: int
    slots: int
    width: int
    heads: int
    dims: tuple[int, int]
    dtype: str
    fp8: bool
    regime: str
    indices: str
    index_dtype: torch.dtype
    layout: str
    seed: int

    def inputs(self) -> dict:
        """Arguments of the op. Rows that no index names are NaN, in part infinite."""
        g = torch.Generator().manual_seed(self.seed)
        dim, v_dim = (FP8_DIM, FP8_V_DIM) if self.fp8 else self.dims
        dtype = DTYPES[self.dtype]
        spread = {"normal": 1.0, "sharp": 12.0, "flat": 0.0}[self.regime]
        q = spread * torch.randn((self.rows, self.heads, dim), generator=g)
        indices = self._indices(g).to(self.index_dtype)
        kv = _byte_rows(self.slots) if self.fp8 else torch.randn((self.slots, dim), generator=g)
        kv = kv.clone() if self.fp8 else kv.to(dtype)
        named = indices[(indices >= 0) & (indices < self.slots)].long()
        unread = torch.ones(self.slots, dtype=torch.bool)
        unread[named] = False
        kv[unread] = 0x7F if self.fp8 else torch.nan
        kv[unread.nonzero()[::2, 0], ::3] = 0xFF if self.fp8 else torch.inf
        tensors = {"q": q.to(dtype), "kv": kv, "indices": indices}
        if self.layout == "strided":
            tensors = {n: x if x.dtype == torch.uint8 else strided(x) for n, x in tensors.items()}
            tensors["kv"] = spread_rows(kv) if self.fp8 else tensors["kv"]
        return tensors | {"scale": dim**-0.5, "v_dim": v_dim}

    def _indices(self, g: torch.Generator) -> torch.Tensor:
        shape = (self.rows, self.width)
        indices = torch.randint(0, self.slots, shape, generator=g)
        if self.indices == "holes":
            indices[torch.rand(shape, generator=g) < 0.4] = -1
        elif self.indices == "tail":
            ends = torch.randint(0, self.width + 1, (self.rows, 1), generator=g)
            indices[torch.arange(self.width) >= ends] = -1
        elif self.indices == "repeated":
            indices %= 2
        elif self.indices == "outside":
            far = torch.tensor([-(2**31), -2, self.slots, 2**31 - 1])
            bad = torch.rand(shape, generator=g) < 0.4
            indices[bad] = far[torch.randint(0, 4, (int(bad.sum()),), generator=g)]
        elif self.indices == "empty rows":
            indices[::2] = -1
        return indices


@cache
def _byte_rows(slots: int) -> torch.Tensor:
    """656-byte rows whose groups of 128 values differ in magnitude."""
    rows = torch.randn((slots, FP8_DIM), generator=torch.Generator().manual_seed(slots))
    rows[:, :FP8_V_DIM] *= torch.exp2(torch.arange(FP8_V_DIM) // 128 - 2.0)
    return torch.stack([pack_mla_row(row) for row in rows])


def spread_rows(kv: torch.Tensor) -> torch.Tensor:
    """A copy of 656-byte rows that lie apart, in a larger allocation."""
    backing = torch.full((kv.shape[0] + 1, kv.shape[1] + 28), 0x7F, dtype=torch.uint8)
    backing[1:, 24:-4] = kv
    return backing[1:, 24:-4]


def attention_cases(fp8: bool) -> st.SearchStrategy[AttentionCase]:
    return st.builds(
        AttentionCase,
        rows=st.integers(1, 4),
        slots=st.integers(1, 12) if fp8 else st.integers(1, 90),
        width=st.integers(1, 20) if fp8 else st.integers(1, 150),
        heads=st.sampled_from(HEADS),
        dims=st.sampled_from(DIMS),
        dtype=st.sampled_from(("bf16", "fp16") if fp8 else tuple(DTYPES)),
        fp8=st.just(fp8),
        regime=st.sampled_from(("normal", "sharp", "flat")),
        indices=st.sampled_from(INDICES),
        index_dtype=st.sampled_from((torch.int32, torch.int64)),
        layout=st.sampled_from(("contiguous", "strided")),
        seed=st.integers(0, 2**31),
    )


def assert_is_attention(
    result: tuple[torch.Tensor, torch.Tensor], inputs: dict, operand: float = 2.0**-24
) -> None:
    """Out and lse are the oracle's within the derived bounds; `operand`: see there."""
    expected = sparse_mla_attention(**inputs)
    bounds = attention_error_bounds(**inputs, operand=operand)
    for got, want, bound in zip(result, expected, bounds, strict=True):
        assert_matches(got.cpu(), want, bound)
