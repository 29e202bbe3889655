"""Sparse MLA attention on a CPU: fp32 for every dtype, a block of query rows at a time.

Keys of a block are gathered at once. Each row is then multiplied by itself, in products of one
shape per (Hq, W, dims): the bits of a BLAS product depend on its shape.
"""

from __future__ import annotations

import torch

from .products_cpu import ieee_products
from .score_cpu import widen_into
from .sparse_mla_rows import GROUP, VALUES, split_rows

#: Bytes of a block's gathered keys in fp32, unless a single row has more: they stay in cache.
BLOCK_BYTES = 1 << 23


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
    (_, heads, dim), width = q.shape, indices.shape[1]
    most = max(BLOCK_BYTES // (4 * width * dim), 1)
    keys = torch.empty((most, width, dim), dtype=torch.float32, device="cpu")
    scores = torch.empty((most, heads, width), dtype=torch.float32, device="cpu")
    result = torch.empty((most, heads, out.shape[2]), dtype=torch.float32, device="cpu")
    with ieee_products():
        for first in range(0, q.shape[0], most):
            rows = slice(first, first + most)
            count = min(most, q.shape[0] - first)
            block = keys[:count], scores[:count], result[:count]
            lse[rows] = _attend_block(q[rows].float(), kv, indices[rows].long(), scale, *block)
            out[rows] = block[2]


def _attend_block(
    q: torch.Tensor,
    kv: torch.Tensor,
    slots: torch.Tensor,
    scale: float,
    keys: torch.Tensor,
    scores: torch.Tensor,
    result: torch.Tensor,
) -> torch.Tensor:
    """Writes `result` [R, Hq, v_dim], through `keys` and `scores`; returns lse [R, Hq]."""
    missing = (slots < 0) | (slots >= kv.shape[0])  # [R, W]
    _gather(kv, slots.masked_fill(missing, 0).flatten(), keys.view(-1, keys.shape[2]))
    if bool(missing.any()):  # a key that stands in for one that is not there may be NaN
        keys.masked_fill_(missing[:, :, None], 0.0)
    for row, key, dots in zip(q, keys, scores, strict=True):
        torch.mm(row, key.t(), out=dots)
    scores.mul_(scale).masked_fill_(missing[:, None], float("-inf"))
    greatest = scores.amax(2)
    weights = torch.softmax(scores, 2, out=scores)
    # exp(0) = 1 is the greatest weight before the division: afterwards it is 1 / Σ exp(s - max)
    lse = greatest - weights.amax(2).log()
    empty = missing.all(1)
    if bool(empty.any()):
        weights[empty], lse[empty] = 0.0, float("-inf")
    for weight, key, total in zip(weights, keys, result, strict=True):
        torch.mm(weight, key[:, : total.shape[1]], out=total)
    return lse


def _gather(kv: torch.Tensor, slots: torch.Tensor, keys: torch.Tensor) -> None:
    """Writes the keys of `slots`, all of them in the cache, to `keys` [n, Dqk]."""
    if kv.dtype != torch.uint8:
        keys.copy_(kv.index_select(0, slots))
        return
    values, scales, rope = (part.index_select(0, slots) for part in split_rows("kv", kv))
    widened = torch.empty(values.shape, dtype=torch.float32, device="cpu")
    widen_into(widened, values)
    groups = widened.view(len(slots), VALUES // GROUP, GROUP)
    keys[:, :VALUES] = groups.mul_(scales[:, :, None]).view(values.shape)
    keys[:, VALUES:] = rope
