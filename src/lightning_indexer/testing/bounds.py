"""How far from the float64 oracle a right kernel may be: error bounds derived, not tuned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from . import reference

ROUNDING = 2.0**-24  # of an fp32 sum or product


def score_bound(
    q: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor,
    k_scale: torch.Tensor | None,
    rounding: float = ROUNDING,
) -> torch.Tensor:
    """Error of rounded sums of D products and H heads in any order, and of the scale: [T, L].

    |error| ≤ γ(D+H+3)·|scale|·Σ_h |w|·Σ_d |q||k| (Higham, γ(n) = n·u/(1 − n·u)), and what
    underflows.
    """
    q64, k64 = reference.to_float64(q).abs(), reference.to_float64(k).abs()
    magnitude = torch.einsum("thd,ld,th->tl", q64, k64, weights.double().abs())
    if k_scale is not None:
        magnitude = magnitude * k_scale.double().abs()
    n = (q.shape[1] + q.shape[2] + 3) * rounding
    if n >= 0.5:
        raise ValueError(f"rounding must be below {0.5 / (q.shape[1] + q.shape[2] + 3)}")
    return (n / (1 - n) * magnitude + 2.0**-120).nan_to_num(nan=torch.inf)


def gathered(
    inputs: Mapping[str, Any],
) -> tuple[torch.Tensor, list[int], torch.Tensor, torch.Tensor]:
    """Flat queries, visible lengths, and each row's keys [rows, width, D] and scales (float64)."""
    q, table, size = inputs["q"], inputs["block_table"], inputs["page_size"]
    row_to_request = inputs.get("row_to_request")
    lengths, requests = reference.row_lengths(inputs["context_lens"], q.shape[1], row_to_request)
    width, head_dim = inputs["max_context_len"], q.shape[3]
    keys = torch.zeros(len(lengths), width, head_dim, dtype=torch.float64)
    scales = torch.zeros(len(lengths), width, dtype=torch.float64)
    for t, request in enumerate(requests):
        for s in range(min(lengths[t], width)):
            page = int(table[request, s // size]) if 0 <= request < table.shape[0] else -1
            if 0 <= page < inputs["cache"].shape[0]:
                key, scale = reference.cached_key(inputs["cache"], page, s % size, size, head_dim)
                keys[t, s], scales[t, s] = key, scale
    flat_q = q.contiguous().view(len(lengths), 1, *q.shape[2:])
    return flat_q, lengths, keys, scales


def paged_score_bound(inputs: Mapping[str, Any], rounding: float = ROUNDING) -> torch.Tensor:
    """`score_bound` of each row against its request's keys: [rows, width]."""
    q, _, keys, scales = gathered(inputs)
    rows = [
        score_bound(q[t], keys[t], inputs["weights"][t : t + 1], scales[t], rounding)
        for t in range(q.shape[0])
    ]
    return torch.cat(rows) if rows else torch.zeros(0, inputs["max_context_len"])
