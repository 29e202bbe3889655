"""Every op refuses bad arguments: it names the argument and what it got, and writes nothing."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from counting import FAULTS, tally
from fault_cases import OPS
from fault_inputs import K, T
from fault_misfits import MISFITS
from fault_tools import Arguments, Op, assert_right, guarded, launches, tensors_of
from lightning_indexer.kernels.backend import INTERPRET


def _overlapping(x: torch.Tensor) -> torch.Tensor:
    """Lines that begin in the middle of the ones before."""
    return x.as_strided(x.shape, (x.stride(0) // 2, *x.stride()[1:]))


MUTATIONS: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "type": (lambda x: x.tolist() if x.dtype != torch.float8_e4m3fn else None, TypeError, "got"),
    "dtype": (lambda x: x.to(torch.float64), TypeError, "float64"),
    "rank": (lambda x: x[None], ValueError, r"got \[1, "),
    "size": (lambda x: x[1:], ValueError, r"got \["),
    "device": (lambda x: x.to("meta"), ValueError, "got meta"),
    "repeated": (lambda x: x[:1].expand(x.shape), ValueError, "overlap"),
    "overlap": (_overlapping, ValueError, "overlap"),
    "bool": (lambda _: True, TypeError, "got bool"),
    "float": (float, TypeError, "got float"),
    "text": (str, TypeError, "got str"),
    "low": (lambda _: 0, ValueError, "got 0"),
    "negative": (lambda _: -1, ValueError, "got -1"),
    "word": (lambda _: "other", ValueError, "got 'other'"),
    "nan": (lambda _: float("nan"), ValueError, "got nan"),
    "infinite": (lambda _: float("inf"), ValueError, "got inf"),
    "bare": (lambda x: x[0], TypeError, "got Tensor"),
    "short": (lambda x: (x[0][1:], *x[1:]), ValueError, r"got \["),
}


def assert_refused(
    op: Op, name: str, arguments: Arguments, error: type[Exception], got: str, kind: str
) -> None:
    """`arguments` are views of guarded ones."""
    tally(FAULTS, f"argument: {kind}", right=0)
    with launches() as launched, pytest.raises(error, match=rf"\b{name}\b.*{got}") as caught:
        op.call(**arguments)
    assert caught.type is error
    assert launched == []
    tally(FAULTS, f"argument: {kind}", done=0, right=1)


@pytest.mark.parametrize("name", OPS)
def test_call_that_the_cases_start_from_is_right(name: str) -> None:
    op = OPS[name]
    arguments = op.valid()
    expected = op.expected(arguments)
    with launches() as launched:
        op.call(**arguments)
    assert_right(op, arguments, expected)
    assert bool(launched) == INTERPRET


def test_every_argument_is_in_the_table() -> None:
    for name, op in OPS.items():
        if op.checks:
            assert op.checks.keys() == op.valid().keys(), name


KINDS = {
    "type": "dtype",
    "size": "shape",
    "rank": "shape",
    "short": "shape",
    "repeated": "stride",
    "overlap": "stride",
    "dtype": "dtype",
    "device": "device",
}


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
    arguments, check = guarded(OPS[op], OPS[op].valid())
    mutate, error, got = MUTATIONS[mutation]
    arguments[name] = mutate(arguments[name])
    assert_refused(OPS[op], name, arguments, error, got, KINDS.get(mutation, "value"))
    check(untouched=True)


@pytest.mark.parametrize(
    "op, name, change, error",
    [pytest.param(op, *case, id=f"{op}: {why}") for op, why, *case in MISFITS],
)
def test_arguments_that_do_not_fit_together_are_refused(
    op: str, name: str, change: Callable[[Arguments], Arguments], error: type[Exception]
) -> None:
    arguments, check = guarded(OPS[op], OPS[op].valid())
    arguments |= change(arguments)
    assert_refused(OPS[op], name, arguments, error, "got", "misfit")
    check(untouched=True)


def inputs_of(op: Op) -> list[str]:
    """Arguments with tensors that the op only reads."""
    return [
        name
        for name, value in op.valid().items()
        if name not in op.writes and any(True for _ in tensors_of(value))
    ]


def in_one_memory(x: torch.Tensor, at: int, memory: torch.Tensor) -> torch.Tensor:
    """A copy of `x` that begins at byte `at` of `memory`."""
    held = memory[at : at + x.numel() * x.element_size()].view(x.dtype).view(x.shape)
    return held.copy_(x)


@pytest.mark.parametrize(
    "op, read, at_its_end",
    [
        (op, read, at_its_end)
        for op, entry in OPS.items()
        if entry.checks and op != "compact_topk_indices"  # takes rows out of its buffers
        for read in inputs_of(entry)
        for at_its_end in (False, True)
    ],
)
def test_what_is_written_shares_no_memory_with_what_is_read(
    op: str, read: str, at_its_end: bool
) -> None:
    name = OPS[op].writes[-1]
    arguments = OPS[op].valid()
    parts = list(tensors_of(arguments[name]))
    x, out = arguments[read], parts[-1]
    at = (x.numel() * x.element_size() - 1) // 8 * 8 if at_its_end else 0
    size = max(y.numel() * y.element_size() for y in (x, out))
    memory = torch.zeros(at + size, dtype=torch.uint8)
    parts[-1] = in_one_memory(out, at, memory)
    arguments |= {read: in_one_memory(x, 0, memory)}
    arguments |= {name: tuple(parts) if isinstance(arguments[name], tuple) else parts[0]}
    before = memory.clone()
    got = f"share no memory with {read}, got"
    assert_refused(OPS[op], name, arguments, ValueError, got, "shared memory")
    assert torch.equal(memory, before)


def test_results_share_no_memory_with_each_other() -> None:
    arguments = OPS["sparse_mla_attention"].valid()
    arguments["lse"] = arguments["out"][..., 0]
    got = "share no memory with out, got"
    op = OPS["sparse_mla_attention"]
    assert_refused(op, "lse", arguments, ValueError, got, "shared memory")


@pytest.mark.parametrize("op", OPS)
def test_tensors_side_by_side_in_one_memory_are_fine(op: str) -> None:
    arguments = OPS[op].valid()
    expected = OPS[op].expected(arguments)
    tensors = list(tensors_of(arguments))
    memory = torch.zeros(sum(x.numel() * x.element_size() + 8 for x in tensors), dtype=torch.uint8)
    at = 0

    def moved(value: Any) -> Any:
        nonlocal at
        if isinstance(value, tuple):
            return tuple(map(moved, value))
        if not isinstance(value, torch.Tensor):
            return value
        held = in_one_memory(value, at, memory)
        at += -(-held.numel() * held.element_size() // 8) * 8
        return held

    arguments = {name: moved(value) for name, value in arguments.items()}
    OPS[op].call(**arguments)
    assert_right(OPS[op], arguments, expected)


def test_columns_of_one_matrix_are_apart() -> None:
    op = OPS["indices_to_slots"]
    arguments = op.valid()
    both = torch.full((T, 2 * K), 7, dtype=torch.int32)
    both[:, :K] = arguments["indices"]
    arguments |= {"indices": both[:, :K], "out": both[:, K:]}
    expected = op.expected(arguments)
    op.call(**arguments)
    assert_right(op, arguments, expected)
    arguments["out"] = both[:, K - 1 : -1]
    got = "share no memory with indices, got"
    assert_refused(op, "out", arguments, ValueError, got, "shared memory")
