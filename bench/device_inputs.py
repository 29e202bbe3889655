"""Inputs of the device checks: scoring calls of every dtype, rows that are hard to select from.

All are drawn on the CPU from a seed: an oracle sees what a kernel sees.
"""

from __future__ import annotations

from typing import Any

import torch

FP8, BF16, FP16, FP32 = torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float32
#: Queries and keys of one call; a cache of fp8 keys takes queries of any of these.
DTYPE_PAIRS = {
    "fp8": (FP8, FP8),
    "bf16": (BF16, BF16),
    "fp16": (FP16, FP16),
    "fp32": (FP32, FP32),
    "bf16 queries, fp8 keys": (BF16, FP8),
    "fp16 queries, fp8 keys": (FP16, FP8),
    "fp32 queries, fp8 keys": (FP32, FP8),
    "fp32 queries, bf16 keys": (FP32, BF16),
    "fp32 queries, fp16 keys": (FP32, FP16),
}
NAN, INF = float("nan"), float("inf")
REGIMES = ("normal", "relu", "equal", "plateau", "close", "ascending", "special", "few numbers")

Inputs = dict[str, Any]


def moved(inputs: Inputs, device: torch.device) -> Inputs:
    """The same arguments, their tensors on the device."""
    return {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}


def ragged_inputs(
    dtypes: str, rows: int, length: int, heads: int, head_dim: int, *, ties: bool = False
) -> Inputs:
    """Arguments of `mqa_logits`: several sequences in one call, an empty row, a cut window."""
    g = torch.Generator().manual_seed(rows + length + heads)
    q_dtype, k_dtype = DTYPE_PAIRS[dtypes]
    starts = torch.where(torch.arange(rows) < rows // 2, 0, length // 3).to(torch.int32)
    ends = (length - rows + 1 + torch.arange(rows)).to(torch.int32)
    starts[-1], ends[0] = -5, 0
    return {
        "q": _values((rows, heads, head_dim), g, ties).to(q_dtype),
        "k": _values((length, head_dim), g, ties).to(k_dtype),
        "weights": _values((rows, heads), g, ties),
        "row_starts": starts,
        "row_ends": ends,
        "k_scale": torch.rand(length, generator=g) + 0.1 if not ties else None,
    }


def paged_inputs(
    q_dtype: torch.dtype,
    cache_dtype: torch.dtype,
    form: str,
    requests: int,
    next_n: int,
    length: int,
    heads: int = 64,
    head_dim: int = 128,
    page_size: int = 64,
) -> Inputs:
    """Arguments of `paged_mqa_logits`; `form` is "drafts", "own lengths" or "ragged"."""
    g = torch.Generator().manual_seed(requests + next_n + length)
    pages = -(-length // page_size)
    table = torch.randperm(requests * pages, generator=g).view(requests, pages).to(torch.int32)
    lengths = torch.randint(0, length + 1, (requests, next_n), generator=g, dtype=torch.int32)
    lengths[0] = length
    inputs = {
        "q": torch.randn(requests, next_n, heads, head_dim, generator=g).to(q_dtype),
        "cache": _cache(requests * pages, page_size, head_dim, cache_dtype, g),
        "weights": torch.randn(requests * next_n, heads, generator=g),
        "context_lens": lengths[:, 0] if form == "drafts" else lengths,
        "block_table": table,
        "max_context_len": length,
        "page_size": page_size,
    }
    if form == "ragged":
        order = torch.randperm(requests * next_n, generator=g) % requests
        inputs |= {
            "q": inputs["q"].flatten(0, 1)[:, None],
            "context_lens": lengths.flatten(),
            "row_to_request": order.to(torch.int32),
        }
    return inputs


def score_rows(rows: int, length: int, regime: str) -> torch.Tensor:
    """[rows, length] fp32 scores of a regime of the selection's tests."""
    g = torch.Generator().manual_seed(rows + length)
    x = torch.randn(rows, length, generator=g)
    place = torch.arange(length).expand(rows, -1)
    if regime == "relu":  # half of them 0, of either sign
        return x.clamp(min=0) * torch.where(place % 2 == 0, -0.0, 1.0)
    if regime == "equal":
        return torch.full_like(x, 0.25)
    if regime == "plateau":  # a few above it, most of the row in it
        return torch.where(place % 97 == 3, x.abs() + 1, 0.5)
    if regime == "close":
        return 1 + x.abs() * 2.0**-20
    if regime == "ascending":
        return place.float().contiguous() + 1e6
    if regime == "special":
        fill = torch.tensor([NAN, -NAN, -INF, INF])[place % 4]
        return torch.where(torch.rand(x.shape, generator=g) < 0.3, fill, x)
    if regime == "few numbers":
        return torch.where(place % 1000 == 7, x, NAN)
    return x


def sorted_selection(
    logits: torch.Tensor,
    k: int,
    starts: torch.Tensor | None = None,
    ends: torch.Tensor | None = None,
) -> torch.Tensor:
    """The selection rule by a stable sort of float64 scores."""
    rows, length = logits.shape
    place = torch.arange(length, device=logits.device).expand(rows, -1)
    first = place.new_zeros(rows) if starts is None else starts.long().clamp(min=0)
    last = place.new_full((rows,), length) if ends is None else ends.long()
    scores = logits.double().nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    seen = (place >= first[:, None]) & (place < last[:, None])
    scores = scores.masked_fill_(~seen, -torch.inf) + 0.0  # −0.0 + 0.0 is 0.0
    best, order = scores.sort(dim=1, descending=True, stable=True)
    kept = torch.where(best[:, :k] > -torch.inf, order[:, :k], length)
    kept = kept.sort(dim=1).values
    kept = torch.where(kept < length, kept - first[:, None], -1)
    return torch.nn.functional.pad(kept, (0, k - kept.shape[1]), value=-1).to(torch.int32)


def _values(shape: tuple[int, ...], g: torch.Generator, ties: bool) -> torch.Tensor:
    """Normal values; with `ties` −1, 0 and 1, which make most scores equal and none rounded."""
    if ties:
        return torch.randint(-1, 2, shape, generator=g).float()
    return torch.randn(shape, generator=g)


def _cache(
    pages: int, page_size: int, head_dim: int, dtype: torch.dtype, g: torch.Generator
) -> torch.Tensor:
    """A cache of random keys, its pages one layer of a pool; fp8 keys have scales near 1/448."""
    keys = torch.randn(pages, page_size, head_dim, generator=g)
    if dtype != FP8:
        return torch.stack([keys.to(dtype)] * 2, dim=1)[:, 1]
    scales = torch.rand(pages, page_size, generator=g) + 0.1
    payload = keys.to(FP8).view(torch.uint8).flatten(1)
    pool = torch.zeros(pages, 2, page_size * (head_dim + 4), dtype=torch.uint8)
    pool[:, 1] = torch.cat([payload, scales.view(torch.uint8).view(pages, -1)], dim=1)
    return pool[:, 1].unflatten(1, (page_size, 1, head_dim + 4))
