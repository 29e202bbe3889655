"""`topk_indices` in vectorised PyTorch, exact, in row chunks so that scratch stays bounded."""

from __future__ import annotations

import torch

#: Scores a chunk holds at most (one row at least): a 2 MB working copy stays in a core's cache.
CHUNK_SCORES = 1 << 19

_NEG_INF = float("-inf")
#: The keys of −FLT_MAX, the least selectable score, and of −inf.
_LOWEST, _HIDDEN = -0x7F80_0000, -0x7F80_0001


def select_rows(
    logits: torch.Tensor,
    k: int,
    row_starts: torch.Tensor | None,
    row_ends: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Writes the selection of every row of `logits` [T, L] to `out` [T, k]."""
    rows, length = logits.shape
    step = max(1, CHUNK_SCORES // max(length, 1))
    if rows <= step:
        _select_chunk(logits, k, row_starts, row_ends, out)
        return
    for i in range(0, rows, step):
        part = slice(i, i + step)
        starts = None if row_starts is None else row_starts[part]
        ends = None if row_ends is None else row_ends[part]
        _select_chunk(logits[part], k, starts, ends, out[part])


def _select_chunk(
    logits: torch.Tensor,
    k: int,
    starts: torch.Tensor | None,
    ends: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    length = logits.shape[1]
    first, last_start = (0, 0) if starts is None else _bounds(starts, length)
    first_end, last = (length, length) if ends is None else _bounds(ends, length)
    if last <= first:
        out.fill_(-1)
        return
    # Columns outside every window of the chunk are not even looked at.
    keys = _ordered_keys(logits[:, first:last])
    if starts is not None and last_start > first:
        keys.masked_fill_(torch.arange(first, last) < starts[:, None], _HIDDEN)
    if ends is not None and first_end < last:
        keys.masked_fill_(torch.arange(first, last) >= ends[:, None], _HIDDEN)

    chosen, counts = _best(keys, k)
    found = chosen.flatten().nonzero().flatten()  # row by row, ascending
    zeros = torch.arange(0, chosen.numel(), chosen.shape[1])  # where position 0 of each row is
    if starts is not None and last_start > first:
        zeros += starts.clamp(min=0) - first
    if int(counts.min()) == k:
        out.copy_(found.view(-1, k) - zeros[:, None])
    else:
        filled = torch.arange(k) < counts[:, None]
        block = torch.full(out.shape, -1, dtype=torch.int32)
        positions = (found - zeros.repeat_interleave(counts)).to(torch.int32)
        out.copy_(block.masked_scatter_(filled, positions))


def _bounds(values: torch.Tensor, limit: int) -> tuple[int, int]:
    """The least and the greatest value, clamped to [0, limit]."""
    low, high = values.aminmax()
    return min(max(int(low), 0), limit), min(max(int(high), 0), limit)


def _ordered_keys(scores: torch.Tensor) -> torch.Tensor:
    """int32 in the order of the scores: −0 = +0, NaN as −inf. torch.topk is faster on integers."""
    scores = scores.to(torch.float32)
    scores = scores.nan_to_num(nan=_NEG_INF, posinf=float("inf"), neginf=_NEG_INF)  # a copy
    bits = scores.add_(0.0).view(torch.int32)  # −0 + 0 = +0
    return bits.bitwise_xor_((bits >> 31).bitwise_and_(0x7FFF_FFFF))


def _best(keys: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Marks the k best of each row (never −inf, ties to the smaller column) and counts them."""
    if k >= keys.shape[1]:
        chosen = keys >= _LOWEST
        return chosen, _count(chosen)
    kth = keys.topk(k, dim=1, sorted=False).values.amin(1, keepdim=True).clamp_(min=_LOWEST)
    chosen = keys >= kth
    counts = _count(chosen)
    if int(counts.max()) > k:  # somewhere more share the k-th score than there is room for
        above = keys > kth
        tied = chosen ^ above
        room = k - _count(above)[:, None]
        chosen = above | (tied & (tied.cumsum(1, dtype=torch.int32) <= room))
        counts.clamp_(max=k)
    return chosen, counts


def _count(marks: torch.Tensor) -> torch.Tensor:
    """How many of each row are marked; sums of bools are taken in int64, 25 times slower."""
    return marks.view(torch.uint8).sum(1, dtype=torch.int32)
