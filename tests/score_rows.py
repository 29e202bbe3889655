"""Score rows that a selection meets, drawn from a shape, a regime and a seed."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from unittest.mock import patch

import torch
from hypothesis import strategies as st

from lightning_indexer.kernels import topk_cpu, topk_kernel
from lightning_indexer.kernels.topk_plan import TopkPlan

INF, NAN = float("inf"), float("nan")
REGIMES = (
    "normal",
    "rounded",  # a few distinct values: ties at every boundary
    "relu",  # half of the scores exactly 0, of either sign
    "subnormal",
    "close",  # all within one bin of a coarse histogram
    "special",  # NaN of both signs, −inf and +inf between the numbers
    "nothing",  # NaN and −inf alone
)
LAYOUTS = ("contiguous", "padded", "transposed", "every other column")


def scores(rows: int, length: int, regime: str, seed: int) -> torch.Tensor:
    """[rows, length] fp32."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, length, generator=generator)
    if regime == "rounded":
        return x.round()
    if regime == "relu":
        return x.clamp(min=0) * torch.where(torch.rand(x.shape, generator=generator) < 0.5, -0.0, 1)
    if regime == "subnormal":
        return x * 2.0**-140
    if regime == "close":
        return 1 + x.abs() * 2.0**-20
    if regime in ("special", "nothing"):
        fill = torch.tensor([NAN, -NAN, -INF, INF if regime == "special" else -INF])
        pick = torch.randint(0, 4, x.shape, generator=generator)
        rare = torch.rand(x.shape, generator=generator) < (0.4 if regime == "special" else 2)
        return torch.where(rare, fill[pick], x)
    return x


def laid_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    """`x` as a view of that layout, between elements that would win any selection."""
    rows, length = x.shape
    if layout == "transposed":
        return x.T.contiguous().T
    if layout == "padded":
        view = torch.full((rows, length + 7), INF, dtype=x.dtype)[:, 3 : 3 + length]
    elif layout == "every other column":
        view = torch.full((rows, 2 * length + 1), INF, dtype=x.dtype)[:, 1::2]
    else:
        return x.contiguous()
    return view.copy_(x)


@dataclass(frozen=True)
class RowsCase:
    rows: int
    length: int
    k: int
    regime: str
    dtype: torch.dtype
    layout: str
    windows: str  # "none", "ends", "both": which bounds are given
    bound_dtype: torch.dtype
    small_pieces: bool
    seed: int

    def logits(self) -> torch.Tensor:
        return laid_out(
            scores(self.rows, self.length, self.regime, self.seed).to(self.dtype), self.layout
        )

    def bounds(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Windows of every kind: inside the row, past its end, negative, empty."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        starts, ends = (
            torch.randint(low, self.length + 4, (self.rows,), generator=generator).to(
                self.bound_dtype
            )
            for low in (-self.length - 3, -3)
        )
        if self.windows == "none":
            return None, None
        return (starts if self.windows == "both" else None), ends


def small_plan(seed: int) -> TopkPlan:
    """One of the ways to launch the kernels, with lists and tiles that short rows outgrow."""
    return TopkPlan(
        capacity=(16, 64)[seed // 8 % 2],
        samples=(8, 16)[seed // 4 % 2],
        threads=8,  # tiles of 256 scores
        pop_words=(8, 32)[seed // 4 % 2],
        launch_rows=1,
        splits=(1, 3)[seed // 2 % 2],
        histogram=bool(seed % 2),
    )


@contextmanager
def in_small_pieces(enabled: bool = True, seed: int = 0) -> Iterator[None]:
    """Small chunks, tiles and lists, so that short rows take the paths of long ones."""
    if not enabled:
        yield
        return

    def plan(_target: object, _multiprocessors: int, rows: int, _length: int) -> TopkPlan:
        small = small_plan(seed)
        return small if small.splits == 1 else replace(small, launch_rows=rows)

    with (
        patch.object(topk_cpu, "CHUNK_SCORES", 64),
        patch.object(topk_kernel, "plan_topk", plan),
    ):
        yield


row_cases = st.builds(
    RowsCase,
    rows=st.integers(1, 2),
    length=st.integers(1, 150) | st.integers(250, 800),
    k=st.integers(1, 60) | st.integers(1, 5) | st.integers(140, 170) | st.integers(1, 900),
    regime=st.sampled_from(REGIMES),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    layout=st.sampled_from(LAYOUTS),
    windows=st.sampled_from(["none", "ends", "both"]),
    bound_dtype=st.sampled_from([torch.int32, torch.int64]),
    small_pieces=st.booleans(),
    seed=st.integers(0, 2**31),
)
