"""Inputs and error bounds that the scoring tests share."""

from dataclasses import dataclass

import torch
from hypothesis import settings
from hypothesis import strategies as st

from lightning_indexer.kernels.backend import INTERPRET
from lightning_indexer.testing.reference import to_float64

FP8, BF16, FP16, FP32 = torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float32
DTYPE_PAIRS = {
    "fp8": (FP8, FP8),
    "bf16": (BF16, BF16),
    "fp16": (FP16, FP16),
    "fp32": (FP32, FP32),
    "bf16 queries, fp8 keys": (BF16, FP8),
    "fp16 queries, fp8 keys": (FP16, FP8),
    "fp32 queries, fp8 keys": (FP32, FP8),
    "fp32 queries, bf16 keys": (FP32, BF16),
    "fp32 queries, fp16 keys": (FP32, FP16),
}
REGIMES = ("normal", "ties", "spread")
HEADS = (1, 2, 3, 4, 5, 16, 24, 33, 64)
HEAD_DIMS = (8, 32, 33, 40, 96, 128)
ROUNDING = 2.0**-24
#: numpy's BLAS, which multiplies for the interpreter, rounds by the place in the matrix. Tests that
#: move queries and keys about can expect equal bits there only of sums that are exact.
MOVABLE_REGIME = "ties" if INTERPRET else None


def share(part: int) -> settings:
    """One `part`-th of the profile's examples: the tests of an op together make up the whole."""
    return settings(max_examples=max(3, -(-settings().max_examples // part)))


def values(
    shape: tuple[int, ...], dtype: torch.dtype, regime: str, generator: torch.Generator
) -> torch.Tensor:
    """Values in the range of every dtype; "ties" makes most scores equal, many of them 0."""
    if regime == "ties":
        return torch.randint(-1, 2, shape, generator=generator).float().to(dtype)
    x = torch.randn(shape, generator=generator)
    if regime == "spread":
        x *= torch.exp2(torch.randint(-6, 7, shape, generator=generator).float())
    return x.clamp(-400, 400).to(dtype)


def strided(x: torch.Tensor) -> torch.Tensor:
    """A copy of `x` whose axes lie in reverse order, every other element, at an odd offset."""
    flat = x.view(torch.uint8) if x.dtype == FP8 else x
    backing = torch.ones([2 * n + 1 for n in reversed(x.shape)], dtype=flat.dtype)
    view = backing.permute(*reversed(range(x.dim())))[(slice(1, None, 2),) * x.dim()]
    view.copy_(flat)
    return view.view(FP8) if x.dtype == FP8 else view


@dataclass(frozen=True)
class Canary:
    """An output with strange strides inside a poisoned tensor."""

    around: torch.Tensor
    out: torch.Tensor

    POISON = 12345.0

    @classmethod
    def of(cls, rows: int, width: int, dtype: torch.dtype = torch.float32) -> "Canary":
        around = torch.full((rows + 2, 2 * width + 2), cls.POISON).to(dtype)
        return cls(around, around[1:-1, 1:-1:2])

    def assert_nothing_else_written(self) -> None:
        self.out.fill_(self.POISON)
        assert (self.around == self.POISON).all()


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))


def score_bound(
    q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor, k_scale: torch.Tensor | None
) -> torch.Tensor:
    """Error of fp32 sums of D products and H heads in any order, and of the scale: [T, L].

    |error| ≤ γ(D+H+3)·|scale|·Σ_h |w|·Σ_d |q||k| (Higham, γ(n) = n·u/(1 − n·u)), and what
    underflows.
    """
    q64, k64 = to_float64(q).abs(), to_float64(k).abs()
    magnitude = torch.einsum("thd,ld,th->tl", q64, k64, weights.double().abs())
    if k_scale is not None:
        magnitude = magnitude * k_scale.double().abs()
    n = (q.shape[1] + q.shape[2] + 3) * ROUNDING
    return (n / (1 - n) * magnitude + 2.0**-120).nan_to_num(nan=torch.inf)


@dataclass(frozen=True)
class ScoreCase:
    """A ragged call; tensors follow from it."""

    rows: int
    length: int
    heads: int
    head_dim: int
    dtypes: str
    scaled: bool
    regime: str
    windows: str
    layout: str
    seed: int

    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed)

    def inputs(self) -> dict[str, torch.Tensor | None]:
        g, (q_dtype, k_dtype) = self.generator(), DTYPE_PAIRS[self.dtypes]
        starts, ends = self._windows(g)
        tensors = {
            "q": values((self.rows, self.heads, self.head_dim), q_dtype, self.regime, g),
            "k": values((self.length, self.head_dim), k_dtype, self.regime, g),
            "weights": values((self.rows, self.heads), FP32, self.regime, g),
            "row_starts": starts,
            "row_ends": ends,
            "k_scale": torch.rand(self.length, generator=g) if self.scaled else None,
        }
        if self.layout == "strided":
            tensors = {n: x if x is None else strided(x) for n, x in tensors.items()}
        return tensors

    def _windows(self, g: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        rows, length = self.rows, self.length
        starts, ends = torch.zeros(rows), torch.full((rows,), length)
        if self.windows == "causal":
            ends = length - rows + 1 + torch.arange(rows)
        elif self.windows == "packed":  # several sequences in one call: rows see their own
            cut = length // 2
            first = torch.arange(rows) < rows // 2
            starts, ends = torch.where(first, 0, cut), torch.where(first, cut, length)
        elif self.windows == "any":
            starts = torch.randint(-3, length + 3, (rows,), generator=g)
            ends = torch.randint(-3, length + 3, (rows,), generator=g)
        return starts.to(torch.int32), ends.to(torch.int32)


def _cases(rows: int, length: int) -> st.SearchStrategy[ScoreCase]:
    return st.builds(
        ScoreCase,
        rows=st.integers(1, rows),
        length=st.integers(1, length),
        heads=st.sampled_from(HEADS),
        head_dim=st.sampled_from(HEAD_DIMS),
        dtypes=st.sampled_from(tuple(DTYPE_PAIRS)),
        scaled=st.booleans(),
        regime=st.sampled_from(REGIMES),
        windows=st.sampled_from(("full", "causal", "packed", "any")),
        layout=st.sampled_from(("contiguous", "strided")),
        seed=st.integers(0, 2**31),
    )


score_cases = _cases(rows=20, length=150)
few_rows = _cases(rows=4, length=80)  # selection is slow in the interpreter
