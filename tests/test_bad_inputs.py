"""Every op refuses bad arguments: it names the argument and what it got, and writes nothing."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from lightning_indexer.kernels.compact import compact_topk_indices
from lightning_indexer.kernels.mqa_logits import mqa_logits
from lightning_indexer.kernels.paged_mqa_logits import paged_mqa_logits
from lightning_indexer.kernels.read_index_k import read_index_k
from lightning_indexer.kernels.select_topk import paged_select_topk, select_topk
from lightning_indexer.kernels.slots import indices_to_slots
from lightning_indexer.kernels.topk import topk_indices
from lightning_indexer.kernels.write_index_k import write_index_k

Arguments = dict[str, Any]
T, H, D, L, B, P, S, K = 3, 2, 8, 12, 3, 4, 4, 5  # S = page size


def _floats(*shape: int) -> torch.Tensor:
    return torch.linspace(-1, 1, torch.Size(shape).numel()).view(shape)


def _ints(low: int, *shape: int) -> torch.Tensor:
    return torch.full(shape, low, dtype=torch.int32)


def _fp8(*shape: int) -> torch.Tensor:
    return _floats(*shape).to(torch.float8_e4m3fn)


def _ragged() -> Arguments:
    return {
        "q": _fp8(T, H, D),
        "k": _fp8(L, D),
        "weights": _floats(T, H),
        "row_starts": _ints(0, T),
        "row_ends": _ints(L, T),
        "k_scale": _floats(L),
    }


def _paged() -> Arguments:
    return {
        "q": _fp8(B, 1, H, D),
        "cache": torch.zeros((P, S, 1, D + 4), dtype=torch.uint8),
        "weights": _floats(B, H),
        "context_lens": _ints(L, B),
        "block_table": _ints(1, B, L // S),
        "row_to_request": _ints(0, B),
        "max_context_len": L,
        "page_size": S,
    }


def _select(rows: int) -> Arguments:
    return {"topk": K, "workspace_bytes": 4 * L, "out": _ints(7, rows, K)}


@dataclass(frozen=True)
class Op:
    """An op, arguments it accepts, and what each argument may not be."""

    call: Callable[..., object]
    valid: Callable[[], Arguments]
    checks: dict[str, str]


# Which mutations below each argument must be refused under.
FIRST = "type dtype rank"  # its sizes and device decide what others must be
FULL = "type dtype rank size device"
OUT = "type dtype rank size device overlap"
INT = "bool float text low"

RAGGED_CHECKS = {
    "q": FIRST,
    "k": "type dtype rank device",
    "weights": FULL,
    "row_starts": FULL,
    "row_ends": FULL,
    "k_scale": FULL,
    "out": OUT,
}
PAGED_CHECKS = {
    "q": FIRST,
    "cache": "type dtype rank device",
    "weights": FULL,
    "context_lens": FULL,
    "block_table": "type dtype rank device",
    "row_to_request": FULL,
    "max_context_len": "bool float text negative",
    "page_size": INT,
    "out": OUT,
}
SELECT_CHECKS = {"topk": INT, "workspace_bytes": INT}

OPS = {
    "mqa_logits": Op(mqa_logits, lambda: _ragged() | {"out": _floats(T, L)}, RAGGED_CHECKS),
    "paged_mqa_logits": Op(
        paged_mqa_logits, lambda: _paged() | {"out": _floats(B, L)}, PAGED_CHECKS
    ),
    "select_topk": Op(select_topk, lambda: _ragged() | _select(T), RAGGED_CHECKS | SELECT_CHECKS),
    "paged_select_topk": Op(
        paged_select_topk, lambda: _paged() | _select(B), PAGED_CHECKS | SELECT_CHECKS
    ),
    "topk_indices": Op(
        topk_indices,
        lambda: {
            "logits": _floats(T, L),
            "k": K,
            "row_starts": _ints(0, T),
            "row_ends": _ints(L, T),
            "out": _ints(7, T, K),
        },
        {"logits": FIRST, "k": INT, "row_starts": FULL, "row_ends": FULL, "out": OUT},
    ),
    "compact_topk_indices": Op(
        compact_topk_indices,
        lambda: {"buffers": _ints(7, T, K), "rows": _ints(1, 2), "num_rows": T},
        {"buffers": "type dtype rank overlap", "rows": "type dtype rank device"}
        | {"num_rows": "bool float text negative"},
    ),
    "write_index_k": Op(
        write_index_k,
        lambda: {
            "cache": torch.zeros((P, S, 1, D + 4), dtype=torch.uint8),
            "k": _floats(T, D),
            "slots": _ints(1, T),
            "page_size": S,
            "scale_format": "fp32",
        },
        {"cache": "type dtype rank device overlap", "k": FIRST, "slots": FULL, "page_size": INT},
    ),
    "read_index_k": Op(
        read_index_k,
        lambda: {
            "cache": torch.zeros((P, S, 1, D + 4), dtype=torch.uint8),
            "block_table": _ints(1, B, 2),
            "context_lens": _ints(2, B),
            "page_size": S,
            "head_dim": D,
            "total": 6,
            "out": (_fp8(6, D), _floats(6)),
        },
        {"cache": FIRST, "block_table": "type dtype rank device", "context_lens": FULL}
        | {"page_size": INT, "head_dim": INT, "total": "bool float text negative"},
    ),
    "indices_to_slots": Op(
        indices_to_slots,
        lambda: {
            "indices": _ints(2, T, K),
            "block_table": _ints(1, B, 2),
            "row_to_request": _ints(0, T),
            "page_size": S,
            "out": _ints(7, T, K),
        },
        {"indices": FIRST, "block_table": "type dtype rank device", "row_to_request": FULL}
        | {"page_size": INT, "out": OUT},
    ),
}

MUTATIONS: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "type": (lambda x: x.tolist() if x.dtype != torch.float8_e4m3fn else None, TypeError, "got"),
    "dtype": (lambda x: x.to(torch.float64), TypeError, "float64"),
    "rank": (lambda x: x[None], ValueError, r"got \[1, "),
    "size": (lambda x: x[1:], ValueError, r"got \["),
    "device": (lambda x: x.to("meta"), ValueError, "got meta"),
    "overlap": (lambda x: x[:1].expand(x.shape), ValueError, "overlap"),
    "bool": (lambda _: True, TypeError, "got bool"),
    "float": (float, TypeError, "got float"),
    "text": (str, TypeError, "got str"),
    "low": (lambda _: 0, ValueError, "got 0"),
    "negative": (lambda _: -1, ValueError, "got -1"),
}

# Arguments that are fine alone and wrong together: (op, why, named argument, change, error).
SPECIAL: list[tuple[str, str, str, Callable[[Arguments], Arguments], type[Exception]]] = [
    *(
        case
        for op in ("mqa_logits", "select_topk")
        for case in (
            (op, "other head dim", "k", lambda a: {"k": _fp8(L, D + 1)}, ValueError),
            (op, "keys wider than q", "k", lambda a: {"k": _floats(L, D)}, TypeError),
            (
                op,  # sgl-project/sglang#39628: e4m3fn written, fnuz read, half the value
                "another fp8",
                "k",
                lambda a: {"k": a["k"].view(torch.float8_e4m3fnuz)},
                TypeError,
            ),
            (op, "no heads", "q", lambda a: {"q": _fp8(T, 0, D)}, ValueError),
            (op, "out of other width", "out", lambda a: {"out": a["out"][:, 1:]}, ValueError),
        )
    ),
    *(
        case
        for op in ("paged_mqa_logits", "paged_select_topk")
        for case in (
            (op, "small pages", "cache", lambda a: {"page_size": S + 1}, ValueError),
            (op, "few columns", "cache", lambda a: {"cache": a["cache"][..., 1:]}, ValueError),
            (op, "narrow table", "block_table", lambda a: {"max_context_len": L + 1}, ValueError),
            (
                op,
                "more table lines than requests",
                "block_table",
                lambda a: {"row_to_request": None, "block_table": _ints(1, B + 1, L // S)},
                ValueError,
            ),
            (
                op,  # NVIDIA/TensorRT-LLM#17247: next_n from the config, not from the data
                "lengths of another next_n",
                "context_lens",
                lambda a: {"row_to_request": None, "context_lens": _ints(L, B, 2)},
                ValueError,
            ),
            (
                op,
                "several rows a request in the ragged form",
                "q",
                lambda a: {"q": _fp8(B, 2, H, D), "weights": _floats(2 * B, H)},
                ValueError,
            ),
        )
    ),
    *(
        (
            op,
            "workspace below a row",
            "workspace_bytes",
            lambda a: {"workspace_bytes": 4 * L - 1},
            ValueError,
        )
        for op in ("select_topk", "paged_select_topk")
    ),
    ("topk_indices", "out narrower than k", "out", lambda a: {"k": K + 1}, ValueError),
    ("compact_topk_indices", "n > M", "rows", lambda a: {"rows": _ints(0, T + 1)}, ValueError),
    ("compact_topk_indices", "above M", "num_rows", lambda a: {"num_rows": T + 1}, ValueError),
    (
        "compact_topk_indices",
        "other M",
        "buffers",
        lambda a: {"buffers": [a["buffers"], _ints(7, T + 1, K)]},
        ValueError,
    ),
    (
        "compact_topk_indices",
        "partial overlap",
        "buffers",
        lambda a: {"buffers": [a["buffers"][:, :3], a["buffers"][:, 2:]]},
        ValueError,
    ),
    ("write_index_k", "other head dim", "cache", lambda a: {"k": _floats(T, D + 4)}, ValueError),
    ("write_index_k", "small pages", "cache", lambda a: {"page_size": S * 2}, ValueError),
    ("write_index_k", "flat floats", "cache", lambda a: {"cache": _floats(P, S * D)}, ValueError),
    ("write_index_k", "no columns", "k", lambda a: {"k": _floats(T, 0)}, ValueError),
    (
        "write_index_k",
        "unknown format",
        "scale_format",
        lambda a: {"scale_format": "fp8"},
        ValueError,
    ),
    ("read_index_k", "other head dim", "cache", lambda a: {"head_dim": D + 1}, ValueError),
    ("read_index_k", "rows missing", "total", lambda a: {"total": 5, "out": None}, ValueError),
    (
        "read_index_k",
        "flat cache of unknown head dim",
        "head_dim",
        lambda a: {"cache": a["cache"].view(P, -1), "head_dim": None, "out": None},
        ValueError,
    ),
    *(
        ("read_index_k", why, "out", lambda a, change=change: {"out": change(*a["out"])}, error)
        for why, change, error in (
            ("one tensor", lambda v, s: v, TypeError),
            ("one in a tuple", lambda v, s: (v,), TypeError),
            ("values of another dtype", lambda v, s: (v.float(), s), TypeError),
            ("no scales", lambda v, s: (v, None), TypeError),
            ("fewer rows than total", lambda v, s: (v[:4], s), ValueError),
            ("more scales than rows", lambda v, s: (v, _floats(7)), ValueError),
            ("values on top of each other", lambda v, s: (v[:1].expand(v.shape), s), ValueError),
        )
    ),
    ("read_index_k", "float cache", "out", lambda a: {"cache": _floats(P, S, D)}, TypeError),
]


def _tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if value.device.type == "cpu":
            yield value.view(torch.uint8) if value.dtype == torch.float8_e4m3fn else value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _assert_refused(
    op: str, name: str, arguments: Arguments, error: type[Exception], got: str
) -> None:
    before = [t.clone() for t in _tensors(list(arguments.values()))]
    with pytest.raises(error, match=rf"\b{name}\b.*{got}") as caught:
        OPS[op].call(**arguments)
    assert caught.type is error
    for old, new in zip(before, _tensors(list(arguments.values())), strict=True):
        assert torch.equal(old, new)


@pytest.mark.parametrize("op", OPS)
def test_arguments_the_cases_start_from_are_accepted(op: str) -> None:
    OPS[op].call(**OPS[op].valid())


@pytest.mark.parametrize(
    "op, name, mutation",
    [
        (op, name, mutation)
        for op, entry in OPS.items()
        for name, mutations in entry.checks.items()
        for mutation in mutations.split()
    ],
)
def test_bad_argument_is_named_and_nothing_is_written(op: str, name: str, mutation: str) -> None:
    arguments = OPS[op].valid()
    mutate, error, got = MUTATIONS[mutation]
    arguments[name] = mutate(arguments[name])
    _assert_refused(op, name, arguments, error, got)


@pytest.mark.parametrize(
    "op, name, change, error",
    [pytest.param(op, *case, id=f"{op}: {why}") for op, why, *case in SPECIAL],
)
def test_arguments_that_do_not_fit_together_are_refused(
    op: str, name: str, change: Callable[[Arguments], Arguments], error: type[Exception]
) -> None:
    arguments = OPS[op].valid()
    arguments |= change(arguments)
    _assert_refused(op, name, arguments, error, "got")
