"""fp8 queries on devices that cannot multiply e4m3fn as it is: re-encoded once, not once a tile."""

from __future__ import annotations

from typing import Any

import torch

from .backend import target_of, tl, triton
from .e4m3 import e4m3_to_fnuz, e4m3_to_fp16


def encoded_queries(q: torch.Tensor, operand: Any) -> torch.Tensor:
    """`q` [B, N, H, D] in a form whose elements the scoring kernels multiply as `operand`.

    e4m3fn bytes become e4m3fnuz bytes of half the value for `tl.float8e4b8`, and fp16 numbers for
    everything that is not e4m3fn itself; any other q is returned as it is.
    """
    if q.dtype != torch.uint8 or operand == tl.float8e4nv:
        return q
    to_fnuz = operand == tl.float8e4b8
    out = torch.empty(q.shape, dtype=torch.uint8 if to_fnuz else torch.float16, device=q.device)
    batch, next_n, heads, head_dim = q.shape
    size = heads * head_dim
    # in the interpreter programs are what costs
    block = triton.next_power_of_2(size) if target_of(q.device).backend == "interpreter" else 1024
    grid = (batch * next_n, triton.cdiv(size, block))
    _encode_queries_kernel[grid](
        q, *q.stride(), out, next_n, H=heads, D=head_dim, TO_FNUZ=to_fnuz, BLOCK=block
    )
    return out


@triton.jit
def _encode_queries_kernel(
    q_ptr,
    stride_qb,
    stride_qn,
    stride_qh,
    stride_qd,
    out_ptr,  # [B, N, H, D], contiguous
    N,
    H: tl.constexpr,
    D: tl.constexpr,
    TO_FNUZ: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # into one row, [H, D]
    mask = offs < H * D
    h, d = (offs // D).to(tl.int64), (offs % D).to(tl.int64)
    q_ptrs = q_ptr + row // N * stride_qb + row % N * stride_qn + h * stride_qh + d * stride_qd
    q = tl.load(q_ptrs, mask=mask, other=0)
    encoded = e4m3_to_fnuz(q) if TO_FNUZ else e4m3_to_fp16(q)
    tl.store(out_ptr + row * (H * D) + offs, encoded, mask=mask)
