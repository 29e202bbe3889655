"""fp8 e4m3fn bytes: how they cross an op boundary, and how a device without fp8 units reads them.

A byte is s eeee mmm with bias 7, no infinities, and NaN at 0x7F and 0xFF. Tensors cross op
boundaries as uint8 views, because `opcheck` cannot compare fp8 tensors.
"""

from __future__ import annotations

import torch

from .backend import tl, triton


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """`x`, or its uint8 view if it is fp8 e4m3fn."""
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x


def as_values(x: torch.Tensor) -> torch.Tensor:
    """The inverse of `as_bytes`: uint8 tensors are seen as fp8 e4m3fn."""
    return x.view(torch.float8_e4m3fn) if x.dtype == torch.uint8 else x


#: The fp32 value of each byte.
E4M3_VALUES = as_values(torch.arange(256, dtype=torch.uint8, device="cpu")).to(torch.float32)


@triton.jit
def e4m3_to_fp16(byte):
    """The exact fp16 value of e4m3fn bytes (uint8), subnormals and NaN included.

    Shifted by 7 the magnitude is an fp16 number 2^8 too small, subnormals included.
    """
    bits = byte.to(tl.uint16)
    magnitude = bits & 0x7F
    shifted = (((bits & 0x80) << 8) | (magnitude << 7)).to(tl.float16, bitcast=True)
    nan_bits = tl.full(byte.shape, 0x7E00, tl.uint16)
    return tl.where(magnitude == 0x7F, nan_bits.to(tl.float16, bitcast=True), shifted * 256.0)


@triton.jit
def e4m3_to_fnuz(byte):
    """The e4m3fnuz byte of half the value of e4m3fn bytes (uint8), NaN included.

    Read as fnuz, whose bias is 8, a byte is already half its e4m3fn value; but fnuz has one zero,
    and NaN where e4m3fn has -0.
    """
    nan = (byte & 0x7F) == 0x7F
    return tl.where(nan, 0x80, tl.where(byte == 0x80, 0, byte)).to(tl.uint8)
