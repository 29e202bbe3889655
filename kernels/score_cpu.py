"""Scores on a CPU, in fp32 for every dtype.

The bits of a BLAS product depend on its shape, so each query tile and key tile is multiplied in
one fixed shape per (H, D), partial tiles zero-padded: [rows·H, D] × [D, keys]. A score then
depends on its own query and key alone, not on T, L, the chunking or the tile's other rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from .e4m3 import E4M3_VALUES

NEG_INF = float("-inf")
#: A product of fewer rows is slow, and of three or fewer another kernel of other bits (gemv).
MIN_PRODUCT_ROWS = 64
#: Tiles of queries that share the elementwise passes, whose call overhead would else show.
GROUP = 8

#: `load(first, count, keys)` writes keys [count, D] and returns their scales and which are missing.
LoadKeys = Callable[[int, int, torch.Tensor], tuple[torch.Tensor | None, torch.Tensor | None]]


def widen_into(out: torch.Tensor, values: torch.Tensor) -> None:
    """out ← values, exactly; uint8 holds e4m3fn (by table: a cast is four times slower)."""
    if values.dtype == torch.uint8:
        torch.index_select(E4M3_VALUES, 0, values.flatten().int(), out=out.view(-1))
    else:
        out.copy_(values)


@contextmanager
def ieee_products() -> Iterator[None]:
    """fp32 products stay fp32, although `set_float32_matmul_precision` may allow bf16."""
    matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]  # a property at run time
    asked = matmul.fp32_precision
    if asked in ("none", "ieee"):
        yield
        return
    matmul.fp32_precision = "ieee"
    try:
        yield
    finally:
        matmul.fp32_precision = asked


def tile_shape(heads: int, head_dim: int) -> tuple[int, int]:
    """Rows and keys of a tile; nothing else may choose them."""
    rows = -(-MIN_PRODUCT_ROWS // heads)
    # 512 keys fill the L2 cache about once; small models have short contexts to pad
    return rows, 512 if rows * heads * head_dim > 64 * 64 else 256


class CpuScorer:
    """One call's workspace, and the scores of any number of query runs through it."""

    def __init__(self, heads: int, head_dim: int, most_rows: int) -> None:
        """Allocates what runs of up to `most_rows` query rows need, whatever their L."""

        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.float32, device="cpu")

        rows, width = tile_shape(heads, head_dim)
        group_rows = rows * min(GROUP, -(-most_rows // rows))
        self.tile_rows, self.tile_keys, self.group_rows = rows, width, group_rows
        self.queries = empty(group_rows, heads, head_dim)
        self.weights = empty(group_rows, 1, heads)
        self.scores = empty(group_rows, 1, width)
        self.keys = empty(width, head_dim)
        self.dots = empty(rows * heads, width)
        self.keys_t = self.keys.t()
        self.dots_by_row = self.dots.view(rows, heads, width)
        self.tiles = [
            (
                self.queries[i : i + rows].view(rows * heads, head_dim),
                self.weights[i : i + rows],
                self.scores[i : i + rows],
            )
            for i in range(0, group_rows, rows)
        ]

    @torch.no_grad()  # out= takes no tensor that requires a gradient
    def run(
        self,
        q: torch.Tensor,
        weights: torch.Tensor,
        starts: Sequence[int],
        ends: Sequence[int],
        load: LoadKeys,
        out: torch.Tensor,
    ) -> None:
        """Writes the scores of q [R, H, D] in [start, end) of each row into out [R, L].

        Windows lie within [0, L), or are empty. Some of what lies outside is set to −inf.
        """
        spans = _tile_spans(starts, ends, self.tile_rows)
        live = [span for span in spans if span[0] < span[1]]
        stop = max((end for _, end in live), default=0)
        for first in range(min((start for start, _ in live), default=0), stop, self.tile_keys):
            last = min(first + self.tile_keys, stop)
            self.keys[last - first :].zero_()
            scale, missing = load(first, last - first, self.keys[: last - first])
            for row in range(0, q.shape[0], self.group_rows):
                rows = slice(row, row + self.group_rows)
                tile = row // self.tile_rows
                touched = [
                    i
                    for i, (start, end) in enumerate(spans[tile : tile + len(self.tiles)])
                    if start < last and end > first
                ]
                if not touched:
                    continue
                scores = self._products(q[rows], weights[rows], touched)[:, : last - first]
                if scale is not None:
                    scores.mul_(scale)
                unseen = _unseen(starts[rows], ends[rows], first, last)
                if unseen is not None:
                    scores.masked_fill_(unseen, NEG_INF)
                if missing is not None:
                    scores.masked_fill_(missing, NEG_INF)
                out[rows, first:last] = scores

    def _products(
        self, q: torch.Tensor, weights: torch.Tensor, touched: Sequence[int]
    ) -> torch.Tensor:
        """Σ_h weights·relu(q·k) of the touched tiles of a group: [rows, tile keys]."""
        count = q.shape[0]
        widen_into(self.queries[:count], q)
        self.weights[:count, 0] = weights
        if count < self.group_rows:
            self.queries[count:].zero_()
            self.weights[count:].zero_()
        with ieee_products():
            for i in touched:
                queries, head_weights, scores = self.tiles[i]
                # autocast would make mm and bmm round to bf16, but lets out= be
                torch.mm(queries, self.keys_t, out=self.dots)
                self.dots.relu_()
                torch.bmm(head_weights, self.dots_by_row, out=scores)
        return self.scores[:count, 0]


def _tile_spans(starts: Sequence[int], ends: Sequence[int], rows: int) -> list[tuple[int, int]]:
    """The smallest span of positions that holds every window of each `rows` rows."""
    spans = []
    for i in range(0, len(starts), rows):
        pairs = zip(starts[i : i + rows], ends[i : i + rows], strict=True)
        windows = [(start, end) for start, end in pairs if start < end]
        first = min((start for start, _ in windows), default=0)
        spans.append((first, max((end for _, end in windows), default=0)))
    return spans


def _unseen(
    starts: Sequence[int], ends: Sequence[int], first: int, last: int
) -> torch.Tensor | None:
    """Which positions of [first, last) lie outside the rows' windows; None if none does."""
    if all(s <= first and e >= last for s, e in zip(starts, ends, strict=True)):
        return None
    bounds = torch.tensor([starts, ends], dtype=torch.int64, device="cpu").unsqueeze(-1)
    positions = torch.arange(first, last, device="cpu")
    return (positions < bounds[0]) | (positions >= bounds[1])
