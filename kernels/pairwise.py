"""Sums and Hadamard transforms of rows, by pairs of neighbours: the order of additions is fixed.

A reduction's order would follow from a device's registers and lanes, and with it the last bit of a
mean, a key and its fp8 bytes. Pairs are formed in registers where a thread holds neighbours.
"""

from __future__ import annotations

import torch

from .backend import tl, triton


def row_sums_on_cpu(x: torch.Tensor) -> torch.Tensor:
    """[..., D] → [...], D a power of two; see `row_sums`."""
    while x.shape[-1] > 1:
        x = x[..., 0::2] + x[..., 1::2]
    return x[..., 0]


def hadamard_on_cpu(x: torch.Tensor) -> torch.Tensor:
    """The orthonormal transform of [..., D] fp32; see `hadamard_rows`."""
    width = x.shape[-1]
    for _ in range(width.bit_length() - 1):
        a, b = x[..., 0::2], x[..., 1::2]
        x = torch.cat([a + b, a - b], dim=-1)
    return x * torch.tensor(width**-0.5, dtype=torch.float32)


@triton.jit
def row_sums(x):
    """[N, D] → [N], D a power of two: neighbours are added, then neighbouring sums, and so on."""
    N: tl.constexpr = x.shape[0]
    D: tl.constexpr = x.shape[1]
    if D == 1:
        return tl.reshape(x, [N])
    else:
        a, b = tl.split(tl.reshape(x, [N, D // 2, 2]))
        return row_sums(a + b)


@triton.jit
def hadamard_rows(x, NORM: tl.constexpr):
    """NORM · x·H for rows of [N, D] fp32: H[i, j] = (−1)^(number of bits that i and j share).

    Stage s maps a, b, whose indices differ in bit s alone, to a + b and a − b.
    """
    return _butterflies(x, 1) * NORM


@triton.jit
def _butterflies(x, DISTANCE: tl.constexpr):
    """A stage takes the lowest bit of the index and puts it back on top: none is far apart."""
    N: tl.constexpr = x.shape[0]
    D: tl.constexpr = x.shape[1]
    if DISTANCE == D:
        return x
    else:
        a, b = tl.split(tl.reshape(x, [N, D // 2, 2]))
        x = tl.permute(tl.join(a + b, a - b), (0, 2, 1))
        return _butterflies(tl.reshape(x, [N, D]), DISTANCE * 2)
