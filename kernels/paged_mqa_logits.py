"""Paged indexer scores: every query row against the cached keys of its request."""

from __future__ import annotations

import torch

from .backend import on_device_of, target_of, tl, triton, use_triton
from .cache_layout import split_pages
from .checks import check_out, content_checks
from .e4m3 import as_bytes
from .paged_args import check_paged_args, check_paged_contents
from .registry import register_op
from .score_cpu import CpuScorer, widen_into
from .score_tile import load_keys, score_row, tile_constants


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
    score = _launch if use_triton(out) else _score_on_cpu
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
    lengths = row_lengths(context_lens, next_n).clamp(max=out.shape[1]).tolist()
    requests = range(len(lengths)) if row_to_request is None else row_to_request.tolist()
    scorer = CpuScorer(heads, head_dim, next_n)
    out.fill_(float("-inf"))
    for b, (ends, request) in enumerate(zip(lengths, requests, strict=True)):
        if not 0 <= request < block_table.shape[0]:
            continue
        load = _PageReader(values, scales, block_table[request])
        rows = slice(b * next_n, (b + 1) * next_n)
        scorer.run(q[b], weights[rows], [0] * next_n, ends, load, out[rows])


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


def _launch(
    q: torch.Tensor,
    cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    row_to_request: torch.Tensor | None,
    page_size: int,
    out: torch.Tensor,
) -> None:
    batch, next_n, heads, head_dim = q.shape
    values, scales = split_pages(cache, page_size, head_dim)
    constants = tile_constants(target_of(out.device), q.dtype, heads, head_dim)
    groups = triton.cdiv(next_n, constants["BLOCK_ROWS"])
    grid = (batch * groups, triton.cdiv(out.shape[1], constants["BLOCK_KEYS"]))
    # pointers of absent arguments are never read
    scale = weights if scales is None else scales
    requests = context_lens if row_to_request is None else row_to_request
    per_row = context_lens.dim() == 2
    with on_device_of(out):
        _paged_mqa_logits_kernel[grid](
            q,
            *q.stride(),
            values,
            *values.stride(),
            scale,
            *scale.stride(),
            weights,
            *weights.stride(),
            context_lens,
            context_lens.stride(0),
            context_lens.stride(1) if per_row else 0,
            block_table,
            *block_table.stride(),
            requests,
            requests.stride(0),
            out,
            *out.stride(),
            next_n,
            out.shape[1],
            cache.shape[0],
            block_table.shape[0],
            PAGE_SIZE=page_size,
            OWN_LENGTHS=per_row,
            HAS_SCALE=scales is not None,
            HAS_REQUESTS=row_to_request is not None,
            **constants,
        )


@triton.jit
def _paged_mqa_logits_kernel(
    q_ptr,
    stride_qb,
    stride_qn,
    stride_qh,
    stride_qd,
    k_ptr,
    stride_kp,
    stride_ks,
    stride_kd,
    scale_ptr,
    stride_scale_p,
    stride_scale_s,
    w_ptr,
    stride_wt,
    stride_wh,
    lens_ptr,
    stride_lens_b,
    stride_lens_n,
    block_table_ptr,
    stride_tb,
    stride_tp,
    requests_ptr,
    stride_requests,
    out_ptr,
    stride_ot,
    stride_ol,
    N,
    L,
    P,
    NUM_REQUESTS,
    H: tl.constexpr,
    D: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    OWN_LENGTHS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_REQUESTS: tl.constexpr,
    OPERAND: tl.constexpr,
    BLOCK_H: tl.constexpr,
    CHUNK_D: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    FIXED_ROWS: tl.constexpr,
):
    groups = tl.cdiv(N, BLOCK_ROWS)
    b = (tl.program_id(0) // groups).to(tl.int64)
    first_n = tl.program_id(0) % groups * BLOCK_ROWS
    offs_n = first_n + tl.arange(0, BLOCK_ROWS)
    mask_n = offs_n < N
    tile_start = tl.program_id(1) * BLOCK_KEYS
    offs_l = tile_start + tl.arange(0, BLOCK_KEYS)
    mask_l = offs_l < L
    out_ptr += b * N * stride_ot + offs_l.to(tl.int64) * stride_ol  # [BLOCK_KEYS]

    lens_ptr += b * stride_lens_b
    lens = tl.load(lens_ptr + offs_n.to(tl.int64) * stride_lens_n, mask=mask_n, other=0)
    lens = lens.to(tl.int64)  # a length near the smallest int32 must not wrap
    if not OWN_LENGTHS:
        lens += offs_n - (N - 1)
    longest = tl.minimum(tl.max(tl.where(mask_n, lens, 0)), L)
    request = b
    if HAS_REQUESTS:
        request = tl.load(requests_ptr + b * stride_requests).to(tl.int64)
    known = (request >= 0) & (request < NUM_REQUESTS)
    num_rows = tl.sum(mask_n.to(tl.int32))
    if known & (longest > tile_start):
        table_ptr = block_table_ptr + request * stride_tb
        page_ptrs = table_ptr + (offs_l // PAGE_SIZE).to(tl.int64) * stride_tp
        page = tl.load(page_ptrs, mask=offs_l < longest, other=-1).to(tl.int64)
        slot = (offs_l % PAGE_SIZE).to(tl.int64)
        exists = (page >= 0) & (page < P)
        key_ptrs = k_ptr + page * stride_kp + slot * stride_ks
        keys = load_keys(key_ptrs, stride_kd, exists, 0, D, CHUNK_D, OPERAND)
        if HAS_SCALE:
            scale_ptrs = scale_ptr + page * stride_scale_p + slot * stride_scale_s
            scale = tl.load(scale_ptrs, mask=exists, other=0.0)
        for i in range(BLOCK_ROWS if FIXED_ROWS else num_rows):
            n = tl.minimum(first_n + i, N - 1).to(tl.int64)  # FIXED_ROWS: the last may come again
            t = b * N + n
            scores = score_row(
                keys,
                key_ptrs,
                stride_kd,
                exists,
                q_ptr + b * stride_qb + n * stride_qn,
                stride_qh,
                stride_qd,
                w_ptr + t * stride_wt,
                stride_wh,
                H,
                D,
                BLOCK_H,
                CHUNK_D,
                OPERAND,
            )
            if HAS_SCALE:
                scores = scores * scale
            length = tl.load(lens_ptr + n * stride_lens_n).to(tl.int64)
            if not OWN_LENGTHS:
                length += n - (N - 1)
            scores = tl.where(exists & (offs_l < length), scores, float("-inf"))
            tl.store(out_ptr + n * stride_ot, scores, mask=mask_l)
    else:
        out_ptrs = out_ptr[None, :] + offs_n.to(tl.int64)[:, None] * stride_ot
        tl.store(out_ptrs, float("-inf"), mask=mask_n[:, None] & mask_l[None, :])
