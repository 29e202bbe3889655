"""Index-K caches in every accepted declaration, each a view of a larger random pool.

What surrounds the view is a canary: an op must leave it alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

QUANTISED = ("nominal 4-D", "nominal 3-D", "padded flat pages", "one layer of a pool")
FLOATS = ("bfloat16", "float16", "float32", "float32 permuted")


@dataclass(frozen=True)
class Pool:
    """`backing` owns the memory, `cache` is the op's argument."""

    kind: str
    backing: torch.Tensor
    pages: int
    page_size: int
    head_dim: int

    @property
    def cache(self) -> torch.Tensor:
        """The cache as that declaration shows it."""
        pages, size, dim = self.pages, self.page_size, self.head_dim
        if self.kind == "nominal 4-D":
            return self.backing[1:-1].view(pages, size, 1, dim + 4)
        if self.kind == "nominal 3-D":
            return self.backing[1:-1].view(pages, size, dim + 4)
        if self.kind == "padded flat pages":
            return self.backing[1:-1]
        if self.kind == "float32 permuted":
            return self.backing[1:-1].permute(2, 1, 0)[1:-1]
        return self.backing[1:-1, 1]

    def clone(self) -> Pool:
        """The same bytes elsewhere."""
        return Pool(self.kind, self.backing.clone(), self.pages, self.page_size, self.head_dim)


def make_pool(kind: str, pages: int, page_size: int, head_dim: int, seed: int) -> Pool:
    """A pool of random content; page_size·head_dim must be a multiple of 4 if quantised."""
    page_bytes = page_size * (head_dim + 4)
    shape = {
        "nominal 4-D": (pages + 2, page_bytes),
        "nominal 3-D": (pages + 2, page_bytes),
        "padded flat pages": (pages + 2, page_bytes + 12),
        "one layer of a pool": (pages + 2, 3, page_bytes),
        "float32 permuted": (head_dim + 2, page_size, pages + 2),
    }.get(kind, (pages + 2, 2, page_size, head_dim))
    generator = torch.Generator().manual_seed(seed)
    if kind in QUANTISED:
        backing = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    else:
        backing = torch.randn(shape, generator=generator).to(getattr(torch, kind.split()[0]))
    return Pool(kind, backing, pages, page_size, head_dim)


def fill(pool: Pool, keys: torch.Tensor, scales: torch.Tensor) -> None:
    """Writes keys [P, S, D] of the cache's dtype (e4m3fn if quantised) and scales [P, S] fp32."""
    if pool.kind not in QUANTISED:
        pool.cache.copy_(keys)
        return
    values_bytes = pool.page_size * pool.head_dim
    for page, key, scale in zip(pool.cache, keys, scales, strict=True):
        raw = page.view(-1)
        raw[:values_bytes] = key.contiguous().view(torch.uint8).view(-1)
        raw[values_bytes : values_bytes + 4 * pool.page_size] = scale.view(torch.uint8)
