"""The Triton kernel of `paged_mqa_logits`: pages found through the block table, tile by tile."""

from __future__ import annotations

import torch

from .backend import on_device_of, target_of, tl, triton
from .cache_layout import split_pages
from .score_tile import load_keys, score_row, tile_constants


def launch_paged_mqa_logits(
    q: torch.Tensor,
    cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    row_to_request: torch.Tensor | None,
    page_size: int,
    out: torch.Tensor,
) -> None:
    """Launches the kernel for a checked call with a non-empty `out`; uint8 q holds e4m3fn."""
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
