"""The Triton kernel of `paged_mqa_logits`: pages found through the block table, tile by tile."""

from __future__ import annotations

import torch

from .backend import on_device_of, target_of, tl, triton
from .cache_layout import split_pages
from .score_queries import encoded_queries
from .score_tile import cut, load_keys, score_row, tile_constants, typed

#: Rows of the ragged form up to which each has programs of its own, to fill the device.
FEW_ROWS = 256


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
    heads, head_dim = q.shape[2:]
    values, scales = split_pages(cache, page_size, head_dim)
    constants = tile_constants(target_of(out.device), q.dtype, values.dtype, heads, head_dim)
    block_rows = constants["BLOCK_ROWS"]
    own_lengths = context_lens.dim() == 2
    if row_to_request is None:
        group = block_rows
    else:  # one "request" of T rows, each with a length of its own, that names its request itself
        q, context_lens = q.transpose(0, 1), context_lens[None]
        own_lengths = True
        group = 1 if q.shape[1] <= FEW_ROWS else block_rows
    batch, next_n = q.shape[:2]
    grid = (batch * triton.cdiv(next_n, group), triton.cdiv(out.shape[1], constants["BLOCK_KEYS"]))
    # pointers of absent arguments are never read
    scale = weights if scales is None else scales
    requests = context_lens if row_to_request is None else row_to_request
    with on_device_of(out):
        q = encoded_queries(q, constants["OPERAND"])
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
            context_lens.stride(1) if own_lengths else 0,
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
            group,
            PAGE_SIZE=page_size,
            OWN_LENGTHS=own_lengths,
            HAS_SCALE=scales is not None,
            HAS_REQUESTS=row_to_request is not None,
            **constants,
        )


@triton.jit(do_not_specialize=["GROUP"])
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
    GROUP,
    H: tl.constexpr,
    D: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    OWN_LENGTHS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_REQUESTS: tl.constexpr,
    OPERAND: tl.constexpr,
    BLOCK_H: tl.constexpr,
    DOT_HEADS: tl.constexpr,
    SUMS: tl.constexpr,
    CHUNK_D: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    USE_PTX: tl.constexpr,
    FIXED_ROWS: tl.constexpr,
):
    q_ptr = typed(q_ptr, OPERAND)
    k_ptr = typed(k_ptr, OPERAND)
    groups = tl.cdiv(N, GROUP)
    b = (tl.program_id(0) // groups).to(tl.int64)
    n = tl.program_id(0) % groups * GROUP
    block_n = n // BLOCK_ROWS * BLOCK_ROWS
    block_end = tl.minimum(block_n + BLOCK_ROWS, N)
    stop = tl.minimum(n + GROUP, N)
    tile_start = tl.program_id(1) * BLOCK_KEYS
    offs_l = tile_start + tl.arange(0, BLOCK_KEYS)
    mask_l = offs_l < L
    out_ptr += b * N * stride_ot + offs_l.to(tl.int64) * stride_ol  # [BLOCK_KEYS]
    w_ptr += b * N * stride_wt
    q_ptr += b * stride_qb
    lens_ptr += b * stride_lens_b
    if HAS_REQUESTS:
        n = first_of_run(requests_ptr, stride_requests, n, block_n, stop)
    # nothing is moved out of the loop: it runs about once, and would hold registers throughout
    while (n < stop) if FIXED_ROWS else tl.condition(n < stop, disable_licm=True):
        request, end = b, block_end
        if HAS_REQUESTS:
            request, end = run_of(requests_ptr, stride_requests, n, block_n, block_end, BLOCK_ROWS)
        offs_n = block_n + tl.arange(0, BLOCK_ROWS)
        mask_n = (offs_n >= n) & (offs_n < end)
        lens = tl.load(lens_ptr + offs_n.to(tl.int64) * stride_lens_n, mask=mask_n, other=0)
        lens = _keys_seen(lens, offs_n, N, OWN_LENGTHS)
        longest = tl.minimum(tl.max(tl.where(mask_n, lens, 0)), L)
        known = (request >= 0) & (request < NUM_REQUESTS)
        if known & (longest > tile_start):
            table_ptr = block_table_ptr + request * stride_tb
            page_ptrs = table_ptr + (offs_l // PAGE_SIZE).to(tl.int64) * stride_tp
            page = tl.load(page_ptrs, mask=offs_l < longest, other=-1).to(tl.int64)
            slot = (offs_l % PAGE_SIZE).to(tl.int64)
            exists = (page >= 0) & (page < P)
            key_ptrs = k_ptr + page * stride_kp + slot * stride_ks
            keys = load_keys(key_ptrs, stride_kd, exists, 0, D, CHUNK_D, OPERAND, USE_PTX)
            if HAS_SCALE:
                scale_ptrs = scale_ptr + page * stride_scale_p + slot * stride_scale_s
                scale = tl.load(scale_ptrs, mask=exists, other=0.0)
            for j in range(BLOCK_ROWS if FIXED_ROWS else end - n):
                row = tl.minimum(n + j, end - 1).to(tl.int64)  # FIXED_ROWS: the last comes again
                scores = score_row(
                    keys,
                    key_ptrs,
                    stride_kd,
                    exists,
                    q_ptr + row * stride_qn,
                    stride_qh,
                    stride_qd,
                    w_ptr + row * stride_wt,
                    stride_wh,
                    H,
                    D,
                    BLOCK_H,
                    DOT_HEADS,
                    SUMS,
                    CHUNK_D,
                    OPERAND,
                    USE_PTX,
                )
                if HAS_SCALE:
                    scores = scores * scale
                length = tl.load(lens_ptr + row * stride_lens_n)
                length = _keys_seen(length, row, N, OWN_LENGTHS)
                scores = tl.where(exists & (offs_l < cut(length, L)), scores, float("-inf"))
                tl.store(out_ptr + row * stride_ot, scores, mask=mask_l)
        else:
            for j in range(BLOCK_ROWS if FIXED_ROWS else end - n):
                row = tl.minimum(n + j, end - 1).to(tl.int64)
                nothing = tl.full((BLOCK_KEYS,), float("-inf"), tl.float32)
                tl.store(out_ptr + row * stride_ot, nothing, mask=mask_l)
        n = end


@triton.jit
def _keys_seen(length, row, N, OWN_LENGTHS: tl.constexpr):
    """length − N + 1 + row in int64, row counting from the request's first; or its own length."""
    if OWN_LENGTHS:
        return length.to(tl.int64)
    if length.dtype == tl.int64:
        length = tl.maximum(length, 0)  # one near the smallest would wrap around
    return length.to(tl.int64) + (row - (N - 1))


@triton.jit
def first_of_run(requests_ptr, stride_requests, n, block_n, stop):
    """n, or `stop` if row n only continues the run of the row before it, another program's."""
    first = n
    if n > block_n:
        request_ptr = requests_ptr + n.to(tl.int64) * stride_requests
        if tl.load(request_ptr) == tl.load(request_ptr - stride_requests):
            first = stop
    return first


@triton.jit
def run_of(requests_ptr, stride_requests, n, block_n, block_end, BLOCK_ROWS: tl.constexpr):
    """The request that row n names, and the end of the run of rows that name it after n."""
    request = tl.load(requests_ptr + n.to(tl.int64) * stride_requests)
    offs_n = block_n + tl.arange(0, BLOCK_ROWS)
    later = (offs_n > n) & (offs_n < block_end)
    ptrs = requests_ptr + offs_n.to(tl.int64) * stride_requests
    others = later & (tl.load(ptrs, mask=later, other=0) != request)
    return request.to(tl.int64), tl.min(tl.where(others, offs_n, block_end))
