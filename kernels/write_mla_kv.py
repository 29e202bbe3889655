"""Latent keys and values → the 656-byte rows of an fp8 MLA cache."""

from __future__ import annotations

from typing import Any

import torch

from .backend import on_device_of, tl, triton, use_triton
from .cache_layout import FLOAT_CACHES
from .checks import INDEX_DTYPES, check_range, check_tensor, content_checks
from .quantize import (
    E4M3_MAX,
    MIN_AMAX,
    check_scale_format,
    convert,
    quantize_on_cpu,
    quantize_rows,
)
from .registry import register_op
from .sparse_mla_rows import GROUP, ROPE, VALUES, check_rows, split_rows
from .write_index_k import SCAN_TILE, _last_writer

GROUPS = VALUES // GROUP
BLOCK_N = 8  # keys a program: of many keys each reads all later slots


def write_mla_kv(
    cache: torch.Tensor, kv: torch.Tensor, slots: torch.Tensor, *, scale_format: str = "fp32"
) -> None:
    """cache[slots[i]] ← e4m3(kv[i,:512] / scale), its 4 scales, and bf16(kv[i,512:]), in place.

    Each 128 values have a scale of their own: max(max |kv|, 1e-4) / 448 in fp32, or its power-of-
    two ceiling. A payload is the fp32 quotient rounded to nearest even.

    Args:
        cache: uint8 [slots, 656], rows contiguous and a multiple of 4 bytes apart (of a paged
            cache [P, S, 656], the view [P·S, 656]): 512 e4m3 values, 4 fp32 scales, 64 bf16 values.
        kv: [n, 576] bf16, fp16 or fp32, any strides: the normed latent, then the rotated part.
        slots: [n] int32 or int64, any stride. −1, or a slot outside the cache: row not written.
        scale_format: "fp32", or "ue8m0" for power-of-two scales.

    Returns:
        None.

    Raises:
        TypeError, ValueError: an argument of wrong type, dtype, shape or device. With
            LIGHTNING_INDEXER_CHECK=1 also a slot outside [−1, slots); nothing is written then.

    Guarantees:
        The same bytes on every device (NaN payloads of the bf16 part aside). Of equal slots the
        last one wins. Only the addressed rows change. Does not synchronise.

    Source:
        FlashMLA's fp8 cache; vLLM's `concat_and_cache_mla` for `fp8_ds_mla`.
    """
    check_tensor("kv", kv, dtype=FLOAT_CACHES, shape=(None, VALUES + ROPE))
    check_tensor("cache", cache, dtype=torch.uint8, device=kv.device)
    check_rows("cache", cache)
    check_tensor("slots", slots, dtype=INDEX_DTYPES, shape=(kv.shape[0],), device=kv.device)
    check_scale_format(scale_format)
    _op(cache, kv, slots, scale_format == "ue8m0")


def _write_mla_kv(cache: torch.Tensor, kv: torch.Tensor, slots: torch.Tensor, ue8m0: bool) -> None:
    values, scales, rope = split_rows("cache", cache)
    count, capacity = kv.shape[0], cache.shape[0]
    if content_checks(cache):
        check_range("slots", slots, -1, capacity)
    if count == 0 or capacity == 0:
        return
    if not use_triton(cache):
        _write_on_cpu(values, scales, rope, kv, slots, ue8m0)
        return
    with on_device_of(cache):
        _write_mla_kv_kernel[(triton.cdiv(count, BLOCK_N),)](
            *(values, scales, rope),
            *(values.stride(0), scales.stride(0), rope.stride(0)),
            *(kv, *kv.stride()),
            *(slots, slots.stride(0)),
            *(count, capacity),
            **write_constants(ue8m0),
        )


def write_constants(ue8m0: bool) -> dict[str, Any]:
    """What the kernel is compiled with."""
    return {
        "VALUES": VALUES,
        "GROUP": GROUP,
        "ROPE": ROPE,
        "UE8M0": ue8m0,
        "E4M3_MAX": E4M3_MAX,
        "MIN_AMAX": MIN_AMAX,
        "BLOCK_N": BLOCK_N,
        "BLOCK_S": SCAN_TILE // BLOCK_N,
    }


def _write_on_cpu(
    values: torch.Tensor,
    scales: torch.Tensor,
    rope: torch.Tensor,
    kv: torch.Tensor,
    slots: torch.Tensor,
    ue8m0: bool,
) -> None:
    # A stable sort puts the last writer of each slot at the end of its run.
    slots, order = slots.long().sort(stable=True)
    last = torch.ones_like(slots, dtype=torch.bool)
    last[:-1] = slots[:-1] != slots[1:]
    last &= (slots >= 0) & (slots < values.shape[0])
    kv, rows = kv[order[last]], slots[last]
    payload, scale = quantize_on_cpu(kv[:, :VALUES].reshape(-1, GROUPS, GROUP), ue8m0)
    values[rows], scales[rows] = payload.view(-1, VALUES), scale
    rope[rows] = kv[:, VALUES:].to(torch.bfloat16)


_op = register_op(
    "write_mla_kv(Tensor(a!) cache, Tensor kv, Tensor slots, bool ue8m0) -> ()",
    _write_mla_kv,
    mutates="cache",
)


@triton.jit
def _write_mla_kv_kernel(
    values_ptr,
    scales_ptr,
    rope_ptr,
    stride_v,
    stride_s,
    stride_r,
    kv_ptr,
    stride_kn,
    stride_kd,
    slots_ptr,
    stride_slots,
    n,
    capacity,
    VALUES: tl.constexpr,
    GROUP: tl.constexpr,
    ROPE: tl.constexpr,
    UE8M0: tl.constexpr,
    E4M3_MAX: tl.constexpr,
    MIN_AMAX: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    GROUPS: tl.constexpr = VALUES // GROUP
    first = tl.program_id(0) * BLOCK_N
    offs_n = first + tl.arange(0, BLOCK_N)
    slot = tl.load(slots_ptr + offs_n.to(tl.int64) * stride_slots, mask=offs_n < n, other=-1)
    written = (slot >= 0) & (slot < capacity)  # [BLOCK_N]
    written &= _last_writer(slot, offs_n, slots_ptr, stride_slots, first, n, BLOCK_S) == offs_n
    row = slot.to(tl.int64)
    kv_ptrs = kv_ptr + offs_n.to(tl.int64) * stride_kn

    offs_g = tl.arange(0, GROUPS)
    mask = _flat(written[:, None] & (offs_g >= 0)[None, :])  # [BLOCK_N · GROUPS]
    column = _flat((offs_g * GROUP)[None, :] + tl.zeros_like(offs_n)[:, None])
    offs_d = column[:, None] + tl.arange(0, GROUP)[None, :]
    k_ptrs = _flat(tl.broadcast_to(kv_ptrs[:, None], [BLOCK_N, GROUPS]))[:, None]
    x = tl.load(k_ptrs + offs_d.to(tl.int64) * stride_kd, mask=mask[:, None], other=0.0)
    payload, scale = quantize_rows(
        convert(x, tl.float32), UE8M0, E4M3_MAX, MIN_AMAX, FP8_UNITS=False
    )
    rows = _flat(tl.broadcast_to(row[:, None], [BLOCK_N, GROUPS]))
    tl.store(values_ptr + (rows * stride_v)[:, None] + offs_d, payload, mask=mask[:, None])
    tl.store(scales_ptr + rows * stride_s + column // GROUP, scale, mask=mask)

    offs_r = tl.arange(0, ROPE)
    r_ptrs = kv_ptrs[:, None] + (VALUES + offs_r).to(tl.int64)[None, :] * stride_kd
    x = tl.load(r_ptrs, mask=written[:, None], other=0.0)  # [BLOCK_N, ROPE]
    out = rope_ptr + (row * stride_r)[:, None] + offs_r[None, :]
    tl.store(out, convert(x, tl.bfloat16), mask=written[:, None])


@triton.jit
def _flat(x):
    return tl.reshape(x, [x.shape[0] * x.shape[1]])
