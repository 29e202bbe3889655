"""Sparse MLA attention on the device: a chunk of a row's indices a program, then a merge.

Where chunks end follows from the width of the indices alone. A program's partial result and the
order of the merge are therefore the same whatever the batch, and so are the bits.
"""

from __future__ import annotations

from .backend import tl, triton
from .e4m3 import e4m3_to_fp16
from .quantize import convert
from .score_tile import as_operand


@triton.jit
def _sparse_mla_attention_kernel(
    q_ptr,
    stride_qt,
    stride_qh,
    stride_qd,
    values_ptr,
    stride_vs,
    stride_vd,
    factors_ptr,  # None unless values are bytes
    stride_fs,
    rest_ptr,
    stride_rs,
    stride_rd,
    indices_ptr,
    stride_it,
    stride_iw,
    out_ptr,
    stride_ot,
    stride_oh,
    stride_od,
    lse_ptr,
    stride_lt,
    stride_lh,
    sums_ptr,  # [rows, splits, H, V] fp32, contiguous; None if a row is one chunk
    states_ptr,  # [rows, splits, 2, H] fp32, contiguous
    scale,  # with the factor log2(e): weights are powers of two
    slots,
    W,
    splits,
    H: tl.constexpr,
    V: tl.constexpr,
    REST: tl.constexpr,
    GROUP: tl.constexpr,
    OPERAND: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    USE_PTX: tl.constexpr,
    FIXED_KEYS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    SLICE_V: tl.constexpr,
    SLICE_R: tl.constexpr,
    HOIST: tl.constexpr,
):
    HEAD_TILES: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    pid = tl.program_id(0)
    split = pid // HEAD_TILES % splits
    t = (pid // HEAD_TILES // splits).to(tl.int64)
    offs_h = pid % HEAD_TILES * BLOCK_H + tl.arange(0, BLOCK_H)
    mask_h = offs_h < H
    q_ptrs = q_ptr + t * stride_qt + offs_h.to(tl.int64) * stride_qh
    q_values = _load_slices(q_ptrs, stride_qd, mask_h, 0, V, SLICE_V, OPERAND)
    q_rest = _load_slices(q_ptrs, stride_qd, mask_h, V, V + REST, SLICE_R, OPERAND)
    accs = _zeros(BLOCK_H, V, SLICE_V)
    greatest = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)

    index_ptr = indices_ptr + t * stride_it
    first = split * CHUNK
    end = _end_of_chunk(index_ptr, stride_iw, first, W, slots, CHUNK)
    stop = first + CHUNK if FIXED_KEYS else end
    for start in tl.range(first, stop, BLOCK_KEYS, disable_licm=not HOIST):
        offs_w = start + tl.arange(0, BLOCK_KEYS)
        slot = tl.load(index_ptr + offs_w.to(tl.int64) * stride_iw, mask=offs_w < end, other=-1)
        selected = (slot >= 0) & (slot < slots)  # [BLOCK_KEYS]
        row = slot.to(tl.int64)
        v_ptrs = values_ptr + row * stride_vs
        if factors_ptr is None:
            values = _load_slices(v_ptrs, stride_vd, selected, 0, V, SLICE_V, OPERAND)
        else:
            f_ptrs = factors_ptr + row * stride_fs
            values = _load_scaled(
                v_ptrs, f_ptrs, selected, V, SLICE_V, GROUP, OPERAND, NATIVE_FP8, USE_PTX
            )
        r_ptrs = rest_ptr + row * stride_rs
        rest = _load_slices(r_ptrs, stride_rd, selected, 0, REST, SLICE_R, OPERAND)
        dots = tl.zeros([BLOCK_H, BLOCK_KEYS], tl.float32)
        dots = _add_products(dots, q_values, values, V, SLICE_V)
        dots = _add_products(dots, q_rest, rest, REST, SLICE_R)

        scores = tl.where(selected[None, :], dots * scale, float("-inf"))
        higher = tl.maximum(greatest, tl.max(scores, axis=1))
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - shift[:, None])  # [BLOCK_H, BLOCK_KEYS]
        fade = tl.exp2(greatest - shift)
        total = total * fade + tl.sum(weights, axis=1)
        accs = _add_weighted(accs, fade, weights.to(OPERAND), values, V, SLICE_V)
        greatest = higher

    if sums_ptr is None:
        o_ptrs = out_ptr + t * stride_ot + offs_h.to(tl.int64) * stride_oh
        _store_slices(o_ptrs, stride_od, mask_h, accs, _divisor(total), V, SLICE_V)
        l_ptrs = lse_ptr + t * stride_lt + offs_h.to(tl.int64) * stride_lh
        tl.store(l_ptrs, _log_sum(greatest, total), mask=mask_h)
    else:
        part = t * splits + split
        ones = tl.full([BLOCK_H], 1.0, tl.float32)
        _store_slices(sums_ptr + (part * H + offs_h) * V, 1, mask_h, accs, ones, V, SLICE_V)
        state_ptrs = states_ptr + part * (2 * H) + offs_h
        tl.store(state_ptrs, greatest, mask=mask_h)
        tl.store(state_ptrs + H, total, mask=mask_h)


@triton.jit
def _merge_chunks_kernel(
    out_ptr,
    stride_ot,
    stride_oh,
    stride_od,
    lse_ptr,
    stride_lt,
    stride_lh,
    sums_ptr,  # [rows, splits, H, V] fp32, contiguous
    states_ptr,  # [rows, splits, 2, H] fp32, contiguous
    splits,
    FIXED_SPLITS: tl.constexpr,  # None, or splits: the interpreter cannot loop up to an argument
    H: tl.constexpr,
    V: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    HEAD_TILES: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    t = (tl.program_id(0) // HEAD_TILES).to(tl.int64)
    offs_h = tl.program_id(0) % HEAD_TILES * BLOCK_H + tl.arange(0, BLOCK_H)
    mask_h = offs_h < H
    offs_v = tl.arange(0, BLOCK_V)
    mask = mask_h[:, None] & (offs_v < V)[None, :]
    state_ptrs = states_ptr + t * splits * (2 * H) + offs_h
    greatest = tl.full([BLOCK_H], float("-inf"), tl.float32)
    for split in range(splits if FIXED_SPLITS is None else FIXED_SPLITS):
        highest = tl.load(state_ptrs + split * (2 * H), mask=mask_h, other=float("-inf"))
        greatest = tl.maximum(greatest, highest)
    shift = tl.where(greatest == float("-inf"), 0.0, greatest)
    acc = tl.zeros([BLOCK_H, BLOCK_V], tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    for split in range(splits if FIXED_SPLITS is None else FIXED_SPLITS):
        highest = tl.load(state_ptrs + split * (2 * H), mask=mask_h, other=float("-inf"))
        fade = tl.exp2(highest - shift)
        sum_ptrs = sums_ptr + ((t * splits + split) * H + offs_h)[:, None] * V + offs_v[None, :]
        acc += fade[:, None] * tl.load(sum_ptrs, mask=mask, other=0.0)
        total += fade * tl.load(state_ptrs + split * (2 * H) + H, mask=mask_h, other=0.0)
    o_ptrs = out_ptr + t * stride_ot + offs_h.to(tl.int64) * stride_oh
    _store_slices(o_ptrs, stride_od, mask_h, (acc,), _divisor(total), V, BLOCK_V)
    l_ptrs = lse_ptr + t * stride_lt + offs_h.to(tl.int64) * stride_lh
    tl.store(l_ptrs, _log_sum(greatest, total), mask=mask_h)


@triton.jit
def _end_of_chunk(index_ptr, stride_iw, first, W, slots, CHUNK: tl.constexpr):
    """The place after the chunk's last index that names a slot; `first` if none does."""
    offs = first + tl.arange(0, CHUNK)
    slot = tl.load(index_ptr + offs.to(tl.int64) * stride_iw, mask=offs < W, other=-1)
    return tl.max(tl.where((slot >= 0) & (slot < slots), offs + 1, first))


@triton.jit
def _load_slices(
    row_ptrs, stride, mask, FROM: tl.constexpr, TO: tl.constexpr, WIDTH: tl.constexpr, OPERAND
):
    """Columns [FROM, TO) of rows as operands [rows, WIDTH], 0 beyond."""
    slices = ()
    for first in tl.static_range(FROM, TO, WIDTH):
        slices += (as_operand(_load(row_ptrs, stride, mask, first, TO, WIDTH), OPERAND),)  # type: ignore[assignment]
    return slices


@triton.jit
def _load_scaled(
    row_ptrs,
    factor_ptrs,
    mask,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    OPERAND: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    USE_PTX: tl.constexpr,
):
    """SIZE e4m3fn bytes of rows, times a factor for each GROUP of them, as operands."""
    ROWS: tl.constexpr = row_ptrs.shape[0]
    PART: tl.constexpr = min(GROUP, WIDTH)
    slices = ()
    for first in tl.static_range(0, SIZE, WIDTH):
        x = _load(row_ptrs, 1, mask, first, SIZE, WIDTH)
        x = x.to(tl.float8e4nv, bitcast=True).to(tl.float16) if NATIVE_FP8 else e4m3_to_fp16(x)
        offs = first // GROUP + tl.arange(0, WIDTH // PART)
        factor = tl.load(factor_ptrs[:, None] + offs[None, :], mask=mask[:, None], other=0.0)
        x = tl.reshape(x.to(tl.float32), [ROWS, WIDTH // PART, PART]) * factor[:, :, None]
        x = tl.reshape(x, [ROWS, WIDTH]).to(OPERAND)
        if USE_PTX:  # what the compiler cannot see through it cannot decode once for each product
            x = tl.inline_asm_elementwise(
                "mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2
            )
        slices += (x,)  # type: ignore[assignment]
    return slices


@triton.jit
def _load(row_ptrs, stride, mask, first, TO: tl.constexpr, WIDTH: tl.constexpr):
    offs = first + tl.arange(0, WIDTH)
    ptrs = row_ptrs[:, None] + offs.to(tl.int64)[None, :] * stride
    return tl.load(ptrs, mask=mask[:, None] & (offs < TO)[None, :], other=0.0)


@triton.jit
def _zeros(ROWS: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    slices = ()
    for _ in tl.static_range(0, SIZE, WIDTH):
        slices += (tl.zeros([ROWS, WIDTH], tl.float32),)  # type: ignore[assignment]
    return slices


@triton.jit
def _add_products(dots, queries, keys, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """dots [heads, keys] + queries·keysᵀ."""
    for i in tl.static_range((SIZE + WIDTH - 1) // WIDTH):
        dots = tl.dot(queries[i], tl.trans(keys[i]), acc=dots, input_precision="ieee")
    return dots


@triton.jit
def _add_weighted(accs, fade, weights, values, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """accs·fade + weights·values, slice by slice."""
    sums = ()
    for i in tl.static_range((SIZE + WIDTH - 1) // WIDTH):
        acc = accs[i] * fade[:, None]
        sums += (tl.dot(weights, values[i], acc=acc, input_precision="ieee"),)  # type: ignore[assignment]
    return sums


@triton.jit
def _store_slices(row_ptrs, stride, mask, slices, divisor, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """Stores slices / divisor [rows] as SIZE columns of rows."""
    for i in tl.static_range((SIZE + WIDTH - 1) // WIDTH):
        offs = i * WIDTH + tl.arange(0, WIDTH)
        ptrs = row_ptrs[:, None] + offs.to(tl.int64)[None, :] * stride
        x = convert(slices[i] / divisor[:, None], row_ptrs.dtype.element_ty)
        tl.store(ptrs, x, mask=mask[:, None] & (offs < SIZE)[None, :])


@triton.jit
def _divisor(total):
    """A sum of weights, or 1 if nothing was summed."""
    return tl.where(total == 0.0, 1.0, total)


@triton.jit
def _log_sum(greatest, total):
    """The natural logarithm of total·2^greatest."""
    return (greatest + tl.log2(_divisor(total))) * 0.6931471805599453
