"""Sparse MLA attention on a CPU: fp32 for every dtype, one query row after another.

The bits of a BLAS product depend on its shape and on the alignment of its operands, those of a sum
on its length. A row is computed in buffers of its own, up to the last index that names a slot, and
so has the same bits in every batch and behind any number of −1.
"""

from __future__ import annotations

import torch

from .products_cpu import ieee_products
from .score_cpu import widen_into
from .sparse_mla_rows import GROUP, VALUES, split_rows

NEG_INF = float("-inf")


@torch.no_grad()  # out= takes no tensor that requires a gradient
def attend_on_cpu(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """Writes out [T, Hq, v_dim] and lse [T, Hq]; uint8 kv holds 656-byte rows."""

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float32, device="cpu")

    (_, heads, dim), width, v_dim = q.shape, indices.shape[1], out.shape[2]
    query, keys, result = empty(heads, dim), empty(width, dim), empty(heads, v_dim)
    scores = empty(heads * width)
    missing = (indices < 0) | (indices >= kv.shape[0])  # [T, W]
    places = torch.arange(1, width + 1, device="cpu")
    ends = places.masked_fill(missing, 0).amax(1).tolist()
    with ieee_products():
        for t, end in enumerate(ends):
            if end == 0:
                out[t], lse[t] = 0.0, NEG_INF
                continue
            query.copy_(q[t])
            slots, holes = indices[t, :end].long(), missing[t, :end]
            _gather(kv, slots.masked_fill(holes, 0), keys[:end])
            keys[:end][holes] = 0.0  # what stands in for a key that is not there may be NaN
            dots = scores[: heads * end].view(heads, end)
            torch.mm(query, keys[:end].t(), out=dots)
            lse[t] = _softmax(dots.mul_(scale).masked_fill_(holes, NEG_INF))
            torch.mm(dots, keys[:end, :v_dim], out=result)
            out[t] = result


def _softmax(scores: torch.Tensor) -> torch.Tensor:
    """Replaces scores [Hq, n] by their softmax, 0 where all are −inf; returns lse [Hq]."""
    greatest = scores.amax(1)
    weights = torch.softmax(scores, 1, out=scores)
    # exp(0) = 1 is the greatest weight before the division: afterwards it is 1 / Σ exp(s - max)
    lse = greatest - weights.amax(1).log()
    empty = greatest == NEG_INF
    weights.masked_fill_(empty[:, None], 0.0)
    return lse.masked_fill_(empty, NEG_INF)


def _gather(kv: torch.Tensor, slots: torch.Tensor, keys: torch.Tensor) -> None:
    """Writes the keys of `slots`, all of them in the cache, to `keys` [n, Dqk] fp32."""
    if kv.dtype == torch.float32:
        torch.index_select(kv, 0, slots, out=keys)
        return
    if kv.dtype != torch.uint8:
        keys.copy_(kv.index_select(0, slots))
        return
    values, scales, rope = (part.index_select(0, slots) for part in split_rows("kv", kv))
    widened = torch.empty(values.shape, dtype=torch.float32, device="cpu")
    widen_into(widened, values)
    groups = widened.view(-1, VALUES // GROUP, GROUP).mul_(scales[:, :, None])
    keys[:, :VALUES] = groups.view(values.shape)
    keys[:, VALUES:] = rope
