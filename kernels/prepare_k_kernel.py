"""Layer norm, RoPE and transform of keys, and their way into a cache or a tensor, in one launch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .backend import on_device_of, target_of, tl, triton, use_triton
from .cache_layout import FLOAT_CACHES
from .checks import check_tensor
from .pairwise import hadamard_on_cpu, hadamard_rows, row_sums, row_sums_on_cpu
from .quantize import E4M3_MAX, MIN_AMAX, convert, quantize_rows
from .rope_rows import CPU_TILE, Rope, partner_dims, rotated, rotation, swapped_neighbours
from .write_index_k import own_slots, write_keys_on_cpu

TILE = 1024  # elements a program: 8 keys of D=128
NUM_WARPS = 1  # a lone warp exchanges elements without barriers
MAX_REGISTERS = 255  # NVIDIA's compiler aims at 168 for the sake of a warp more, and would spill


@dataclass(frozen=True)
class Norm:
    """The checked layer norm of keys: (x − mean) / sqrt(var + eps) · weight + bias."""

    weight: torch.Tensor  # [D]
    bias: torch.Tensor | None
    eps: float

    def on_cpu(self, k: torch.Tensor) -> torch.Tensor:
        """Of keys [n, D], in fp32."""
        x = k.to(torch.float32, copy=True)
        x -= _mean_on_cpu(x)
        variance = _mean_on_cpu(x * x) + torch.tensor(self.eps, dtype=torch.float32)
        # PyTorch's fp32 square root errs by an ulp, depending on the number of elements.
        x *= 1.0 / variance.double().sqrt().float()
        x *= self.weight.float()
        return x if self.bias is None else x.add_(self.bias.float())


def _mean_on_cpu(x: torch.Tensor) -> torch.Tensor:
    """[n, 1] means of x [n, D]."""
    width = x.shape[1]
    missing = triton.next_power_of_2(width) - width
    padded = torch.nn.functional.pad(x, (0, missing)) if missing else x
    return row_sums_on_cpu(padded)[:, None] / width


def check_norm(k: torch.Tensor, weight: object, bias: object, eps: object) -> None:
    """Raises unless keys [n, D] can be normalised by these."""
    width, device = k.shape[1:], k.device
    check_tensor("norm_weight", weight, dtype=FLOAT_CACHES, shape=width, device=device)
    if bias is not None:
        check_tensor("norm_bias", bias, dtype=FLOAT_CACHES, shape=width, device=device)
    if isinstance(eps, bool) or not isinstance(eps, (int, float)):
        raise TypeError(f"eps must be a number, got {type(eps).__name__}")
    if not 0 <= eps < float("inf"):
        raise ValueError(f"eps must be finite and at least 0, got {eps}")


def key_blocks(head_dim: int) -> dict[str, int]:
    """Keys, dimensions and compared slots a program takes at a time."""
    block_d = triton.next_power_of_2(head_dim)
    # Rows that are not aligned are loaded and summed element by element, and fill the registers.
    tile = TILE if block_d == head_dim else TILE // 4
    block_n = max(tile // block_d, 1)
    return {"BLOCK_N": block_n, "BLOCK_D": block_d, "BLOCK_S": max(2 * tile // block_n, 1)}


def prepare_keys(
    k: torch.Tensor,
    norm: Norm,
    rope: Rope,
    transform: bool,
    ue8m0: bool,
    values: torch.Tensor,
    scales: torch.Tensor | None,
    slots: torch.Tensor | None,
) -> None:
    """values[page, token], scales[page, token] ← the prepared key of each slot.

    Args:
        k: [n, D].
        norm: its layer norm.
        rope: its rotation.
        transform: whether the Hadamard transform follows.
        ue8m0: whether scales are powers of two.
        values: [P, S, D], uint8 or float.
        scales: [P, S] fp32 for uint8 values.
        slots: [n]; None: key i goes to slot i.
    """
    (count, head_dim), (pages, page_size, _) = k.shape, values.shape
    if count == 0 or pages == 0:
        return
    if not use_triton(k):
        x = torch.empty(k.shape, dtype=torch.float32)
        step = max(CPU_TILE // head_dim, 1)
        for rows in (slice(start, start + step) for start in range(0, count, step)):
            prepared = rope.on_cpu(norm.on_cpu(k[rows]), rows)
            x[rows] = hadamard_on_cpu(prepared) if transform else prepared
        slots = torch.arange(count) if slots is None else slots
        write_keys_on_cpu(values, scales, x, slots, page_size, ue8m0)
        return
    blocks, target = key_blocks(head_dim), target_of(k.device)
    limit = {"maxnreg": MAX_REGISTERS} if target.backend == "cuda" else {}
    with on_device_of(k):
        _prepare_index_k_kernel[(triton.cdiv(count, blocks["BLOCK_N"]),)](
            *(k, *k.stride()),
            *(norm.weight, norm.weight.stride(0)),
            *((norm.bias, norm.bias.stride(0)) if norm.bias is not None else (None, 0)),
            *rope.arguments(),
            *(values, *values.stride()),
            *((scales, *scales.stride()) if scales is not None else (None, 0, 0)),
            *((slots, slots.stride(0)) if slots is not None else (None, 0)),
            *(norm.eps, count, pages * page_size),
            D=head_dim,
            **rope.constants(head_dim),
            HADAMARD=head_dim**-0.5 if transform else None,
            PAGE_SIZE=page_size,
            UE8M0=ue8m0,
            E4M3_MAX=E4M3_MAX,
            MIN_AMAX=MIN_AMAX,
            FP8_UNITS=target.has_fp8_dot,
            **blocks,
            **limit,
            num_warps=NUM_WARPS,
            enable_fp_fusion=False,  # a multiply-add rounds once, PyTorch's operations twice
        )


@triton.jit
def _prepare_index_k_kernel(
    k_ptr,
    stride_kn,
    stride_kd,
    weight_ptr,
    stride_w,
    bias_ptr,
    stride_b,
    positions_ptr,
    stride_p,
    cos_ptr,
    stride_cp,
    stride_cd,
    sin_ptr,
    stride_sp,
    stride_sd,
    known,
    values_ptr,
    stride_vp,
    stride_vt,
    stride_vd,
    scales_ptr,
    stride_scp,
    stride_sct,
    slots_ptr,
    stride_s,
    eps,
    n,
    capacity,
    D: tl.constexpr,
    ROPE_START: tl.constexpr,
    ROPE_DIMS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HADAMARD: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    UE8M0: tl.constexpr,
    E4M3_MAX: tl.constexpr,
    MIN_AMAX: tl.constexpr,
    FP8_UNITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    if slots_ptr is None:
        slot, written = offs_n.to(tl.int64), offs_n < n
    else:
        slot, written = own_slots(slots_ptr, stride_s, offs_n, n, capacity, BLOCK_N, BLOCK_S)
    offs_d = tl.arange(0, BLOCK_D)
    mask = written[:, None] & (offs_d < D)[None, :]
    row = offs_n.to(tl.int64)
    k_ptrs = (k_ptr + row * stride_kn)[:, None]
    dims = offs_d.to(tl.int64)
    x = convert(tl.load(k_ptrs + dims[None, :] * stride_kd, mask=mask, other=0.0), tl.float32)
    mean = _mean(x, D)
    centered = tl.where(mask, x - mean[:, None], 0.0)  # [BLOCK_N, BLOCK_D]
    deviation = tl.sqrt_rn(_mean(centered * centered, D) + eps)
    factor = tl.div_rn(tl.full([BLOCK_N], 1.0, tl.float32), deviation)
    weights = weight_ptr, stride_w, bias_ptr, stride_b
    x = _normed(centered, factor, dims, offs_d < D, *weights)
    if ROPE_DIMS > 0:
        if positions_ptr is None:
            position = row
        else:
            position = tl.load(positions_ptr + row * stride_p, mask=written, other=-1)
        cos, sin = rotation(
            *(position[:, None], offs_d[None, :]),
            *(cos_ptr, stride_cp, stride_cd),
            *(sin_ptr, stride_sp, stride_sd),
            *(known, ROPE_START, ROPE_DIMS, INTERLEAVED),
        )  # [BLOCK_N, BLOCK_D]
        if INTERLEAVED:
            partner = swapped_neighbours(x)
        else:  # read and normalised again, sooner than fetched from another thread
            others = partner_dims(offs_d, ROPE_START, ROPE_DIMS).to(tl.int64)
            partner = tl.load(k_ptrs + others[None, :] * stride_kd, mask=mask, other=0.0)
            centered = convert(partner, tl.float32) - mean[:, None]
            partner = _normed(centered, factor, others, offs_d < D, *weights)
        x = rotated(x, partner, cos, sin, offs_d, ROPE_START, ROPE_DIMS)
    if HADAMARD is not None:
        x = hadamard_rows(x, HADAMARD)
    page, token = slot // PAGE_SIZE, slot % PAGE_SIZE
    values = values_ptr + (page * stride_vp + token * stride_vt)[:, None]
    values += dims[None, :] * stride_vd
    if values_ptr.dtype.element_ty != tl.uint8:
        tl.store(values, convert(x, values_ptr.dtype.element_ty), mask=mask)
    else:
        payload, scale = quantize_rows(x, UE8M0, E4M3_MAX, MIN_AMAX, FP8_UNITS)
        tl.store(values, payload, mask=mask)
        tl.store(scales_ptr + page * stride_scp + token * stride_sct, scale, mask=written)


@triton.jit
def _mean(x, D: tl.constexpr):
    """[N] means of D elements each; lanes beyond them hold 0."""
    return tl.div_rn(row_sums(x), tl.full([x.shape[0]], D, tl.float32))


@triton.jit
def _normed(centered, factor, dims, mask_d, weight_ptr, stride_w, bias_ptr, stride_b):
    """centered · factor · weight + bias of the dimensions `dims`."""
    weight = tl.load(weight_ptr + dims * stride_w, mask=mask_d, other=0.0)
    x = centered * factor[:, None] * convert(weight, tl.float32)[None, :]
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + dims * stride_b, mask=mask_d, other=0.0)
        x += convert(bias, tl.float32)[None, :]
    return x
