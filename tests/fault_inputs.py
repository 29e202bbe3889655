"""Right arguments of every op, small, and what its oracle makes of them.

Values are whole numbers where ops add up, so that no sum rounds and results are compared exactly.
"""

from __future__ import annotations

import torch

from fault_tools import Arguments
from lightning_indexer.testing import attention_reference, prepare_reference, reference
from lightning_indexer.testing.caches import fill, make_pool

T, H, D, L, B, P, S, K = 3, 2, 8, 12, 3, 4, 4, 5  # S = page size
FP8, INT32 = torch.float8_e4m3fn, torch.int32


def floats(*shape: int) -> torch.Tensor:
    """Numbers from −2 to 2 in steps of a half, in no order."""
    count = torch.Size(shape).numel()
    return ((torch.arange(count) * 7 % 9 - 4) / 2).view(shape)


def fp8(*shape: int) -> torch.Tensor:
    return floats(*shape).to(FP8)


def ints(value: int, *shape: int) -> torch.Tensor:
    return torch.full(shape, value, dtype=INT32)


def paged_cache() -> torch.Tensor:
    pool = make_pool("nominal 4-D", P, S, D, seed=0)
    fill(pool, fp8(P, S, D), 2.0 ** torch.arange(P * S).remainder(3).view(P, S))
    return pool.cache


def without(arguments: Arguments, *names: str) -> Arguments:
    return {n: x for n, x in arguments.items() if n not in ("out", "workspace_bytes", *names)}


def ragged() -> Arguments:
    return {
        "q": fp8(T, H, D),
        "k": fp8(L, D),
        "weights": floats(T, H),
        "row_starts": torch.tensor([0, 1, 2], dtype=INT32),
        "row_ends": torch.tensor([L, L - 1, 7], dtype=INT32),
        "k_scale": floats(L),
    }


def paged() -> Arguments:
    return {
        "q": fp8(B, 1, H, D),
        "cache": paged_cache(),
        "weights": floats(B, H),
        "context_lens": torch.tensor([L, 7, 10], dtype=INT32),
        "block_table": torch.tensor([[1, 0, 2], [3, 1, 1], [0, 2, 3]], dtype=INT32),
        "row_to_request": torch.tensor([2, 0, 1], dtype=INT32),
        "max_context_len": L,
        "page_size": S,
    }


def uniform() -> Arguments:
    """Two rows a request, whose lengths follow from the request's."""
    rows = {"q": fp8(B, 2, H, D), "weights": floats(2 * B, H), "row_to_request": None}
    return paged() | rows


def select(rows: int) -> Arguments:
    return {"topk": K, "workspace_bytes": 8 * L, "out": ints(7, rows, K)}


def rope(rows: int) -> Arguments:
    return {
        "positions": torch.arange(rows, dtype=INT32) * 2,
        "cos": floats(L, 2),
        "sin": floats(L, 2) + 0.5,
        "rope_style": "half_split",
        "rope_first": True,
        "hadamard": False,
        "scale_format": "fp32",
    }


def keys() -> Arguments:
    norm = {"norm_weight": floats(D), "norm_bias": floats(D), "eps": 1e-6}
    return {"k": floats(T, D) + torch.arange(D), **norm, **rope(T)}


def write() -> Arguments:
    slots = torch.tensor([5, 0, 11], dtype=INT32)
    return {"cache": paged_cache(), "slots": slots, "page_size": S, "scale_format": "fp32"}


def attention(dim: int, v_dim: int, dtype: torch.dtype) -> Arguments:
    return {
        "q": floats(T, H, dim).to(dtype),
        "kv": floats(P, dim).to(dtype),
        "indices": torch.tensor([[0, 3, -1, 1], [2, 2, 1, 0], [3, -1, 2, 1]], dtype=INT32),
        "scale": 0.25,
        "v_dim": v_dim,
        "out": torch.full((T, H, v_dim), 7.0, dtype=dtype),
        "lse": torch.full((T, H), 7.0),
    }


def mla_cache() -> torch.Tensor:
    rows = floats(P, 576)
    return torch.stack([attention_reference.pack_mla_row(row) for row in rows])


def expected_scores(a: Arguments) -> torch.Tensor:
    oracle = reference.mqa_logits if "k" in a else reference.paged_mqa_logits
    return oracle(**without(a, "topk"))


def expected_topk(a: Arguments) -> torch.Tensor:
    """Of scores that are all finite: positions past a row's length score −inf."""
    return reference.topk_indices(
        expected_scores(a), a["topk"], a.get("row_starts"), a.get("row_ends")
    )


def expected_slots(a: Arguments) -> list[torch.Tensor]:
    """−1 where a slot does not fit into int32."""
    slots = reference.indices_to_slots(**without(a) | {"indices": a["indices"].long()})
    return [slots.masked_fill(slots >= 2**31, -1)]


def expected_read(a: Arguments) -> list[torch.Tensor]:
    names = "cache", "block_table", "context_lens", "page_size", "head_dim", "total"
    return list(reference.read_index_k(**{n: a[n] for n in names}))


def prepared(a: Arguments) -> torch.Tensor:
    names = "scale_format", "cache", "slots", "page_size"
    return prepare_reference.prepare_index_k(**without(a, *names), dtype=torch.float32)


def expected_write(a: Arguments, k: torch.Tensor) -> list[torch.Tensor]:
    return [reference.write_index_k(a["cache"], k, a["slots"], page_size=S)]


def expected_ragged_keys(a: Arguments) -> list[torch.Tensor]:
    pairs = [reference.quantize_index_k(row, "fp32") for row in prepared(a)]
    values, scales = (torch.tensor(x) for x in zip(*pairs, strict=True))
    return [values.to(torch.uint8).view(FP8), scales]


def expected_queries(a: Arguments) -> list[torch.Tensor]:
    x, weights = prepare_reference.prepare_index_q(**without(a), dtype=torch.float32)
    return [x.view(FP8), weights]


def expected_mla_rows(a: Arguments) -> list[torch.Tensor]:
    new = a["cache"].clone()
    for row, slot in zip(a["kv"], a["slots"].tolist(), strict=True):
        if 0 <= slot < P:
            new[slot] = attention_reference.pack_mla_row(row)
    return [new]


def expected_attention(a: Arguments) -> list[torch.Tensor]:
    return list(attention_reference.sparse_mla_attention(**without(a, "lse")))
