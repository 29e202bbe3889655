"""Scores on a CPU, in fp32 for every dtype, tile by tile (`products_cpu` on their bits).

A score depends on its own query and key alone, not on T, L, the chunking or other rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from .e4m3 import E4M3_VALUES
from .products_cpu import score_tiles, tile_shape, tiles_score_as_one

NEG_INF = float("-inf")
#: Query tiles scored at once. Fewer would wait more often for other threads; the dot products of
#: more (4 MB at H=64) are read back more slowly.
GROUP = 32

#: `load(first, count, keys)` writes keys [count, D] and returns their scales and which are missing.
LoadKeys = Callable[[int, int, torch.Tensor], tuple[torch.Tensor | None, torch.Tensor | None]]


def widen_into(out: torch.Tensor, values: torch.Tensor) -> None:
    """out ← values, exactly; uint8 holds e4m3fn (by table: a cast is four times slower)."""
    if values.dtype == torch.uint8:
        torch.index_select(E4M3_VALUES, 0, values.flatten().int(), out=out.view(-1))
    else:
        out.copy_(values)


class CpuScorer:
    """One call's workspace, and the scores of any number of query runs through it."""

    def __init__(self, heads: int, head_dim: int, most_rows: int) -> None:
        """Allocates what runs of up to `most_rows` query rows need, whatever their L."""

        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.float32, device="cpu")

        rows, width = tile_shape(heads, head_dim)
        tiles = min(GROUP, -(-most_rows // rows))
        self.tile_rows, self.tile_keys, self.group_rows = rows, width, rows * tiles
        self.queries = empty(self.group_rows, heads, head_dim)
        self.weights = empty(self.group_rows, 1, heads)
        self.scores = empty(self.group_rows, 1, width)
        self.keys = empty(width, head_dim)
        self.tiles = [
            (self.queries[i : i + rows], self.weights[i : i + rows], self.scores[i : i + rows])
            for i in range(0, self.group_rows, rows)
        ]
        self.as_one = tiles > 1 and tiles_score_as_one(
            heads, head_dim, tiles, torch.get_num_threads()
        )
        self.largest_query = float("nan")  # of the group; only products of many tiles ask for it

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
        for row in range(0, q.shape[0], self.group_rows):
            rows = slice(row, row + self.group_rows)
            self._set_queries(q[rows], weights[rows])
            self._run_group(starts[rows], ends[rows], load, out[rows])

    def _set_queries(self, q: torch.Tensor, weights: torch.Tensor) -> None:
        count = q.shape[0]
        widen_into(self.queries[:count], q)
        self.weights[:count, 0] = weights
        self.queries[count:].zero_()
        self.weights[count:].zero_()
        if self.as_one:
            self.largest_query = _largest(self.queries)

    def _run_group(
        self, starts: Sequence[int], ends: Sequence[int], load: LoadKeys, out: torch.Tensor
    ) -> None:
        spans = _tile_spans(starts, ends, self.tile_rows)
        live = [span for span in spans if span[0] < span[1]]
        stop = max((end for _, end in live), default=0)
        for first in range(min((start for start, _ in live), default=0), stop, self.tile_keys):
            last = min(first + self.tile_keys, stop)
            touched = [i for i, (start, end) in enumerate(spans) if start < last and end > first]
            if not touched:
                continue
            self.keys[last - first :].zero_()
            scale, missing = load(first, last - first, self.keys[: last - first])
            self._score(touched)
            scores = self.scores[: len(starts), 0, : last - first]
            if scale is not None:
                scores.mul_(scale)
            unseen = _unseen(starts, ends, first, last)
            if unseen is not None:
                scores.masked_fill_(unseen, NEG_INF)
            if missing is not None:
                scores.masked_fill_(missing, NEG_INF)
            out[:, first:last] = scores

    def _score(self, touched: Sequence[int]) -> None:
        """Scores the touched tiles of the group, at least."""
        if self.as_one and 2 * len(touched) > len(self.tiles):
            bound = self.largest_query * _largest(self.keys) * self.keys.shape[1]
            no_nan = bound < torch.finfo(torch.float32).max
            score_tiles(self.queries, self.weights, self.keys, self.scores, no_nan=no_nan)
            return
        for i in touched:
            queries, weights, scores = self.tiles[i]
            score_tiles(queries, weights, self.keys, scores)


def _largest(values: torch.Tensor) -> float:
    """The largest magnitude; NaN if there is any."""
    low, high = values.aminmax()
    return max(-float(low), float(high))


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
