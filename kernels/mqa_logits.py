"""Ragged indexer scores: every query row against a window of one key sequence."""

from __future__ import annotations

import torch

from .backend import on_device_of, target_of, tl, triton, use_triton
from .checks import check_out, content_checks
from .e4m3 import as_bytes
from .registry import register_op
from .score_args import check_ragged_args, check_windows
from .score_cpu import CpuScorer, widen_into
from .score_queries import encoded_queries
from .score_tile import cut, load_keys, score_row, tile_constants, typed


def mqa_logits(
    q: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor,
    row_starts: torch.Tensor,
    row_ends: torch.Tensor,
    *,
    k_scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """out[t,s] = k_scale[s]·Σ_h weights[t,h]·relu(q[t,h]·k[s]) in [start,end), −inf elsewhere.

    Args:
        q: [T, H, D] bf16, fp16, fp32 or fp8 e4m3fn; H ≤ 128, D ≤ 256. Any strides, as below.
        k: [L, D] of q's dtype, or of one that q's holds exactly (fp8 with any, bf16 and fp16
            with fp32).
        weights: [T, H] fp32, with every other factor folded in (D^-0.5, H^-0.5, q's fp8 scale).
        row_starts, row_ends: [T] int32 or int64, row t sees the keys [start, end). A window is
            cut to [0, L); end ≤ start, negative ends included, is an empty row.
        k_scale: [L] fp32, one factor a key; None is 1.
        out: [T, L] fp32, sharing no memory with the inputs.

    Returns:
        `out`: fp32 scores, −inf outside the windows whatever q, k and k_scale hold there. NaN in
        a visible key gives NaN.

    Raises:
        TypeError, ValueError: an argument of wrong type, dtype, shape or device; with
            LIGHTNING_INDEXER_CHECK=1 a window that is not empty and leaves [0, L). `out` is
            untouched then.

    Guarantees:
        A score's bits depend on its query, key, weights and scale, on dtypes, H, D and the
        device; not on T, L, the windows or other rows, and equal `paged_mqa_logits`'s. fp32 is
        computed in IEEE fp32. Does not synchronise on a GPU.

    Source:
        The lightning indexer of DeepSeek-V3.2; DeepGEMM's `fp8_mqa_logits`.
    """
    rows, length, device = check_ragged_args(q, k, weights, row_starts, row_ends, k_scale)
    if out is None:
        out = torch.empty((rows, length), dtype=torch.float32, device=device)
    else:
        check_out(out, dtype=torch.float32, shape=(rows, length), device=device)
    MQA_LOGITS_OP(as_bytes(q), as_bytes(k), weights, row_starts, row_ends, k_scale, out=out)
    return out


def _mqa_logits(
    q: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor,
    row_starts: torch.Tensor,
    row_ends: torch.Tensor,
    k_scale: torch.Tensor | None,
    *,
    out: torch.Tensor,
) -> None:
    """The op; uint8 q or k holds e4m3fn."""
    if content_checks(out):
        check_windows(row_starts, row_ends, k.shape[0])
    if out.numel() == 0:
        return
    score = _launch if use_triton(out) else _score_on_cpu
    score(q, k, weights, row_starts, row_ends, k_scale, out)


MQA_LOGITS_OP = register_op(
    "mqa_logits(Tensor q, Tensor k, Tensor weights, Tensor row_starts, Tensor row_ends,"
    " Tensor? k_scale, *, Tensor(a!) out) -> ()",
    _mqa_logits,
    mutates="out",
)


def _score_on_cpu(
    q: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor,
    row_starts: torch.Tensor,
    row_ends: torch.Tensor,
    k_scale: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    def load(first: int, count: int, keys: torch.Tensor) -> tuple[torch.Tensor | None, None]:
        widen_into(keys, k[first : first + count])
        return (None if k_scale is None else k_scale[first : first + count]), None

    starts = [max(start, 0) for start in row_starts.tolist()]
    ends = [min(end, k.shape[0]) for end in row_ends.tolist()]
    out.fill_(float("-inf"))
    scorer = CpuScorer(q.shape[1], q.shape[2], q.shape[0])
    scorer.run(q, weights, starts, ends, load, out)


def _launch(
    q: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor,
    row_starts: torch.Tensor,
    row_ends: torch.Tensor,
    k_scale: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    (rows, heads, head_dim), length = q.shape, k.shape[0]
    constants = tile_constants(target_of(out.device), q.dtype, k.dtype, heads, head_dim)
    grid = (
        triton.cdiv(rows, constants["BLOCK_ROWS"]),
        triton.cdiv(length, constants["BLOCK_KEYS"]),
    )
    scale = weights if k_scale is None else k_scale  # any pointer: it is never read
    with on_device_of(out):
        q = encoded_queries(q[None], constants["OPERAND"])[0]
        _mqa_logits_kernel[grid](
            q,
            *q.stride(),
            k,
            *k.stride(),
            scale,
            scale.stride(0),
            weights,
            *weights.stride(),
            row_starts,
            row_starts.stride(0),
            row_ends,
            row_ends.stride(0),
            out,
            *out.stride(),
            rows,
            length,
            HAS_SCALE=k_scale is not None,
            **constants,
        )


@triton.jit
def _mqa_logits_kernel(
    q_ptr,
    stride_qt,
    stride_qh,
    stride_qd,
    k_ptr,
    stride_kl,
    stride_kd,
    scale_ptr,
    stride_scale,
    w_ptr,
    stride_wt,
    stride_wh,
    starts_ptr,
    stride_starts,
    ends_ptr,
    stride_ends,
    out_ptr,
    stride_ot,
    stride_ol,
    T,
    L,
    H: tl.constexpr,
    D: tl.constexpr,
    HAS_SCALE: tl.constexpr,
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
    first_row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS
    offs_t = first_row + tl.arange(0, BLOCK_ROWS)
    offs_l = tl.program_id(1).to(tl.int64) * BLOCK_KEYS + tl.arange(0, BLOCK_KEYS)
    mask_t = offs_t < T
    mask_l = offs_l < L
    starts = tl.load(starts_ptr + offs_t * stride_starts, mask=mask_t, other=0)
    ends = tl.load(ends_ptr + offs_t * stride_ends, mask=mask_t, other=0)
    num_rows = tl.sum(mask_t.to(tl.int32))
    tile_start = tl.program_id(1) * BLOCK_KEYS
    overlap = (ends > starts) & (starts < tile_start + BLOCK_KEYS) & (ends > tile_start)
    if tl.max(overlap.to(tl.int32)) > 0:
        key_ptrs = k_ptr + offs_l * stride_kl
        keys = load_keys(key_ptrs, stride_kd, mask_l, 0, D, CHUNK_D, OPERAND, USE_PTX)
        if HAS_SCALE:
            scale = tl.load(scale_ptr + offs_l * stride_scale, mask=mask_l, other=0.0)
        for i in range(BLOCK_ROWS if FIXED_ROWS else num_rows):
            t = tl.minimum(first_row + i, T - 1)  # with FIXED_ROWS the last row may come again
            scores = score_row(
                keys,
                key_ptrs,
                stride_kd,
                mask_l,
                q_ptr + t * stride_qt,
                stride_qh,
                stride_qd,
                w_ptr + t * stride_wt,
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
            start = cut(tl.load(starts_ptr + t * stride_starts), L)
            width = cut(tl.load(ends_ptr + t * stride_ends), L) - start
            # one compare: an offset before the start is a huge unsigned number
            offs = tile_start - start + tl.arange(0, BLOCK_KEYS)
            visible = offs.to(tl.uint32) < tl.maximum(width, 0).to(tl.uint32)
            scores = tl.where(visible, scores, float("-inf"))
            tl.store(out_ptr + t * stride_ot + offs_l * stride_ol, scores, mask=mask_l)
    else:
        for i in range(BLOCK_ROWS if FIXED_ROWS else num_rows):
            t = tl.minimum(first_row + i, T - 1)
            nothing = tl.full((BLOCK_KEYS,), float("-inf"), tl.float32)
            tl.store(out_ptr + t * stride_ot + offs_l * stride_ol, nothing, mask=mask_l)
