"""Oracles: each op again in float64 and plain loops, sharing no code with the kernels.

They are slow on purpose and follow the formulas of the docs line by line.
"""

from __future__ import annotations

import math

import torch

NEG_INF = float("-inf")


def e4m3_value(byte: int) -> float:
    """The value of one e4m3fn byte: 4 exponent bits of bias 7, no infinities, 0x7F is NaN."""
    sign = -1.0 if byte & 0x80 else 1.0
    exponent, mantissa = (byte >> 3) & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


_E4M3 = torch.tensor([e4m3_value(b) for b in range(256)], dtype=torch.float64)
_FINITE = sorted({(e4m3_value(b), b) for b in range(0x7F)})


def e4m3_byte(value: float) -> int:
    """The e4m3fn byte nearest to `value`, ties to even; saturates at ±448, NaN is 0x7F."""
    if math.isnan(value):
        return 0x7F
    sign = 0x80 if math.copysign(1.0, value) < 0 else 0
    magnitude = min(abs(value), 448.0)
    best = min(_FINITE, key=lambda vb: (abs(vb[0] - magnitude), vb[1] & 1))
    return sign | best[1]


def to_float64(x: torch.Tensor) -> torch.Tensor:
    """Any tensor an op accepts as values, exactly, in float64."""
    if x.dtype == torch.float8_e4m3fn:
        return _E4M3[x.view(torch.uint8).long()]
    return x.to(torch.float64)


def mqa_logits(
    q: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor,
    row_starts: torch.Tensor,
    row_ends: torch.Tensor,
    *,
    k_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """out[t,s] = k_scale[s]·Σ_h weights[t,h]·relu(q[t,h]·k[s]) in [start,end), −inf elsewhere."""
    q64, k64, w64 = to_float64(q), to_float64(k), weights.to(torch.float64)
    rows, length = q.shape[0], k.shape[0]
    out = torch.full((rows, length), NEG_INF, dtype=torch.float64)
    for t in range(rows):
        start, end = max(int(row_starts[t]), 0), min(int(row_ends[t]), length)
        if end <= start:
            continue
        dots = q64[t] @ k64[start:end].T  # [H, window]
        scores = (w64[t][:, None] * torch.relu(dots)).sum(0)
        if k_scale is not None:
            scores = scores * k_scale[start:end].to(torch.float64)
        out[t, start:end] = scores
    return out


def cached_key(
    cache: torch.Tensor, page: int, token: int, page_size: int, head_dim: int
) -> tuple[torch.Tensor, float]:
    """Values (float64, unscaled) and scale of one cached token, read from the page's bytes."""
    if cache.dtype != torch.uint8:
        return cache[page, token].to(torch.float64), 1.0
    raw = cache[page].reshape(-1)
    values = _E4M3[raw[token * head_dim : (token + 1) * head_dim].long()]
    at = page_size * head_dim + 4 * token
    scale = raw[at : at + 4].clone().view(torch.float32)
    return values, float(scale)


def row_lengths(
    context_lens: torch.Tensor, next_n: int, row_to_request: torch.Tensor | None
) -> tuple[list[int], list[int]]:
    """Visible keys and block-table row of every query row, in row order."""
    if row_to_request is not None:
        return context_lens.tolist(), row_to_request.tolist()
    requests = [b for b in range(context_lens.shape[0]) for _ in range(next_n)]
    if context_lens.dim() == 2:
        return context_lens.flatten().tolist(), requests
    lengths = [n - next_n + 1 + j for n in context_lens.tolist() for j in range(next_n)]
    return lengths, requests


def paged_mqa_logits(
    q: torch.Tensor,
    cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    *,
    max_context_len: int,
    row_to_request: torch.Tensor | None = None,
    page_size: int = 64,
) -> torch.Tensor:
    """`mqa_logits` of each row against the pages of its request; −inf past its length.

    A position whose page id is outside the cache scores −inf.
    """
    next_n, head_dim = q.shape[1], q.shape[3]
    lengths, requests = row_lengths(context_lens, next_n, row_to_request)
    q64 = to_float64(q).reshape(len(lengths), q.shape[2], head_dim)
    w64 = weights.to(torch.float64)
    out = torch.full((len(lengths), max_context_len), NEG_INF, dtype=torch.float64)
    for t, (length, request) in enumerate(zip(lengths, requests, strict=True)):
        if not 0 <= request < block_table.shape[0]:
            continue
        for s in range(min(length, max_context_len, block_table.shape[1] * page_size)):
            page = int(block_table[request, s // page_size])
            if not 0 <= page < cache.shape[0]:
                continue
            key, scale = cached_key(cache, page, s % page_size, page_size, head_dim)
            out[t, s] = (w64[t] * torch.relu(q64[t] @ key)).sum() * scale
    return out


def topk_indices(
    logits: torch.Tensor,
    k: int,
    row_starts: torch.Tensor | None = None,
    row_ends: torch.Tensor | None = None,
) -> torch.Tensor:
    """The selection rule, by sorting: best score first, then smaller position; ascending out."""
    rows, width = logits.shape
    out = torch.full((rows, k), -1, dtype=torch.int32)
    for t in range(rows):
        start = max(int(row_starts[t]), 0) if row_starts is not None else 0
        end = min(int(row_ends[t]), width) if row_ends is not None else width
        scores = logits[t].to(torch.float64).tolist()
        candidates = [
            (-scores[s], s - start)
            for s in range(start, end)
            if not math.isnan(scores[s]) and scores[s] != NEG_INF
        ]
        chosen = sorted(position for _, position in sorted(candidates)[:k])
        out[t, : len(chosen)] = torch.tensor(chosen, dtype=torch.int32)
    return out


def compact_topk_indices(
    buffer: torch.Tensor, rows: torch.Tensor, *, num_rows: int | None = None
) -> torch.Tensor:
    """What one buffer holds after compaction: row i is old row rows[i], or −1 if out of range."""
    limit = buffer.shape[0] if num_rows is None else num_rows
    old, new = buffer.clone(), buffer.clone()
    for i, row in enumerate(rows.tolist()):
        new[i] = old[row] if 0 <= row < limit else torch.full_like(old[i], -1)
    return new


def index_k_scale(row: torch.Tensor, scale_format: str) -> float:
    """max(amax, 1e-4)/448 in float32, or its power-of-two ceiling (NaN elements don't count)."""
    finite = [abs(v) for v in row.to(torch.float32).tolist() if not math.isnan(v)]
    amax = torch.tensor(max([*finite, 0.0]), dtype=torch.float32)
    scale = torch.maximum(amax, torch.tensor(1e-4)) / torch.tensor(448.0)
    if scale_format == "ue8m0" and math.isfinite(float(scale)):
        mantissa, exponent = math.frexp(float(scale))  # scale = mantissa·2^exponent, ≥ ½
        return 2.0 ** (exponent - 1 if mantissa == 0.5 else exponent)
    return float(scale)


def quantize_index_k(row: torch.Tensor, scale_format: str) -> tuple[list[int], float]:
    """The e4m3 bytes and the scale of one key: round(key / scale), the quotient in float32."""
    scale = index_k_scale(row, scale_format)
    quotient = row.to(torch.float32) / torch.tensor(scale, dtype=torch.float32)
    return [e4m3_byte(v) for v in quotient.tolist()], scale


def write_index_k(
    cache: torch.Tensor,
    k: torch.Tensor,
    slots: torch.Tensor,
    *,
    page_size: int = 64,
    scale_format: str = "fp32",
) -> torch.Tensor:
    """A contiguous copy of `cache` after the write; slots outside the cache are skipped."""
    new = cache.clone()
    head_dim = k.shape[1]
    for i, slot in enumerate(slots.tolist()):
        if not 0 <= slot < cache.shape[0] * page_size:
            continue
        page, token = divmod(slot, page_size)
        if cache.dtype != torch.uint8:
            new[page, token] = k[i].to(cache.dtype)
            continue
        payload, scale = quantize_index_k(k[i], scale_format)
        raw = new[page].reshape(-1)
        raw[token * head_dim : (token + 1) * head_dim] = torch.tensor(payload, dtype=torch.uint8)
        at = page_size * head_dim + 4 * token
        raw[at : at + 4] = torch.tensor([scale], dtype=torch.float32).view(torch.uint8)
        new[page] = raw.reshape(new[page].shape)
    return new


def read_index_k(
    cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    page_size: int,
    head_dim: int,
    total: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Values (float64, unscaled) [total, D] and scales [total] of all requests' keys in turn.

    Rows without a key have a NaN scale, and the value 0 (NaN in a float cache).
    """
    empty = 0.0 if cache.dtype == torch.uint8 else math.nan
    values = torch.full((total, head_dim), empty, dtype=torch.float64)
    scales = torch.full((total,), math.nan)
    row = 0
    for request, length in enumerate(context_lens.tolist()):
        for position in range(max(length, 0)):
            block, token = divmod(position, page_size)
            page = int(block_table[request, block]) if block < block_table.shape[1] else -1
            if row < total and 0 <= page < cache.shape[0]:
                values[row], scales[row] = cached_key(cache, page, token, page_size, head_dim)
            row += 1
    return values, scales


def indices_to_slots(
    indices: torch.Tensor, block_table: torch.Tensor, row_to_request: torch.Tensor, page_size: int
) -> torch.Tensor:
    """slot = block_table[request, position // S]·S + position % S; −1 where there is none."""
    out = torch.full(indices.shape, -1, dtype=indices.dtype)
    for t in range(indices.shape[0]):
        request = int(row_to_request[t])
        for j in range(indices.shape[1]):
            position = int(indices[t, j])
            block = position // page_size
            if not (0 <= request < block_table.shape[0] and 0 <= block < block_table.shape[1]):
                continue
            page = int(block_table[request, block])
            if position >= 0 and page >= 0:
                out[t, j] = page * page_size + position % page_size
    return out
