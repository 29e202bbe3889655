"""Rows of floats → e4m3fn bytes and one scale a row, with the same bits wherever it runs."""

from __future__ import annotations

import torch

from .backend import tl, triton

SCALE_FORMATS = ("fp32", "ue8m0")
E4M3_MAX = 448.0
MIN_AMAX = 1e-4  # an all-zero row gets a finite, positive scale


def check_scale_format(scale_format: object) -> None:
    """Raises ValueError unless scale_format is "fp32" or "ue8m0"."""
    if scale_format not in SCALE_FORMATS:
        raise ValueError(f"scale_format must be one of {SCALE_FORMATS}, got {scale_format!r}")


def quantize_on_cpu(x: torch.Tensor, ue8m0: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes [..., D] (uint8) and scales [...] fp32 of x [..., D]; see `quantize_rows`."""
    x = x.float()
    amax = x.abs().amax(-1)
    plain = bool(amax.isfinite().all())  # else what costs more than the rest together
    if not plain:
        amax = torch.where(x.isnan(), 0.0, x.abs()).amax(-1)
    scale = amax.clamp(min=MIN_AMAX) / E4M3_MAX
    if ue8m0:
        scale = ((scale.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)
    quotient = x / scale[..., None]
    payload = quotient.to(torch.float8_e4m3fn).view(torch.uint8)
    if not plain:
        payload = payload.masked_fill(quotient.isnan(), 0x7F)  # torch would keep a NaN's sign
    return payload, scale


@triton.jit
def quantize_rows(
    x,
    UE8M0: tl.constexpr,
    E4M3_MAX: tl.constexpr,
    MIN_AMAX: tl.constexpr,
    FP8_UNITS: tl.constexpr,
):
    """e4m3(x / scale) as bytes, and scale = max(max |x|, MIN_AMAX) / E4M3_MAX of each row.

    x [N, D] fp32, 0 in lanes beyond a row. A NaN is 0x7F and leaves the scale alone. FP8_UNITS: the
    device converts by an instruction of its own, which rounds to nearest even too (11 fewer).
    """
    N: tl.constexpr = x.shape[0]
    amax = tl.max(tl.where(x == x, tl.abs(x), 0.0), axis=1)
    # `/` is approximate on NVIDIA GPUs: one ulp of the scale moves payload bytes.
    scale = tl.div_rn(tl.maximum(amax, MIN_AMAX), tl.full([N], E4M3_MAX, tl.float32))
    if UE8M0:
        bits = scale.to(tl.int32, bitcast=True) + 0x7FFFFF
        scale = (bits & 0x7F800000).to(tl.float32, bitcast=True)
        # Of a power of two the reciprocal is exact: the product rounds as the quotient does.
        quotient = x * tl.div_rn(tl.full([N], 1.0, tl.float32), scale)[:, None]
    else:
        quotient = tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape))
    if FP8_UNITS:
        return quotient.to(tl.float8e4nv).to(tl.uint8, bitcast=True), scale
    else:
        return _e4m3_bytes(quotient), scale


@triton.jit
def convert(x, dtype: tl.constexpr):
    """x in another float type, rounded to nearest even; by bits where bfloat16 takes part.

    The interpreter truncates casts to bfloat16 and drops subnormals in casts from it.
    """
    if x.dtype == dtype:
        return x
    if x.dtype == tl.bfloat16:
        bits = x.to(tl.int16, bitcast=True).to(tl.int32) << 16
        x = bits.to(tl.float32, bitcast=True)
    if dtype == tl.bfloat16:
        x = x.to(tl.float32)
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where(x == x, rounded, 0x7FC0)
        return rounded.to(tl.int16).to(tl.bfloat16, bitcast=True)
    return x.to(dtype)


@triton.jit
def _e4m3_bytes(x):
    """The e4m3fn bytes of |x| ≤ 448·(1 + 2⁻²²), to nearest even; NaN is 0x7F.

    Integer arithmetic, as sm_80 and gfx942 cannot convert and the interpreter errs.
    """
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # Normal: drop 20 mantissa bits, rounding half to even; exponent bias 127 → 7.
    normal = (magnitude + 0x7FFFF + ((magnitude >> 20) & 1) - (120 << 23)) >> 20
    # Below 2⁻⁶: 2¹⁴ has the ulp 2⁻⁹, so the addition itself rounds to the subnormal grid.
    subnormal = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    byte = tl.where(magnitude < 0x3C800000, subnormal, normal) | ((bits >> 24) & 0x80)
    return tl.where(x == x, byte, 0x7F).to(tl.uint8)
