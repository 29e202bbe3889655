"""Oracles of `prepare_index_q` and `prepare_index_k`: a row at a time, in a dtype of your choice.

In float64 they say what the ops should come near to. In float32 each operation rounds as the ops
promise to, in the promised order, so that the results must be equal to the bit.
"""

from __future__ import annotations

import math

import torch

from .reference import quantize_index_k


def rope_row(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rope_style: str, rope_first: bool
) -> torch.Tensor:
    """x [D] with the pairs of its rotary dimensions turned; cos and sin [rope_dim/2], one dtype."""
    half = len(cos)
    start = 0 if rope_first else len(x) - 2 * half
    new = x.clone()
    for i in range(half):
        a, b = (i, i + half) if rope_style == "half_split" else (2 * i, 2 * i + 1)
        a, b = start + a, start + b
        new[a] = x[a] * cos[i] - x[b] * sin[i]
        new[b] = x[b] * cos[i] + x[a] * sin[i]
    return new


def hadamard_row(x: torch.Tensor) -> torch.Tensor:
    """x·H·D^-0.5: butterflies over the lowest bit of the index first, and the factor last."""
    size, x = len(x), x.clone()
    distance = 1
    while distance < size:
        for i in range(size):
            if not i & distance:
                low, high = x[i].clone(), x[i + distance].clone()
                x[i], x[i + distance] = low + high, low - high
        distance *= 2
    return x * torch.tensor(size**-0.5, dtype=x.dtype)


def layer_norm_row(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """(x − mean)·(1 / sqrt(var + eps))·weight + bias; sums of neighbours, then of those sums."""
    count = torch.tensor(len(x), dtype=x.dtype)
    centered = x - _sum_of_pairs(x) / count
    variance = _sum_of_pairs(centered * centered) / count
    one, epsilon = torch.tensor([1.0, eps], dtype=torch.float64).to(x.dtype)
    # Python's root is right to the last bit of float64; PyTorch's in fp32 is not to that of fp32.
    deviation = torch.tensor(math.sqrt(float(variance + epsilon)), dtype=x.dtype)
    y = centered * (one / deviation) * weight
    return y if bias is None else y + bias


def _sum_of_pairs(x: torch.Tensor) -> torch.Tensor:
    terms = list(x) + [x.new_zeros(())] * (2 ** math.ceil(math.log2(len(x))) - len(x))
    while len(terms) > 1:
        terms = [a + b for a, b in zip(terms[0::2], terms[1::2], strict=True)]
    return terms[0]


def prepare_row(
    x: torch.Tensor,
    position: int,
    cos: torch.Tensor,
    sin: torch.Tensor,
    rope_style: str,
    rope_first: bool,
    hadamard: bool,
) -> torch.Tensor:
    """RoPE and, if asked for, the transform; a position outside the tables rotates by NaN."""
    if 0 <= position < cos.shape[0]:
        cos, sin = cos[position].to(x.dtype), sin[position].to(x.dtype)
    else:
        cos = sin = torch.full(cos.shape[1:], math.nan, dtype=x.dtype)
    x = rope_row(x, cos, sin, rope_style, rope_first)
    return hadamard_row(x) if hadamard else x


def prepare_index_q(
    q: torch.Tensor,
    weights: torch.Tensor,
    positions: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    rope_style: str,
    rope_first: bool = True,
    hadamard: bool = False,
    scale_format: str | None = "fp32",
    scale: float | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries before any final rounding, and weights folded; e4m3 (uint8) for a float32 oracle.

    A float64 oracle does not quantise and folds no s: s would need x in fp32.
    """
    rows, heads, head_dim = q.shape
    quantised = dtype == torch.float32 and scale_format is not None
    out = torch.empty(q.shape, dtype=torch.uint8 if quantised else dtype)
    factor = head_dim**-0.5 * heads**-0.5 if scale is None else scale
    folded = weights.to(dtype) * torch.tensor(factor, dtype=dtype)
    for t in range(rows):
        position = t if positions is None else int(positions[t])
        for h in range(heads):
            x = q[t, h].to(dtype)
            x = prepare_row(x, position, cos, sin, rope_style, rope_first, hadamard)
            if quantised:
                payload, s = quantize_index_k(x, str(scale_format))
                out[t, h] = torch.tensor(payload, dtype=torch.uint8)
                folded[t, h] *= torch.tensor(s, dtype=dtype)
            else:
                out[t, h] = x
    return out, folded


def prepare_index_k(
    k: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_bias: torch.Tensor | None,
    positions: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    eps: float,
    rope_style: str,
    rope_first: bool = True,
    hadamard: bool = False,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """Keys [n, D] before they are rounded: what `write_index_k` then puts into the cache."""
    out = torch.empty(k.shape, dtype=dtype)
    weight = norm_weight.to(dtype)
    bias = None if norm_bias is None else norm_bias.to(dtype)
    for i in range(k.shape[0]):
        x = layer_norm_row(k[i].to(dtype), weight, bias, eps)
        position = i if positions is None else int(positions[i])
        out[i] = prepare_row(x, position, cos, sin, rope_style, rope_first, hadamard)
    return out
