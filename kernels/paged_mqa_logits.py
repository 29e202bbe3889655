"""Paged indexer scores: every query row against the cached keys of its request."""

from __future__ import annotations

from itertools import groupby

import torch

from .backend import use_triton
from .cache_layout import split_pages
from .checks import check_out, content_checks
from .e4m3 import as_bytes
from .paged_args import check_paged_args, check_paged_contents
from .paged_mqa_kernel import launch_paged_mqa_logits
from .registry import register_op
from .score_cpu import CpuScorer, widen_into


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
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """out[t,s] = scale[s]·Σ_h weights[t,h]·relu(q[t,h]·key[s]) for s < length of row t, else −inf.

    Key s of row t lies in page block_table[request of t, s // page_size] at s % page_size.

    Args:
        q: [B, N, H, D] bf16, fp16, fp32 or fp8 e4m3fn, N rows a request; H ≤ 128, D ≤ 256. Or,
            with `row_to_request`, the ragged form [T, 1, H, D]. Any strides, as below.
        cache: uint8 [P, S, 1, D+4], [P, S, D+4] or [P, bytes ≥ S·(D+4)], block-planar (S·D bytes
            of e4m3, then S fp32 scales); or bf16, fp16 or fp32 [P, S, D], a dtype that q's holds
            exactly. Pages of any stride.
        weights: [B·N, H] fp32, with every other factor folded in.
        context_lens: int32 or int64, [B] (row j of a request sees its first len − N + 1 + j
            keys) or [B, N] (each row's own length); [T] in the ragged form. Lengths are cut to
            [0, max_context_len].
        block_table: [B, pages] int32 with pages·page_size ≥ max_context_len; [any, pages] in the
            ragged form. Entries past a row's length are not looked at.
        max_context_len: the width of the result.
        row_to_request: [T] int32 or int64, each row's line of block_table, in any order.
        page_size: S, tokens a page.
        out: [B·N, max_context_len] fp32, sharing no memory with the inputs.

    Returns:
        `out`, flat rows: fp32 scores; −inf past the row's length, in pages outside [0, P), and
        in rows whose request is outside block_table.

    Raises:
        TypeError, ValueError: an argument of wrong type, dtype, shape or device; with
            LIGHTNING_INDEXER_CHECK=1 a length above max_context_len, or a request or page out
            of range in a row that uses it. `out` is untouched then.

    Guarantees:
        The bits of `mqa_logits` on the gathered keys, whatever B, N, the page map and the form.
        Nothing is read outside the cache and the table. Does not synchronise on a GPU.

    Source:
        DeepGEMM's `fp8_paged_mqa_logits`; the cache bytes of vLLM and SGLang on NVIDIA.
    """
    rows, device = check_paged_args(
        q, cache, weights, context_lens, block_table, max_context_len, row_to_request, page_size
    )
    if out is None:
        out = torch.empty((rows, max_context_len), dtype=torch.float32, device=device)
    else:
        check_out(out, dtype=torch.float32, shape=(rows, max_context_len), device=device)
    PAGED_MQA_LOGITS_OP(
        as_bytes(q), cache, weights, context_lens, block_table, row_to_request, page_size, out=out
    )
    return out


def _paged_mqa_logits(
    q: torch.Tensor,
    cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    row_to_request: torch.Tensor | None,
    page_size: int,
    *,
    out: torch.Tensor,
) -> None:
    """The op; max_context_len is the width of `out`, uint8 q holds e4m3fn."""
    if content_checks(out):
        check_paged_contents(
            row_lengths(context_lens, q.shape[1]),
            block_table,
            row_to_request,
            num_pages=cache.shape[0],
            page_size=page_size,
            max_context_len=out.shape[1],
        )
    if out.numel() == 0:
        return
    score = launch_paged_mqa_logits if use_triton(out) else _score_on_cpu
    score(q, cache, weights, context_lens, block_table, row_to_request, page_size, out)


PAGED_MQA_LOGITS_OP = register_op(
    "paged_mqa_logits(Tensor q, Tensor cache, Tensor weights, Tensor context_lens,"
    " Tensor block_table, Tensor? row_to_request, SymInt page_size, *, Tensor(a!) out) -> ()",
    _paged_mqa_logits,
    mutates="out",
)


def row_lengths(context_lens: torch.Tensor, next_n: int) -> torch.Tensor:
    """The length of each row, [B, N] int64, not yet cut to the context."""
    if context_lens.dim() == 2:
        return context_lens.to(torch.int64)
    if context_lens.dtype == torch.int64:  # one near the smallest must not wrap
        context_lens = context_lens.clamp(min=0)
    behind = torch.arange(next_n, device=context_lens.device) - (next_n - 1)
    return context_lens.to(torch.int64)[:, None] + behind


def _score_on_cpu(
    q: torch.Tensor,
    cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    row_to_request: torch.Tensor | None,
    page_size: int,
    out: torch.Tensor,
) -> None:
    next_n, heads, head_dim = q.shape[1:]
    values, scales = split_pages(cache, page_size, head_dim)
    ends = row_lengths(context_lens, next_n).clamp(max=out.shape[1]).flatten().tolist()
    if row_to_request is None:
        requests = [b for b in range(q.shape[0]) for _ in range(next_n)]
    else:
        requests = row_to_request.tolist()
    # Neighbours of one request share its keys: prefill would else load them once a row.
    runs = [(request, len(list(run))) for request, run in groupby(requests)]
    scorer = CpuScorer(heads, head_dim, max(count for _, count in runs))
    queries = q.flatten(0, 1)
    out.fill_(float("-inf"))
    first = 0
    for request, count in runs:
        rows = slice(first, first + count)
        first += count
        if 0 <= request < block_table.shape[0]:
            load = _PageReader(values, scales, block_table[request])
            scorer.run(queries[rows], weights[rows], [0] * count, ends[rows], load, out[rows])


class _PageReader:
    """Loads a request's keys for `CpuScorer` through its line of the block table."""

    def __init__(
        self, values: torch.Tensor, scales: torch.Tensor | None, pages: torch.Tensor
    ) -> None:
        self.values, self.scales, self.pages = values, scales, pages

    def __call__(
        self, first: int, count: int, keys: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        page_size = self.values.shape[1]
        positions = torch.arange(first, first + count, device="cpu")
        page = self.pages[positions // page_size].to(torch.int64)
        missing = (page < 0) | (page >= self.values.shape[0])
        some_missing = bool(missing.any())
        if some_missing:
            if bool(missing.all()):  # as in a cache of no pages: there is nothing to index
                keys.zero_()
                return None, missing
            page.masked_fill_(missing, 0)
        at = page, positions % page_size
        widen_into(keys, self.values[at])
        scale = None if self.scales is None else self.scales[at]
        return scale, missing if some_missing else None
