"""Calls of sparse attention over selected slots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .attention_reference import pack_mla_row
from .layouts import laid_out

#: Spread of the scores: near-uniform weights, ordinary ones, one weight of nearly 1.
ATTENTION_REGIMES = ("flat", "normal", "sharp")
#: What indices hold besides slots of the pool.
HOLES = ("none", "some", "tail", "empty rows", "outside", "repeats")
#: What slots that no index names hold: NaN and infinity, or finite numbers.
UNLISTED = ("special", "finite")
#: Slots of the queries' dtype, or of 512 e4m3 values, 4 fp32 scales and 64 bf16 values.
CACHES = ("floats", "656 bytes")
BYTES_DIMS = (576, 512)


@dataclass(frozen=True)
class SparseAttentionCase:
    """A call of `sparse_mla_attention`."""

    rows: int
    heads: int
    dims: tuple[int, int]  # Dqk, v_dim
    slots: int
    width: int
    dtype: torch.dtype
    regime: str  # of ATTENTION_REGIMES
    holes: str  # of HOLES
    layout: str
    seed: int
    unlisted: str = "special"  # of UNLISTED
    cache: str = "floats"  # of CACHES

    def inputs(self) -> dict[str, Any]:
        """Arguments by name. Special slots that no index names are NaN, in part infinite."""
        g = torch.Generator().manual_seed(self.seed)
        dim, v_dim = self.dims
        spread = {"flat": 0.0, "normal": 1.0, "sharp": 12.0}[self.regime]
        q = (spread * torch.randn((self.rows, self.heads, dim), generator=g)).to(self.dtype)
        kv = torch.randn((self.slots, dim), generator=g).to(self.dtype)
        packed = self.cache == "656 bytes"
        if packed:
            kv = torch.stack([pack_mla_row(row) for row in kv.float()])
        indices = self._indices(g)
        if self.unlisted == "special":
            unnamed = torch.ones(self.slots, dtype=torch.bool)
            unnamed[indices[(indices >= 0) & (indices < self.slots)]] = False
            kv[unnamed] = 0x7F if packed else torch.nan
            kv[unnamed.nonzero()[::2, 0], ::3] = 0xFF if packed else torch.inf
        tensors = {"q": q, "kv": kv, "indices": indices.to(torch.int32)}
        laid = {n: laid_out(x, self.layout) for n, x in tensors.items()}
        if packed and self.layout != "contiguous":  # rows of bytes are contiguous, at most apart
            laid["kv"] = laid_out(kv, "padded")
        return laid | {"scale": dim**-0.5, "v_dim": v_dim}

    def _indices(self, g: torch.Generator) -> torch.Tensor:
        shape = (self.rows, self.width)
        if self.holes == "repeats":
            return torch.randint(0, min(self.slots, 2), shape, generator=g)
        indices = torch.full(shape, -1)  # each slot at most once
        used = min(self.slots, self.width)
        order = torch.rand((self.rows, self.slots), generator=g).argsort(dim=1)
        indices[:, :used] = order[:, :used]
        if self.holes == "some":
            indices[torch.rand(shape, generator=g) < 0.4] = -1
        elif self.holes == "tail":
            ends = torch.randint(0, self.width + 1, (self.rows, 1), generator=g)
            indices[torch.arange(self.width) >= ends] = -1
        elif self.holes == "empty rows":
            indices[::2] = -1
        elif self.holes == "outside":
            far = torch.tensor([-(2**31), -2, self.slots, 2**31 - 1])
            bad = torch.rand(shape, generator=g) < 0.4
            indices[bad] = far[torch.randint(0, 4, (int(bad.sum()),), generator=g)]
        return indices
