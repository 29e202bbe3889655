"""Rotary position embedding in the two layouts that indexers are trained with."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from .config import RopeStyle


def rope_tables(
    num_positions: int, rotary_dim: int, theta: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of p·theta^(−2i/rotary_dim): float64 [num_positions, rotary_dim/2] each.

    Built once and indexed: computing cosines for a batch would give bits that depend on its size.
    """
    exponent = torch.arange(0, rotary_dim, 2, dtype=torch.float64) / max(rotary_dim, 1)
    angles = torch.arange(num_positions, dtype=torch.float64)[:, None] * theta**-exponent
    return angles.cos(), angles.sin()


def apply_rope(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, style: RopeStyle
) -> torch.Tensor:
    """Rotates the first 2·cos.shape[-1] dimensions of x; the others pass.

    Pair i is (x[i], x[i + half]) for "half_split" and (x[2i], x[2i+1]) for "interleaved"; either
    way (a, b) → (a·cos − b·sin, b·cos + a·sin), in place of the pair. Computed in the wider of the
    dtypes, given in x's.

    Args:
        x: [..., D].
        cos: [..., rotary_dim/2], broadcastable against x's leading dimensions.
        sin: like cos.
        style: which elements form a pair.
    """
    half = cos.shape[-1]
    rotary, rest = x[..., : 2 * half], x[..., 2 * half :]
    if style == "half_split":
        a, b = rotary[..., :half], rotary[..., half:]
        rotated = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
    else:
        a, b = rotary[..., 0::2], rotary[..., 1::2]
        rotated = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
    return torch.cat([rotated.to(x.dtype), rest], dim=-1)


class RopeTables(nn.Module):
    """`rope_tables` in fp32, whatever the model around them is cast to.

    A bf16 cosine is off by 2^-9: with it, keys a few hundred tokens back are turned visibly wrong.
    """

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, num_positions: int, rotary_dim: int, theta: float) -> None:
        super().__init__()
        for name, table in zip(
            ("cos", "sin"), rope_tables(num_positions, rotary_dim, theta), strict=True
        ):
            self.register_buffer(name, table.to(torch.float32), persistent=False)

    def _apply(self, fn: Callable[..., torch.Tensor], recurse: bool = True) -> RopeTables:
        cos, sin = self.cos, self.sin
        super()._apply(fn, recurse)
        if not cos.is_meta:
            self.cos, self.sin = cos.to(self.cos.device), sin.to(self.sin.device)
        return self

    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [..., rotary_dim/2] of positions [...]."""
        return self.cos[positions], self.sin[positions]
