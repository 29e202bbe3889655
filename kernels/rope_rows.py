"""RoPE inside the kernels that prepare queries and keys: each row is rotated by its position.

Pair i of the rotary dimensions is (i, i + half) in the "half_split" style and (2i, 2i+1) in the
"interleaved" one; (a, b) → (a·cos − b·sin, b·cos + a·sin), each product and sum rounded to fp32. A
position outside the tables rotates by NaN, so that the row scores NaN and is never selected.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .backend import tl, triton
from .checks import INDEX_DTYPES, check_range, check_tensor

#: Elements prepared at a time on a CPU: their fp32 copies stay in its caches.
CPU_TILE = 2**19
ROPE_STYLES = ("half_split", "interleaved")


def check_flag(name: str, value: object) -> None:
    """Raises TypeError unless `value` is a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be a bool, got {type(value).__name__}")


def check_rope(
    x: torch.Tensor,
    positions: object,
    cos: object,
    sin: object,
    rope_style: object,
    rope_first: object,
) -> None:
    """Raises unless the rows of x [rows, …, D] can be rotated by these tables."""
    rows, head_dim, device = x.shape[0], x.shape[-1], x.device
    if positions is not None:
        check_tensor("positions", positions, dtype=INDEX_DTYPES, shape=(rows,), device=device)
    known, half = check_tensor(
        "cos", cos, dtype=torch.float32, shape=(None, None), device=device
    ).shape
    check_tensor("sin", sin, dtype=torch.float32, shape=(known, half), device=device)
    if 2 * half > head_dim:
        raise ValueError(
            f"cos must have at most D/2 = {head_dim // 2} columns, got {[known, half]}"
        )
    if positions is None and known != rows:
        raise ValueError(
            f"cos must have one row for each of {rows} rows where there are no positions, got"
            f" {[known, half]}"
        )
    if rope_style not in ROPE_STYLES:
        raise ValueError(f"rope_style must be one of {ROPE_STYLES}, got {rope_style!r}")
    check_flag("rope_first", rope_first)
    if rope_style == "interleaved" and head_dim % 2 and half:
        raise ValueError(f"D must be even where pairs are interleaved, got {head_dim}")


def check_hadamard(hadamard: object, head_dim: int) -> None:
    """Raises unless `hadamard` is a bool, and not True for a D it cannot transform."""
    check_flag("hadamard", hadamard)
    if hadamard and head_dim & (head_dim - 1):
        raise ValueError(f"hadamard needs a power of two for D, got {head_dim}")


def check_positions(positions: torch.Tensor | None, known: int, rows: torch.Tensor | None) -> None:
    """Content check: positions, of those `rows` if given, are in the table, or −1 for no token."""
    if positions is not None:
        check_range("positions", positions if rows is None else positions[rows], -1, known)


@dataclass(frozen=True)
class Rope:
    """Checked tables, and what is rotated by them."""

    positions: torch.Tensor | None  # [rows]; None: row i of the tables is that of row i
    cos: torch.Tensor  # [known positions, half]
    sin: torch.Tensor
    interleaved: bool
    first: bool

    def arguments(self) -> tuple:
        """Positions and tables with their strides, as kernels take them."""
        positions = self.positions
        return (
            *((positions, positions.stride(0)) if positions is not None else (None, 0)),
            *(self.cos, *self.cos.stride()),
            *(self.sin, *self.sin.stride()),
            self.cos.shape[0],
        )

    def constants(self, head_dim: int) -> dict[str, int | bool]:
        """The constexprs of `rotation` and `partner_dims`."""
        dims = 2 * self.cos.shape[1]
        start = 0 if self.first else head_dim - dims
        return {"ROPE_START": start, "ROPE_DIMS": dims, "INTERLEAVED": self.interleaved}

    def on_cpu(self, x: torch.Tensor, rows: slice) -> torch.Tensor:
        """Rotates in place x, those rows of [rows, …, D], fp32."""
        half = self.cos.shape[1]
        if not half:
            return x
        start = 0 if self.first else x.shape[-1] - 2 * half
        cos, sin = (t.view(len(x), *[1] * (x.dim() - 2), half) for t in self._angles(rows))
        rotary = x[..., start : start + 2 * half]
        if self.interleaved:
            a, b = rotary[..., 0::2], rotary[..., 1::2]
        else:
            a, b = rotary[..., :half], rotary[..., half:]
        first = a * cos - b * sin
        torch.add(b * cos, a * sin, out=b)
        a.copy_(first)
        return x

    def _angles(self, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        if self.positions is None:
            return self.cos[rows], self.sin[rows]
        positions, known = self.positions[rows].long(), self.cos.shape[0]
        inside = (positions >= 0) & (positions < known)
        if not known:
            nowhere = self.cos.new_full((len(positions), self.cos.shape[1]), float("nan"))
            return nowhere, nowhere
        if bool(inside.all()):
            return self.cos[positions], self.sin[positions]
        row, outside = torch.where(inside, positions, 0), ~inside[:, None]
        cos, sin = (t[row].masked_fill(outside, float("nan")) for t in (self.cos, self.sin))
        return cos, sin


@triton.jit
def rotation(
    position,  # [BLOCK_D] of one row, or [N, 1]
    offs_d,  # [BLOCK_D], or [1, BLOCK_D]
    cos_ptr,
    stride_cp,
    stride_cd,
    sin_ptr,
    stride_sp,
    stride_sd,
    known,
    ROPE_START: tl.constexpr,
    ROPE_DIMS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """cos, and sin with the sign that the other of the pair takes, position by dimension."""
    HALF: tl.constexpr = ROPE_DIMS // 2
    offs = offs_d - ROPE_START
    mask = (offs >= 0) & (offs < ROPE_DIMS)
    if INTERLEAVED:
        pair, first = offs // 2, offs % 2 == 0
    else:
        pair, first = offs % HALF, offs < HALF
    position = position.to(tl.int64)
    mask = mask & (position >= 0) & (position < known)
    pair = pair.to(tl.int64)
    nan = float("nan")
    cos = tl.load(cos_ptr + position * stride_cp + pair * stride_cd, mask=mask, other=nan)
    sin = tl.load(sin_ptr + position * stride_sp + pair * stride_sd, mask=mask, other=nan)
    return cos, tl.where(first, -sin, sin)


@triton.jit
def partner_dims(offs_d, ROPE_START: tl.constexpr, ROPE_DIMS: tl.constexpr):
    """Where the other of each half-split pair lies; outside the rotary part, the element itself."""
    HALF: tl.constexpr = ROPE_DIMS // 2
    offs = offs_d - ROPE_START
    other = tl.where(offs < HALF, offs_d + HALF, offs_d - HALF)
    other = tl.where((offs >= 0) & (offs < ROPE_DIMS), other, offs_d)
    # As many neighbours have neighbouring partners: loads stay wide.
    RUN: tl.constexpr = (HALF | ROPE_START) & -(HALF | ROPE_START)
    return tl.max_contiguous(tl.multiple_of(other, RUN), RUN)


@triton.jit
def swapped_neighbours(x):
    """Elements 2i and 2i+1 of each row [N, D] in each other's place: interleaved partners."""
    N: tl.constexpr = x.shape[0]
    D: tl.constexpr = x.shape[1]
    even, odd = tl.split(tl.reshape(x, [N, D // 2, 2]))
    return tl.reshape(tl.join(odd, even), [N, D])


@triton.jit
def rotated(x, partner, cos, sin, offs_d, ROPE_START: tl.constexpr, ROPE_DIMS: tl.constexpr):
    """x·cos + partner·sin in the rotary dimensions, x itself elsewhere."""
    rotary = (offs_d >= ROPE_START) & (offs_d < ROPE_START + ROPE_DIMS)
    return tl.where(rotary[None, :], x * cos + partner * sin, x)
