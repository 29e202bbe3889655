"""Keys → the paged index-K cache, quantised to e4m3 with one scale a key, or stored as floats."""

from __future__ import annotations

import torch

from .backend import on_device_of, tl, triton, use_triton
from .cache_layout import FLOAT_CACHES, check_cache, split_pages
from .checks import INDEX_DTYPES, check_int, check_range, check_tensor, content_checks
from .quantize import (
    E4M3_MAX,
    MIN_AMAX,
    check_scale_format,
    convert,
    quantize_on_cpu,
    quantize_rows,
)
from .registry import register_op

TILE = 1024  # elements a program: 8 keys of D=128, 16 bytes of bf16 a thread; many small programs
SCAN_TILE = 4096  # pairs of slots compared a step: 8192 keys take 16 steps of one load's latency


def write_index_k(
    cache: torch.Tensor,
    k: torch.Tensor,
    slots: torch.Tensor,
    *,
    page_size: int = 64,
    scale_format: str = "fp32",
) -> None:
    """cache[slots[i]] ← k[i], in place; in a uint8 cache as e4m3(k[i] / scale) and its scale.

    scale = max(max_d |k[i,d]|, 1e-4) / 448 in fp32, or its power-of-two ceiling; the payload is the
    fp32 quotient rounded to nearest even. Slot = page·S + offset in the page.

    Args:
        cache: uint8 [P, S, 1, D+4], [P, S, D+4] or [P, bytes ≥ S·(D+4)], pages contiguous and
            any stride apart: S·D e4m3 bytes, then S fp32 scales (see cache_layout); or bf16, fp16
            or fp32 [P, S, D], any strides, where k is rounded to the cache's dtype.
        k: [n, D] bf16, fp16 or fp32, any strides.
        slots: [n] int32 or int64, any stride. −1, or a slot outside the cache: key not written.
        page_size: S, tokens a page.
        scale_format: "fp32", or "ue8m0" for power-of-two scales. Float caches have no scale.

    Returns:
        None.

    Raises:
        TypeError, ValueError: an argument of wrong type, dtype, shape or device. With
            LIGHTNING_INDEXER_CHECK=1 also a slot outside [−1, P·S); nothing is written then.

    Guarantees:
        The same bytes on every device (NaN payloads of a float cache aside). Of equal slots the
        last one wins. Only the addressed rows change. A NaN element becomes the byte 0x7F and
        leaves the scale alone; an infinite one makes the scale +inf, finite elements 0 and itself
        NaN. Does not synchronise.

    Source:
        vLLM's `indexer_k_quant_and_cache` and SGLang's index-K cache (DeepGEMM's page layout).
    """
    count, head_dim = check_tensor("k", k, dtype=FLOAT_CACHES, shape=(None, None)).shape
    if head_dim < 1:
        raise ValueError(f"k must have at least one column, got {list(k.shape)}")
    check_int("page_size", page_size, minimum=1)
    check_cache(cache, page_size, head_dim)
    check_tensor("cache", cache, device=k.device)
    check_tensor("slots", slots, dtype=INDEX_DTYPES, shape=(count,), device=k.device)
    check_scale_format(scale_format)
    _op(cache, k, slots, page_size, scale_format == "ue8m0")


def _write_index_k(
    cache: torch.Tensor, k: torch.Tensor, slots: torch.Tensor, page_size: int, ue8m0: bool
) -> None:
    count, head_dim = k.shape
    values, scales = split_pages(cache, page_size, head_dim)
    capacity = cache.shape[0] * page_size
    if content_checks(cache):
        check_range("slots", slots, -1, capacity)
    if count == 0 or capacity == 0:
        return
    if not use_triton(cache):
        write_keys_on_cpu(values, scales, k, slots, page_size, ue8m0)
        return
    block_d = triton.next_power_of_2(head_dim)
    block_n = max(TILE // block_d, 1)
    with on_device_of(cache):
        _write_index_k_kernel[(triton.cdiv(count, block_n),)](
            *(values, *values.stride()),
            *((scales, *scales.stride()) if scales is not None else (None, 0, 0)),
            *(k, *k.stride()),
            *(slots, *slots.stride()),
            *(count, capacity),
            D=head_dim,
            PAGE_SIZE=page_size,
            UE8M0=ue8m0,
            E4M3_MAX=E4M3_MAX,
            MIN_AMAX=MIN_AMAX,
            BLOCK_N=block_n,
            BLOCK_D=block_d,
            BLOCK_S=max(SCAN_TILE // block_n, 1),
        )


def write_keys_on_cpu(
    values: torch.Tensor,
    scales: torch.Tensor | None,
    k: torch.Tensor,
    slots: torch.Tensor,
    page_size: int,
    ue8m0: bool,
) -> None:
    """Inserts keys of any float dtype at their slots; of equal slots the last one wins."""
    # A stable sort puts the last writer of each slot at the end of its run.
    slots, order = slots.long().sort(stable=True)
    last = torch.ones_like(slots, dtype=torch.bool)
    last[:-1] = slots[:-1] != slots[1:]
    last &= (slots >= 0) & (slots < values.shape[0] * page_size)
    page, token = slots[last] // page_size, slots[last] % page_size
    k = k[order[last]]
    if scales is None:
        values[page, token] = k.to(values.dtype)
        return
    values[page, token], scales[page, token] = quantize_on_cpu(k, ue8m0)


_op = register_op(
    "write_index_k(Tensor(a!) cache, Tensor k, Tensor slots, int page_size, bool ue8m0) -> ()",
    _write_index_k,
    mutates="cache",
)


@triton.jit
def _write_index_k_kernel(
    values_ptr,
    stride_vp,
    stride_vt,
    stride_vd,
    scales_ptr,
    stride_sp,
    stride_st,
    k_ptr,
    stride_kn,
    stride_kd,
    slots_ptr,
    stride_s,
    n,
    capacity,
    D: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    UE8M0: tl.constexpr,
    E4M3_MAX: tl.constexpr,
    MIN_AMAX: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D).to(tl.int64)
    slot, written = own_slots(slots_ptr, stride_s, offs_n, n, capacity, BLOCK_N, BLOCK_S)
    mask = written[:, None] & (offs_d < D)[None, :]
    k = k_ptr + offs_n[:, None].to(tl.int64) * stride_kn + offs_d[None, :] * stride_kd
    k = tl.load(k, mask=mask, other=0.0)  # [BLOCK_N, BLOCK_D]
    page, token = slot // PAGE_SIZE, slot % PAGE_SIZE
    values = values_ptr + (page * stride_vp + token * stride_vt)[:, None]
    values += offs_d[None, :] * stride_vd
    if values_ptr.dtype.element_ty != tl.uint8:
        tl.store(values, convert(k, values_ptr.dtype.element_ty), mask=mask)
    else:
        x = convert(k, tl.float32)
        payload, scale = quantize_rows(x, UE8M0, E4M3_MAX, MIN_AMAX, FP8_UNITS=False)
        tl.store(values, payload, mask=mask)
        tl.store(scales_ptr + page * stride_sp + token * stride_st, scale, mask=written)


@triton.jit
def own_slots(
    slots_ptr, stride_s, offs_n, n, capacity, BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr
):
    """Slots (int64) of a program's keys [BLOCK_N], and whether each is the one to write there."""
    slot = tl.load(slots_ptr + offs_n.to(tl.int64) * stride_s, mask=offs_n < n, other=-1)
    written = (slot >= 0) & (slot < capacity)  # [BLOCK_N]
    first = tl.program_id(0) * BLOCK_N
    written &= _last_writer(slot, offs_n, slots_ptr, stride_s, first, n, BLOCK_S) == offs_n
    return slot.to(tl.int64), written


@triton.jit
def _last_writer(slot, offs_n, slots_ptr, stride_s, first, n, BLOCK_S: tl.constexpr):
    """The greatest index that writes each slot: two programs never store to one row.

    Costs one compare a pair of keys, where scoring a pair costs some 250 instructions.
    """
    last = tl.broadcast_to(offs_n[:, None], [offs_n.shape[0], BLOCK_S])
    start = first
    while start < n:
        offs_s = start + tl.arange(0, BLOCK_S)
        later = tl.load(slots_ptr + offs_s.to(tl.int64) * stride_s, mask=offs_s < n, other=-1)
        last = tl.where(slot[:, None] == later[None, :], offs_s[None, :], last)
        start += BLOCK_S
    return tl.max(last, axis=1)
