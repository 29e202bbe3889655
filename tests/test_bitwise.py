"""Every op gives a row the same bits on every run, alone, in any batch, order and layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lightning_indexer as li
from counting import BATCHES, RERUNS, counts_examples, tally
from lightning_indexer.kernels.backend import INTERPRET
from lightning_indexer.testing.caches import make_pool
from lightning_indexer.testing.layouts import LAYOUTS, bits_of, laid_out

Arguments = dict[str, Any]
H, D, L, P, S, K, W = 3, 16, 40, 8, 4, 6, 12  # S = page size, W = columns
MOST_ROWS = P * S  # each key has a slot of its own

# In the interpreter a program costs milliseconds, and the ops' own files draw more cases.
FEW = settings(max_examples=max(settings().max_examples // (100 if INTERPRET else 8), 1))


@dataclass(frozen=True)
class Case:
    """A batch, what is taken out of it, and how that lies in memory."""

    rows: int
    taken: int
    layout: str
    seed: int

    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed)


cases = st.builds(
    Case,
    rows=st.sampled_from([1, 2, 3, 7, 8, 9] if INTERPRET else [1, 2, 3, 8, 9, MOST_ROWS - 1]),
    taken=st.integers(1, 8),
    layout=st.sampled_from(LAYOUTS),
    seed=st.integers(0, 2**31),
)


@dataclass(frozen=True)
class RowOp:
    """An op whose row r depends on row r of the arguments `by_row` alone.

    arguments: of that many rows. run: the rows of the result, [rows, …] each.
    """

    by_row: tuple[str, ...]
    arguments: Callable[[int, torch.Generator], Arguments]
    run: Callable[[Arguments], list[torch.Tensor]]


def normal(g: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=g)


def below(g: torch.Generator, limit: int, *shape: int, low: int = 0) -> torch.Tensor:
    return torch.randint(low, limit, shape, generator=g, dtype=torch.int32)


def cache(g: torch.Generator) -> torch.Tensor:
    held = make_pool("nominal 4-D", P, S, D, seed=0).cache
    keys = normal(g, P * S, D)
    li.write_index_k(held, keys, torch.arange(P * S), page_size=S)
    return held


def ragged(rows: int, g: torch.Generator) -> Arguments:
    return {
        "q": normal(g, rows, H, D),
        "k": normal(g, L, D),
        "weights": normal(g, rows, H),
        "row_starts": below(g, L // 2, rows),
        "row_ends": below(g, L + 1, rows),
        "k_scale": normal(g, L).abs(),
    }


def paged(rows: int, g: torch.Generator) -> Arguments:
    return {
        "q": normal(g, rows, 1, H, D),
        "cache": cache(g),
        "weights": normal(g, rows, H),
        "context_lens": below(g, 5 * S + 1, rows),
        "block_table": below(g, P, 4, 5),
        "row_to_request": below(g, 4, rows),
        "max_context_len": 5 * S,
        "page_size": S,
    }


def rope(rows: int, g: torch.Generator) -> Arguments:
    tables = {"cos": normal(g, L, D // 4), "sin": normal(g, L, D // 4)}
    return {"positions": below(g, L, rows), **tables, "rope_style": "half_split", "hadamard": True}


def keys(rows: int, g: torch.Generator) -> Arguments:
    norm = {"norm_weight": normal(g, D), "norm_bias": normal(g, D), "eps": 1e-6}
    return {"k": normal(g, rows, D), **norm, **rope(rows, g)}


def slots(rows: int, g: torch.Generator) -> Arguments:
    return {"cache": cache(g), "slots": torch.randperm(P * S, generator=g)[:rows], "page_size": S}


def written_keys(op: Callable[..., None]) -> Callable[[Arguments], list[torch.Tensor]]:
    def run(a: Arguments) -> list[torch.Tensor]:
        a = a | {"cache": a["cache"].clone()}
        op(**a)
        pages, page, token = a["cache"].view(P, -1), a["slots"] // S, a["slots"] % S
        values, scales = pages[:, : S * D].view(P, S, D), pages[:, S * D :].view(P, S, 4)
        return [values[page, token], scales[page, token]]

    return run


def compacted(a: Arguments) -> list[torch.Tensor]:
    buffer = a["buffer"].clone()
    li.compact_topk_indices(buffer, a["rows"])
    return [buffer[: len(a["rows"])]]


def requests(a: Arguments) -> list[torch.Tensor]:
    values, scales = li.read_index_k(**a, page_size=S, total=6 * len(a["context_lens"]))
    return [values.view(-1, 6, D), scales.view(-1, 6)]


def mla_rows(a: Arguments) -> list[torch.Tensor]:
    held = torch.zeros(MOST_ROWS, 656, dtype=torch.uint8)
    li.write_mla_kv(held, a["kv"], a["slots"])
    return [held[a["slots"]]]


OPS = {
    "mqa_logits": RowOp(
        ("q", "weights", "row_starts", "row_ends"), ragged, lambda a: [li.mqa_logits(**a)]
    ),
    "select_topk": RowOp(
        ("q", "weights", "row_starts", "row_ends"),
        ragged,
        lambda a: [li.select_topk(**a, topk=K, workspace_bytes=20 * L)],
    ),
    "paged_mqa_logits": RowOp(
        ("q", "weights", "context_lens", "row_to_request"),
        paged,
        lambda a: [li.paged_mqa_logits(**a)],
    ),
    "paged_select_topk": RowOp(
        ("q", "weights", "context_lens", "row_to_request"),
        paged,
        lambda a: [li.paged_select_topk(**a, topk=K)],
    ),
    "topk_indices": RowOp(
        ("logits", "row_starts", "row_ends"),
        lambda rows, g: {
            "logits": normal(g, rows, L).round(decimals=1),
            "row_starts": below(g, L // 2, rows),
            "row_ends": below(g, L + 1, rows),
        },
        lambda a: [li.topk_indices(**a, k=K)],
    ),
    "compact_topk_indices": RowOp(
        ("rows",),
        lambda rows, g: {
            "buffer": below(g, 99, MOST_ROWS, W),
            "rows": below(g, MOST_ROWS + 1, rows, low=-1),
        },
        compacted,
    ),
    "indices_to_slots": RowOp(
        ("indices", "row_to_request"),
        lambda rows, g: {
            "indices": below(g, 5 * S, rows, W, low=-1),
            "block_table": below(g, P, 4, 5),
            "row_to_request": below(g, 4, rows),
        },
        lambda a: [li.indices_to_slots(**a, page_size=S)],
    ),
    "write_index_k": RowOp(
        ("k", "slots"),
        lambda rows, g: {"k": normal(g, rows, D), **slots(rows, g)},
        written_keys(li.write_index_k),
    ),
    "read_index_k": RowOp(
        ("block_table", "context_lens"),
        lambda rows, g: {
            "cache": cache(g),
            "block_table": below(g, P, rows, 2),
            "context_lens": torch.full((rows,), 6),
        },
        requests,
    ),
    "prepare_index_q": RowOp(
        ("q", "weights", "positions"),
        lambda rows, g: {
            "q": normal(g, rows, H, D),
            "weights": normal(g, rows, H),
            **rope(rows, g),
        },
        lambda a: list(li.prepare_index_q(**a)),
    ),
    "prepare_index_k": RowOp(
        ("k", "positions", "slots"),
        lambda rows, g: keys(rows, g) | slots(rows, g),
        written_keys(li.prepare_index_k),
    ),
    "prepare_ragged_index_k": RowOp(
        ("k", "positions"), keys, lambda a: list(li.prepare_ragged_index_k(**a))
    ),
    "sparse_mla_attention": RowOp(
        ("q", "indices"),
        lambda rows, g: {
            "q": normal(g, rows, H, 24),
            "kv": normal(g, P * S, 24),
            "indices": below(g, P * S, rows, 2 * W, low=-1),
        },
        lambda a: list(li.sparse_mla_attention(**a, scale=0.3, v_dim=16)),
    ),
    "write_mla_kv": RowOp(
        ("kv", "slots"),
        lambda rows, g: {
            "kv": normal(g, rows, 576),
            "slots": torch.randperm(MOST_ROWS, generator=g)[:rows],
        },
        mla_rows,
    ),
}


def assert_equal(
    figure: str, name: str, got: list[torch.Tensor], expected: list[torch.Tensor]
) -> None:
    tally(figure, name, right=0)
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(bits_of(a.contiguous()), bits_of(b.contiguous()))
    tally(figure, name, done=0, right=1)


def test_no_op_is_missing() -> None:
    public = {n for n in li.__all__ if getattr(li, n).__module__.startswith("lightning_indexer.k")}
    assert OPS.keys() == public


@pytest.mark.parametrize("name", OPS)
@FEW
@given(case=cases)
@counts_examples("bits of every op")
def test_a_row_has_the_same_bits_again_alone_and_in_any_batch(name: str, case: Case) -> None:
    op, g = OPS[name], case.generator()
    arguments = op.arguments(case.rows, g)
    whole = op.run(arguments)
    assert_equal(RERUNS, name, op.run(arguments), whole)
    anywhere = torch.randperm(case.rows, generator=g)
    for rows in (anywhere[:1], anywhere[: case.taken], anywhere):
        taken = {n: x[rows] if n in op.by_row else x for n, x in arguments.items()}
        assert_equal(BATCHES, name, op.run(taken), [x[rows] for x in whole])
    strided = {n: laid_out(x, case.layout) for n, x in arguments.items() if n in op.by_row}
    assert_equal(BATCHES, name, op.run(arguments | strided), whole)
