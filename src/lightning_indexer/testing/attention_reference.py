"""Oracles of sparse MLA attention: float64, a head and a row at a time, no code of the op's."""

from __future__ import annotations

import math

import torch

from .reference import e4m3_value, quantize_index_k


def mla_row(kv: torch.Tensor, slot: int) -> torch.Tensor:
    """One row of a cache in float64 [Dqk]; uint8 rows hold 512 e4m3, 4 fp32, 64 bf16 values."""
    if kv.dtype != torch.uint8:
        return kv[slot].to(torch.float64)
    raw = kv[slot].clone()
    scales = raw[512:528].view(torch.float32).tolist()
    values = [e4m3_value(byte) * scales[i // 128] for i, byte in enumerate(raw[:512].tolist())]
    rope = raw[528:656].view(torch.bfloat16).to(torch.float64)
    return torch.cat([torch.tensor(values, dtype=torch.float64), rope])


def selected_rows(kv: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """The rows [n, Dqk] that one row of indices names, in its order, repeats included."""
    rows = [mla_row(kv, slot) for slot in indices.tolist() if 0 <= slot < kv.shape[0]]
    if not rows:
        width = 576 if kv.dtype == torch.uint8 else kv.shape[1]
        return torch.zeros((0, width), dtype=torch.float64)
    return torch.stack(rows)


def sparse_mla_attention(
    q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor, scale: float, v_dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """out [T, Hq, v_dim] and lse [T, Hq]: softmax over the listed slots; 0 and −inf for none."""
    rows, heads, _ = q.shape
    out = torch.zeros((rows, heads, v_dim), dtype=torch.float64)
    lse = torch.full((rows, heads), -math.inf, dtype=torch.float64)
    for t in range(rows):
        keys = selected_rows(kv, indices[t])
        if not len(keys):
            continue
        for h in range(heads):
            scores = scale * (keys @ q[t, h].to(torch.float64))
            weights = (scores - scores.max()).exp()
            out[t, h] = (weights[:, None] * keys[:, :v_dim]).sum(0) / weights.sum()
            lse[t, h] = scores.max() + weights.sum().log()
    return out, lse


def attention_error_bounds(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    scale: float,
    v_dim: int,
    *,
    operand: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """How far fp32 arithmetic may be from the oracle's out and lse, in any order of the sums.

    `operand` is the unit roundoff of what weights and scaled fp8 values are multiplied in. With u
    that of fp32, a score is off by at most δ = γ(Dqk+4)·|scale|·Σ|q||k| + 4u·|score|, plus
    operand·|scale|·Σ|q||k| for fp8; a weight by the factor e^2δ (its own score's and the
    greatest's) and 8u of the power; sums of n weights, and what they are multiplied by when a
    greater score comes, by γ(n) with n = 8W+64. Weights and fp8 values are rounded to operands
    once each, `out` once to its dtype.
    """
    unit = 2.0**-24
    rows, heads, dim = q.shape
    n = (8 * indices.shape[1] + 64) * unit
    scaled = operand if kv.dtype == torch.uint8 else 0.0
    rounding = torch.finfo(q.dtype).eps / 2
    out = torch.zeros((rows, heads, v_dim), dtype=torch.float64)
    lse = torch.zeros((rows, heads), dtype=torch.float64)
    for t in range(rows):
        keys = selected_rows(kv, indices[t])
        if not len(keys):
            continue
        for h in range(heads):
            query = q[t, h].to(torch.float64)
            scores = scale * (keys @ query)
            products = abs(scale) * (keys.abs() @ query.abs())
            error = products * ((dim + 4) * 2 * unit + scaled) + 4 * unit * scores.abs()
            factor = math.expm1(2 * float(error.max()) + 8 * unit)
            weights = torch.softmax(scores, 0)
            magnitude = weights @ keys[:, :v_dim].abs()
            value = (weights @ keys[:, :v_dim]).abs()
            relative = 2 * factor + 2 * n + 1.01 * (operand + scaled)
            least = torch.finfo(q.dtype).smallest_normal * 2.0**-9
            # weights and values below an operand's normal range are rounded to its multiples
            least += 2.0**-24 * float(keys[:, :v_dim].abs().max()) if operand == 2.0**-11 else 0.0
            out[t, h] = relative * magnitude * (1 + rounding) + rounding * value + least
            lse[t, h] = float(error.max()) + 2 * n + 4 * unit * abs(float(scores.logsumexp(0)))
    return out, lse


def pack_mla_row(row: torch.Tensor, scale_format: str = "fp32") -> torch.Tensor:
    """The 656 bytes of one row [576]: each 128 values quantised as an index key, the rest bf16."""
    groups = [quantize_index_k(group, scale_format) for group in row[:512].split(128)]
    parts = [
        torch.tensor([byte for payload, _ in groups for byte in payload], dtype=torch.uint8),
        torch.tensor([scale for _, scale in groups], dtype=torch.float32).view(torch.uint8),
        row[512:].to(torch.bfloat16).contiguous().view(torch.uint8),
    ]
    return torch.cat(parts)
