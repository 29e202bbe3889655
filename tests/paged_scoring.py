"""Paged calls for the scoring tests: caches of every declaration, all three forms of lengths."""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from caches import FLOATS, QUANTISED, Pool, make_pool
from lightning_indexer.testing import reference
from scoring import BF16, DTYPE_PAIRS, FP8, FP16, FP32, HEADS, REGIMES, score_bound, strided, values

CACHE_DTYPES = dict.fromkeys(QUANTISED, FP8) | {
    "bfloat16": BF16,
    "float16": FP16,
    "float32": FP32,
    "float32 permuted": FP32,
}
CALLS = tuple(
    (cache, q_dtype)
    for cache in (*QUANTISED, *FLOATS)
    for q_dtype in (FP8, BF16, FP16, FP32)
    if (q_dtype, CACHE_DTYPES[cache]) in DTYPE_PAIRS.values()
)


@dataclass(frozen=True)
class PagedCase:
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
        return self.requests * self.next_n

    def inputs(self, hostile: bool = True) -> dict:
        """Arguments by name; `hostile` tables and lengths also leave their ranges."""
        g = torch.Generator().manual_seed(self.seed)
        slack = 2 if hostile else 0
        kind, q_dtype = self.call
        pages_a_line = -(-self.width // self.page_size) + self.seed % 2
        num_pages = 1 + self.requests * pages_a_line
        shape = (self.requests, self.next_n)
        lengths = torch.randint(-slack, self.width + 1 + slack, shape, generator=g)
        tensors = {
            "q": values((*shape, self.heads, self.head_dim), q_dtype, self.regime, g),
            "weights": values((self.rows, self.heads), FP32, self.regime, g),
            "context_lens": lengths.to((torch.int32, torch.int64)[self.seed % 3 == 0]),
            "block_table": torch.randint(
                -slack, num_pages + slack, (self.requests, pages_a_line), generator=g
            ).to(torch.int32),
        }
        if self.form == "drafts":
            tensors["context_lens"] = tensors["context_lens"][:, 0]
        elif self.form == "ragged":
            order = torch.randint(-slack, self.requests + slack, (self.rows,), generator=g)
            tensors["q"] = tensors["q"].flatten(0, 1)[:, None]
            tensors["context_lens"] = tensors["context_lens"].flatten()
            tensors["row_to_request"] = order.to(torch.int32)
        if self.layout == "strided":
            tensors = {name: strided(x) for name, x in tensors.items()}
        pool = fill(make_pool(kind, num_pages, self.page_size, self.head_dim, self.seed), self, g)
        sizes = {"max_context_len": self.width, "page_size": self.page_size}
        return tensors | sizes | {"cache": pool.cache}


def fill(pool: Pool, case: PagedCase, g: torch.Generator) -> Pool:
    """Puts values of the case's regime, and scales in [0, 1), into the pool's cache."""
    size, dim = case.page_size, case.head_dim
    keys = values((pool.pages, size, dim), CACHE_DTYPES[pool.kind], case.regime, g)
    if pool.kind not in QUANTISED:
        pool.cache.copy_(keys)
        return pool
    scales = torch.rand(pool.pages, size, generator=g)
    for page, key, scale in zip(pool.cache, keys, scales, strict=True):
        raw = page.view(-1)
        raw[: size * dim] = key.view(torch.uint8).view(-1)
        raw[size * dim : size * (dim + 4)] = scale.view(torch.uint8)
    return pool


def gathered(inputs: dict) -> tuple[torch.Tensor, list[int], torch.Tensor, torch.Tensor]:
    """Flat queries, visible lengths, and each row's keys [rows, width, D] and scales (float64)."""
    q, table, size = inputs["q"], inputs["block_table"], inputs["page_size"]
    row_to_request = inputs.get("row_to_request")
    lengths, requests = reference.row_lengths(inputs["context_lens"], q.shape[1], row_to_request)
    width, head_dim = inputs["max_context_len"], q.shape[3]
    keys = torch.zeros(len(lengths), width, head_dim, dtype=torch.float64)
    scales = torch.zeros(len(lengths), width, dtype=torch.float64)
    for t, request in enumerate(requests):
        for s in range(min(lengths[t], width)):
            page = int(table[request, s // size]) if 0 <= request < table.shape[0] else -1
            if 0 <= page < inputs["cache"].shape[0]:
                key, scale = reference.cached_key(inputs["cache"], page, s % size, size, head_dim)
                keys[t, s], scales[t, s] = key, scale
    flat_q = q.contiguous().view(len(lengths), 1, *q.shape[2:])
    return flat_q, lengths, keys, scales


def paged_bound(inputs: dict) -> torch.Tensor:
    """`score_bound` of each row against its request's keys: [rows, width]."""
    q, _, keys, scales = gathered(inputs)
    rows = [
        score_bound(q[t], keys[t], inputs["weights"][t : t + 1], scales[t])
        for t in range(q.shape[0])
    ]
    return torch.cat(rows) if rows else torch.zeros(0, inputs["max_context_len"])


def _cases(requests: int) -> st.SearchStrategy[PagedCase]:
    return st.builds(
        PagedCase,
        requests=st.integers(1, requests),
        next_n=st.integers(1, 3),
        width=st.integers(1, 90),
        heads=st.sampled_from(HEADS),
        head_dim=st.sampled_from((8, 32, 40, 96, 128)),
        page_size=st.sampled_from((1, 7, 16, 64)),
        call=st.sampled_from(CALLS),
        form=st.sampled_from(("drafts", "own lengths", "ragged")),
        regime=st.sampled_from(REGIMES),
        layout=st.sampled_from(("contiguous", "strided")),
        seed=st.integers(0, 2**31),
    )


paged_cases = _cases(requests=3)
few_requests = _cases(requests=2)  # selection is slow in the interpreter
