"""Calls of the ops, each told by a few numbers: shape, regime, layout, seed. Tensors follow.

A case is frozen, and its repr is Python: what a report prints can be pasted into a test.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .layouts import laid_out
from .regimes import FP8, score_rows, values

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
#: Dtypes of queries and keys that go together.
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


@dataclass(frozen=True)
class TopkCase:
    """A selection of k of each row's scores; `windows` says which bounds are given."""

    rows: int
    length: int
    k: int
    regime: str
    dtype: torch.dtype
    layout: str
    windows: str  # "none", "ends", "both"
    bound_dtype: torch.dtype
    seed: int

    def logits(self) -> torch.Tensor:
        """[rows, length] scores of the regime."""
        x = score_rows(self.regime, self.rows, self.length, self.k, self.dtype, self.seed)
        return laid_out(x, self.layout)

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

    def inputs(self) -> dict[str, Any]:
        """Arguments of `topk_indices` by name."""
        starts, ends = self.bounds()
        return {"logits": self.logits(), "k": self.k, "row_starts": starts, "row_ends": ends}


@dataclass(frozen=True)
class MqaLogitsCase:
    """A ragged scoring call."""

    rows: int
    length: int
    heads: int
    head_dim: int
    dtypes: str  # of DTYPE_PAIRS
    scaled: bool
    regime: str
    windows: str  # "full", "causal", "packed", "any"
    layout: str
    seed: int

    def generator(self) -> torch.Generator:
        """The case's source of chance, at its start."""
        return torch.Generator().manual_seed(self.seed)

    def inputs(self) -> dict[str, Any]:
        """Arguments of `mqa_logits` by name."""
        g, (q_dtype, k_dtype) = self.generator(), DTYPE_PAIRS[self.dtypes]
        starts, ends = self._windows(g)
        k_scale = torch.rand(self.length, generator=g) if self.scaled else None
        if k_scale is not None and self.regime == "zero scale":
            k_scale.zero_()
        # Special values in the weights would leave no score without one.
        plain = "normal" if self.regime in ("infinite", "nan") else self.regime
        tensors = {
            "q": values((self.rows, self.heads, self.head_dim), q_dtype, plain, g),
            "k": values((self.length, self.head_dim), k_dtype, self.regime, g),
            "weights": values((self.rows, self.heads), FP32, plain, g),
            "row_starts": starts,
            "row_ends": ends,
            "k_scale": k_scale,
        }
        return {n: x if x is None else laid_out(x, self.layout) for n, x in tensors.items()}

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


@dataclass(frozen=True)
class CompactCase:
    """A compaction, in place, of one or several buffers of `height` rows."""

    height: int
    widths: tuple[int, ...]
    n: int
    num_rows: int | None
    order: str  # of ROW_ORDERS
    rows_dtype: torch.dtype
    layout: str
    seed: int

    @property
    def limit(self) -> int:
        """Row ids are below it."""
        return self.height if self.num_rows is None else min(self.num_rows, self.height)

    def buffers(self) -> list[torch.Tensor]:
        """[height, width] int32 each."""
        g = torch.Generator().manual_seed(self.seed)
        drawn = [torch.randint(-1, 1000, (self.height, w), generator=g) for w in self.widths]
        return [laid_out(x.to(torch.int32), self.layout) for x in drawn]

    def rows(self) -> torch.Tensor:
        """[min(n, height)] row ids."""
        n, limit = min(self.n, self.height), self.limit
        generator = torch.Generator().manual_seed(self.seed + 1)
        if self.order == "reversed":  # overwrites rows that are still to be read
            ids = torch.arange(n).flip(0)
        elif self.order == "shifted":
            ids = torch.arange(n) - 1
        elif self.order == "last of each":  # what the lifecycle asks for
            ids = (torch.arange(1, n + 1) * max(limit // max(n, 1), 1)) - 1
        else:
            low, high = (-3, limit + 3) if self.order == "wild" else (0, max(limit, 1))
            ids = torch.randint(low, high, (n,), generator=generator)
        if self.order != "wild":  # the others promise ids of rows that there are
            ids = ids.clamp(0, max(limit - 1, 0))
        return laid_out(ids.to(self.rows_dtype), self.layout)


ROW_ORDERS = ("random", "wild", "reversed", "shifted", "last of each")


@dataclass(frozen=True)
class SlotsCase:
    """Positions to slots; `garbage`: positions past the table, unknown requests and pages."""

    rows: int
    width: int
    requests: int
    blocks: int
    page_size: int
    slot_dtype: torch.dtype  # of row_to_request, and of the result where the caller may choose
    garbage: bool
    layout: str
    seed: int

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """indices [rows, width], block_table [requests, blocks], row_to_request [rows]."""
        g = torch.Generator().manual_seed(self.seed)

        def draw(low: int, high: int, *shape: int) -> torch.Tensor:
            return torch.randint(low, max(high, low + 1), shape, generator=g).to(torch.int32)

        slack = 2 * self.page_size if self.garbage else 0
        known = self.requests + (2 if self.garbage else 0)
        lowest, least = (-3, -2) if self.garbage else (-1, 0)
        indices = draw(lowest, self.blocks * self.page_size + slack, self.rows, self.width)
        table = draw(0, 1000, self.requests, self.blocks)
        if self.garbage:  # now and then a page that was never assigned
            unassigned = torch.rand(table.shape, generator=g) < 0.2
            table = torch.where(unassigned, draw(-2, 0, *table.shape), table)
        requests = draw(least, known, self.rows).to(self.slot_dtype)
        indices, table, requests = (laid_out(x, self.layout) for x in (indices, table, requests))
        return indices, table, requests
