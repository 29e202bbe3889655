"""Index queries as the projections leave them → what the scoring ops take."""

from __future__ import annotations

import math

import torch

from .backend import on_device_of, target_of, tl, triton, use_triton
from .cache_layout import FLOAT_CACHES
from .checks import check_out, check_tensor, content_checks
from .e4m3 import as_bytes
from .pairwise import hadamard_on_cpu, hadamard_rows
from .quantize import (
    E4M3_MAX,
    MIN_AMAX,
    check_scale_format,
    convert,
    quantize_on_cpu,
    quantize_rows,
)
from .registry import register_op
from .rope_rows import (
    CPU_TILE,
    Rope,
    check_hadamard,
    check_positions,
    check_rope,
    partner_dims,
    rotated,
    rotation,
    swapped_neighbours,
)

TILE = 1024  # elements a program: 8 heads of D=128, which share the cosines of their token
WARP_ELEMENTS = 1024  # 32 a thread; a lone warp exchanges elements without barriers


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
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x = hadamard(rope(q)); out = e4m3(x / s), weights·scale·s, with one s a token and head.

    s = max(max_d |x|, 1e-4) / 448 in fp32, or its power-of-two ceiling, as `write_index_k` has it.
    Pair (a, b) of the rotary dimensions becomes (a·cos − b·sin, b·cos + a·sin). The transform is
    x·H·D^-0.5, H[i,j] = (−1)^popcount(i & j), added up bit by bit from the lowest. All of it is
    IEEE fp32, operation by operation, rounded once at the end; models that round the rotated query
    to bf16 on the way lose digits there that this keeps.

    Args:
        q: [T, H, D] bf16, fp16 or fp32, any strides.
        weights: [T, H] bf16, fp16 or fp32, any strides: one for each head, nothing folded in yet.
        positions: [T] int32 or int64, any stride: rows of the tables; −1 for no token. None: row t
            of the tables is that of query row t.
        cos: [positions, rope_dim/2] fp32, any strides. YaRN and other scalings, the attention
            factor included, are a matter of the tables.
        sin: like cos.
        rope_style: "half_split" (pairs i, i + rope_dim/2) or "interleaved" (pairs 2i, 2i+1).
        rope_first: the first rope_dim dimensions are rotated; False: the last.
        hadamard: transform the query, as its keys are. D must be a power of two.
        scale_format: "fp32", "ue8m0" for power-of-two scales, None to leave x a float (s = 1).
        scale: what weights are multiplied by; D^-0.5·H^-0.5 if not given.
        out: (queries, weights), [T, H, D] e4m3 (q's dtype without a scale_format) and [T, H] fp32,
            any strides, sharing no memory with the inputs.

    Returns:
        `out`, as above. A position outside the tables, −1 included, rotates by NaN: every score
        of the row is NaN and nothing is selected.

    Raises:
        TypeError, ValueError: an argument of wrong type, dtype, shape or device. With
            LIGHTNING_INDEXER_CHECK=1 also a position below −1 or past the tables. Nothing is
            written then.

    Guarantees:
        The same bits on every device (NaN payloads aside), whatever else is in the batch. Never
        reads outside the tables. Does not synchronise.

    Source:
        DeepSeek-V3.2's indexer, whose `rotate_activation` is this transform; vLLM and SGLang fold
        the scale into the weights.
    """
    rows, heads, head_dim = check_tensor("q", q, dtype=FLOAT_CACHES, shape=(None,) * 3).shape
    if heads < 1 or head_dim < 1:
        raise ValueError(f"q must have at least one head and one column, got {list(q.shape)}")
    check_tensor("weights", weights, dtype=FLOAT_CACHES, shape=(rows, heads), device=q.device)
    check_rope(q, positions, cos, sin, rope_style, rope_first)
    check_hadamard(hadamard, head_dim)
    if scale_format is not None:
        check_scale_format(scale_format)
    if scale is None:
        scale = head_dim**-0.5 * heads**-0.5
    elif isinstance(scale, bool) or not isinstance(scale, (int, float)):
        raise TypeError(f"scale must be a number, got {type(scale).__name__}")
    elif not math.isfinite(scale):
        raise ValueError(f"scale must be finite, got {scale}")
    dtype = q.dtype if scale_format is None else torch.float8_e4m3fn
    if out is None:
        out = (
            torch.empty((rows, heads, head_dim), dtype=dtype, device=q.device),
            torch.empty((rows, heads), dtype=torch.float32, device=q.device),
        )
    else:
        if not (isinstance(out, tuple) and len(out) == 2):
            raise TypeError(f"out must be a tuple (queries, weights), got {type(out).__name__}")
        check_out(out[0], dtype=dtype, shape=(rows, heads, head_dim), device=q.device)
        check_out(out[1], dtype=torch.float32, shape=(rows, heads), device=q.device)
    _op(
        *(q, weights, positions, cos, sin),
        *(rope_style == "interleaved", rope_first, hadamard, scale_format == "ue8m0"),
        float(scale),
        out=[as_bytes(out[0]), out[1]],
    )
    return out


def _prepare_index_q(
    q: torch.Tensor,
    weights: torch.Tensor,
    positions: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
    rope_first: bool,
    transform: bool,
    ue8m0: bool,
    scale: float,
    *,
    out: list[torch.Tensor],
) -> None:
    rope = Rope(positions, cos, sin, interleaved, rope_first)
    if content_checks(q):
        check_positions(positions, cos.shape[0], None)
    rows, heads, head_dim = q.shape
    if rows == 0:
        return
    if not use_triton(q):
        step = max(CPU_TILE // (heads * head_dim), 1)
        for start in range(0, rows, step):
            _prepare_on_cpu(q, weights, rope, transform, ue8m0, scale, out, start, step)
        return
    block_d = triton.next_power_of_2(head_dim)
    block_h = min(triton.next_power_of_2(heads), max(TILE // block_d, 1))
    with on_device_of(q):
        _prepare_index_q_kernel[(rows, triton.cdiv(heads, block_h))](
            *(q, *q.stride()),
            *(weights, *weights.stride()),
            *rope.arguments(),
            *(out[0], *out[0].stride()),
            *(out[1], *out[1].stride()),
            *(scale, heads),
            D=head_dim,
            **rope.constants(head_dim),
            HADAMARD=head_dim**-0.5 if transform else None,
            UE8M0=ue8m0,
            E4M3_MAX=E4M3_MAX,
            MIN_AMAX=MIN_AMAX,
            FP8_UNITS=target_of(q.device).has_fp8_dot,
            BLOCK_H=block_h,
            BLOCK_D=block_d,
            num_warps=num_warps(block_h * block_d),
            enable_fp_fusion=False,  # a multiply-add rounds once, PyTorch's operations twice
        )


def num_warps(tile: int) -> int:
    """Warps for a tile of that many elements."""
    return min(max(tile // WARP_ELEMENTS, 1), 8)


def _prepare_on_cpu(
    q: torch.Tensor,
    weights: torch.Tensor,
    rope: Rope,
    transform: bool,
    ue8m0: bool,
    scale: float,
    out: list[torch.Tensor],
    start: int,
    step: int,
) -> None:
    rows = slice(start, start + step)
    x = rope.on_cpu(q[rows].to(torch.float32, copy=True), rows)
    if transform:
        x = hadamard_on_cpu(x)
    folded = weights[rows].float() * torch.tensor(scale, dtype=torch.float32)
    if out[0].dtype == torch.uint8:
        x, q_scale = quantize_on_cpu(x, ue8m0)
        folded *= q_scale
    out[0][rows] = x
    out[1][rows] = folded


_op = register_op(
    "prepare_index_q(Tensor q, Tensor weights, Tensor? positions, Tensor cos, Tensor sin,"
    " bool interleaved, bool rope_first, bool hadamard, bool ue8m0, float scale,"
    " *, Tensor(a!)[] out) -> ()",
    _prepare_index_q,
    mutates="out",
)


@triton.jit
def _prepare_index_q_kernel(
    q_ptr,
    stride_qt,
    stride_qh,
    stride_qd,
    weights_ptr,
    stride_wt,
    stride_wh,
    positions_ptr,
    stride_p,
    cos_ptr,
    stride_cp,
    stride_cd,
    sin_ptr,
    stride_sp,
    stride_sd,
    known,
    out_ptr,
    stride_ot,
    stride_oh,
    stride_od,
    out_weights_ptr,
    stride_owt,
    stride_owh,
    scale,
    H,
    D: tl.constexpr,
    ROPE_START: tl.constexpr,
    ROPE_DIMS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HADAMARD: tl.constexpr,
    UE8M0: tl.constexpr,
    E4M3_MAX: tl.constexpr,
    MIN_AMAX: tl.constexpr,
    FP8_UNITS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    offs_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    mask_h = offs_h < H
    offs_h = offs_h.to(tl.int64)
    offs_d = tl.arange(0, BLOCK_D)
    mask = mask_h[:, None] & (offs_d < D)[None, :]
    q_ptrs = q_ptr + row * stride_qt + offs_h[:, None] * stride_qh  # [BLOCK_H, 1]
    dims = offs_d.to(tl.int64)[None, :] * stride_qd
    x = convert(tl.load(q_ptrs + dims, mask=mask, other=0.0), tl.float32)  # [BLOCK_H, BLOCK_D]
    if ROPE_DIMS > 0:
        position = row if positions_ptr is None else tl.load(positions_ptr + row * stride_p)
        cos, sin = rotation(
            *(position + tl.zeros([BLOCK_D], tl.int64), offs_d),
            *(cos_ptr, stride_cp, stride_cd),
            *(sin_ptr, stride_sp, stride_sd),
            *(known, ROPE_START, ROPE_DIMS, INTERLEAVED),
        )  # [BLOCK_D]
        if INTERLEAVED:
            partner = swapped_neighbours(x)
        else:
            dims = partner_dims(offs_d, ROPE_START, ROPE_DIMS).to(tl.int64)[None, :] * stride_qd
            partner = convert(tl.load(q_ptrs + dims, mask=mask, other=0.0), tl.float32)
        x = rotated(x, partner, cos[None, :], sin[None, :], offs_d, ROPE_START, ROPE_DIMS)
    if HADAMARD is not None:
        x = hadamard_rows(x, HADAMARD)
    w_ptrs = weights_ptr + row * stride_wt + offs_h * stride_wh
    folded = convert(tl.load(w_ptrs, mask=mask_h, other=0.0), tl.float32) * scale
    out_ptrs = out_ptr + row * stride_ot + offs_h[:, None] * stride_oh
    out_ptrs += offs_d.to(tl.int64)[None, :] * stride_od
    if out_ptr.dtype.element_ty == tl.uint8:
        payload, q_scale = quantize_rows(x, UE8M0, E4M3_MAX, MIN_AMAX, FP8_UNITS)
        tl.store(out_ptrs, payload, mask=mask)
        folded *= q_scale
    else:
        tl.store(out_ptrs, convert(x, out_ptr.dtype.element_ty), mask=mask)
    tl.store(out_weights_ptr + row * stride_owt + offs_h * stride_owh, folded, mask=mask_h)
