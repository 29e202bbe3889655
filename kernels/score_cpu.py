"""Scores on a CPU, in fp32 for every dtype, tile by tile (`products_cpu` on their bits).

A score depends on its own query and key alone, not on T, L, the chunking or other rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import torch

from .e4m3 import E4M3_VALUES
from .products_cpu import pack_keys, score_tiles, tile_shape, tiles_score_as_one

NEG_INF = float("-inf")
#: Query tiles scored at once. Fewer would wait more often for other threads; the dot products of
#: more (4 MB at H=64) are read back more slowly.
GROUP = 32
#: Key tiles loaded at once where more than one group meets them: 4 MB at D=128, and as much packed.
LOADED_TILES = 16

#: `load(first, count, keys)` writes keys [count, D] and returns their scales and which are missing.
LoadKeys = Callable[[int, int, torch.Tensor], tuple[torch.Tensor | None, torch.Tensor | None]]


def widen_into(out: torch.Tensor, values: torch.Tensor) -> None:
    """out ← values, exactly; uint8 holds e4m3fn (by table: a cast is four times slower)."""
    if values.dtype == torch.uint8:
        torch.index_select(E4M3_VALUES, 0, values.flatten().int(), out=out.view(-1))
    else:
        out.copy_(values)


class KeyTile:
    """Keys [first, last) of a sequence, in fp32 and padded with zeros, for every group of a run."""

    def __init__(self, first: int, last: int, keys: torch.Tensor, load: LoadKeys) -> None:
        self.first, self.last, self.keys = first, last, keys
        keys[last - first :].zero_()
        self.scale, self.missing = load(first, last - first, keys[: last - first])
        self._packed: torch.Tensor | None = None

    @cached_property
    def largest(self) -> float:
        """The largest magnitude; NaN if there is any."""
        return _largest(self.keys)

    def packed(self, heads: int, rows: int) -> torch.Tensor:
        """The keys for products with so many query rows, always as many."""
        if self._packed is None:
            self._packed = pack_keys(self.keys, heads, rows)
        return self._packed


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
        self.keys = empty(LOADED_TILES if most_rows > self.group_rows else 1, width, head_dim)
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
        spans = _tile_spans(starts, ends, self.tile_rows)
        live = [span for span in spans if span[0] < span[1]]
        begin = min((start for start, _ in live), default=0)
        stop = max((end for _, end in live), default=0)
        held = None
        for block in range(begin, stop, len(self.keys) * self.tile_keys):
            tiles = self._load(block, stop, spans, load)
            for row in range(0, q.shape[0], self.group_rows):
                rows = slice(row, row + self.group_rows)
                own = spans[row // self.tile_rows :][: len(self.tiles)]
                for tile in tiles:
                    touched = _touched(own, tile.first, tile.last)
                    if touched and row != held:
                        self._set_queries(q[rows], weights[rows])
                        held = row
                    if touched:
                        self._score(tile, touched)
                        self._write(tile, starts[rows], ends[rows], out[rows])

    def _load(
        self, block: int, stop: int, spans: Sequence[tuple[int, int]], load: LoadKeys
    ) -> list[KeyTile]:
        """The tiles from `block` on that some window touches, as many as there is room for."""
        tiles = []
        for first, keys in zip(range(block, stop, self.tile_keys), self.keys, strict=False):
            last = min(first + self.tile_keys, stop)
            if _touched(spans, first, last):
                tiles.append(KeyTile(first, last, keys, load))
        return tiles

    def _set_queries(self, q: torch.Tensor, weights: torch.Tensor) -> None:
        count = q.shape[0]
        widen_into(self.queries[:count], q)
        self.weights[:count, 0] = weights
        self.queries[count:].zero_()
        self.weights[count:].zero_()
        if self.as_one:
            self.largest_query = _largest(self.queries)

    def _score(self, tile: KeyTile, touched: Sequence[int]) -> None:
        """Scores the touched query tiles of the group, at least."""
        if self.as_one and 2 * len(touched) > len(self.tiles):
            rows, heads, head_dim = self.queries.shape
            bound = self.largest_query * tile.largest * head_dim
            no_nan = bound < torch.finfo(torch.float32).max
            keys = tile.packed(heads, rows)
            score_tiles(self.queries, self.weights, keys, self.scores, no_nan=no_nan)
            return
        for i in touched:
            queries, weights, scores = self.tiles[i]
            score_tiles(queries, weights, tile.keys, scores)

    def _write(
        self, tile: KeyTile, starts: Sequence[int], ends: Sequence[int], out: torch.Tensor
    ) -> None:
        scores = self.scores[: len(starts), 0, : tile.last - tile.first]
        if tile.scale is not None:
            scores.mul_(tile.scale)
        unseen = _unseen(starts, ends, tile.first, tile.last)
        if unseen is not None:
            scores.masked_fill_(unseen, NEG_INF)
        if tile.missing is not None:
            scores.masked_fill_(tile.missing, NEG_INF)
        out[:, tile.first : tile.last] = scores


def _touched(spans: Sequence[tuple[int, int]], first: int, last: int) -> list[int]:
    """The spans that hold a position of [first, last)."""
    return [i for i, (start, end) in enumerate(spans) if start < last and end > first]


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
