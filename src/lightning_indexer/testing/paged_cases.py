"""Paged scoring calls: caches of every declaration, all three forms of lengths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .caches import FLOATS, QUANTISED, fill, make_pool
from .cases import BF16, DTYPE_PAIRS, FP16, FP32
from .layouts import laid_out
from .regimes import FP8, SPECIAL_VALUES, values

CACHE_DTYPES = dict.fromkeys(QUANTISED, FP8) | {
    "bfloat16": BF16,
    "float16": FP16,
    "float32": FP32,
    "float32 permuted": FP32,
}
#: Declarations of the cache with dtypes of queries that go with them.
CALLS = tuple(
    (cache, q_dtype)
    for cache in (*QUANTISED, *FLOATS)
    for q_dtype in (FP8, BF16, FP16, FP32)
    if (q_dtype, CACHE_DTYPES[cache]) in DTYPE_PAIRS.values()
)
FORMS = ("drafts", "own lengths", "ragged")


@dataclass(frozen=True)
class PagedMqaLogitsCase:
    """A paged call; `form` is "drafts" (lengths [B]), "own lengths" ([B, N]) or "ragged"."""

    requests: int
    next_n: int
    width: int
    heads: int
    head_dim: int
    page_size: int
    call: tuple[str, torch.dtype]
    form: str
    regime: str
    layout: str
    seed: int

    @property
    def rows(self) -> int:
        """Rows of the result."""
        return self.requests * self.next_n

    def inputs(self, hostile: bool = True) -> dict[str, Any]:
        """Arguments of `paged_mqa_logits` by name.

        With `hostile`, tables, lengths and requests also leave their ranges.
        """
        g = torch.Generator().manual_seed(self.seed)
        slack = 2 if hostile else 0
        _, q_dtype = self.call
        pages_a_line = -(-self.width // self.page_size) + self.seed % 2
        num_pages = 1 + self.requests * pages_a_line
        shape = (self.requests, self.next_n)
        # Special values in queries would leave no score without one.
        plain = "normal" if self.regime in SPECIAL_VALUES else self.regime
        lengths = torch.randint(-slack, self.width + 1 + slack, shape, generator=g)
        table = torch.randint(-slack, num_pages + slack, (self.requests, pages_a_line), generator=g)
        tensors = {
            "q": values((*shape, self.heads, self.head_dim), q_dtype, plain, g),
            "weights": values((self.rows, self.heads), FP32, plain, g),
            "context_lens": lengths.to((torch.int32, torch.int64)[self.seed % 3 == 0]),
            "block_table": table.to(torch.int32),
        }
        if self.form == "drafts":
            tensors["context_lens"] = tensors["context_lens"][:, 0]
        elif self.form == "ragged":
            order = torch.randint(
                -slack, max(self.requests + slack, 1 - slack), (self.rows,), generator=g
            )
            tensors["q"] = tensors["q"].flatten(0, 1)[:, None]
            tensors["context_lens"] = tensors["context_lens"].flatten()
            tensors["row_to_request"] = order.to(torch.int32)
        tensors = {name: laid_out(x, self.layout) for name, x in tensors.items()}
        sizes = {"max_context_len": self.width, "page_size": self.page_size}
        return tensors | sizes | {"cache": self._cache(num_pages, g)}

    def _cache(self, num_pages: int, g: torch.Generator) -> torch.Tensor:
        """A cache of the declaration, with values of the regime and scales in [0, 1)."""
        kind, size, dim = self.call[0], self.page_size, self.head_dim
        pool = make_pool(kind, num_pages, size, dim, self.seed)
        keys = values((num_pages, size, dim), CACHE_DTYPES[kind], self.regime, g)
        scales = torch.rand(num_pages, size, generator=g)
        fill(pool, keys, scales * (self.regime != "zero scale"))
        return pool.cache
