"""Tensors in the layouts that callers pass, every byte around their elements poisoned."""

from __future__ import annotations

from math import prod

import torch

from .regimes import BITS

#: Great and finite in every float dtype, so that a stray read changes results; no position, slot
#: or length that a call could mean.
POISON_BYTE = 0x7B
LAYOUTS = ("contiguous", "padded", "odd offset", "transposed", "strided")


def geometry(shape: tuple[int, ...], layout: str) -> tuple[tuple[int, ...], int]:
    """Strides of a tensor in that layout, and elements before its first.

    padded: lines of a multiple of 8 elements, 8 or more of them spare; odd offset: 7 spare
    elements a line, and 3 before the first; transposed: axes in reverse order; strided: that,
    every other element, with a spare line on each axis, at an odd offset.
    """
    pitch, axes, step, offset = list(shape), list(range(len(shape))), 1, 0
    if layout == "padded":
        pitch[-1] = (shape[-1] + 15) // 8 * 8
    elif layout == "odd offset":
        pitch[-1], offset = shape[-1] + 7, 3
    elif layout == "strided":
        pitch, step, offset = [n + 1 for n in shape], 2, 1
    elif layout not in ("contiguous", "transposed"):
        raise ValueError(f"layout must be one of {LAYOUTS}, got {layout!r}")
    if layout in ("transposed", "strided"):
        axes.reverse()
    strides = [0] * len(shape)
    for place, axis in enumerate(axes):
        strides[axis] = step * prod(max(pitch[a], 1) for a in axes[place + 1 :])
    return tuple(strides), offset


def span(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Elements from the first to the last, both included."""
    if 0 in shape:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))


def bits_of(x: torch.Tensor) -> torch.Tensor:
    """The elements as integers of their size, in place."""
    return x.view(BITS[x.element_size()])


def poison(x: torch.Tensor) -> None:
    """Sets every byte of every element to POISON_BYTE."""
    size = x.element_size()
    bits_of(x).fill_(int.from_bytes(bytes([POISON_BYTE] * size), "little"))


def laid_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    """A copy of `x` in that layout, between poisoned elements."""
    shape = tuple(x.shape)
    strides, offset = geometry(shape, layout)
    backing = torch.empty(offset + span(shape, strides) + offset, dtype=x.dtype, device=x.device)
    poison(backing)
    view = bits_of(backing).as_strided(shape, strides, offset)
    view.copy_(bits_of(x))
    return view.view(x.dtype)
