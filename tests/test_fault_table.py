"""The fault table: whatever happens to a call of any op, memory around it stays as it was.

Contents that make no sense give what the docs promise. An allocation, a launch or an operation
that fails reaches the caller, leaves the inputs, and the next call is right. (Arguments that do
not fit are test_bad_inputs.py's.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace

import pytest
import torch

import lightning_indexer as li
from counting import FAULTS, tally
from fault_cases import BUSY, OPS
from fault_tools import (
    Arguments,
    Contents,
    Injected,
    Op,
    allocations,
    assert_right,
    guarded,
    launches,
    operations,
    written,
)
from lightning_indexer.kernels.backend import INTERPRET
from lightning_indexer.kernels.registry import NAMESPACE
from lightning_indexer.testing.allocations import guarded_allocations

MOST_FAILURES = 24
#: Launches of a call that has more than one: queries are encoded first, rows come in chunks.
LAUNCHES = {
    "mqa_logits": 2,
    "paged_mqa_logits": 2,
    "paged_mqa_logits, uniform": 2,
    "select_topk": 6,
    "paged_select_topk": 6,
    "sparse_mla_attention, wide_rows": 2,
    "compact_topk_indices, many_buffers": 2,
}
INT32, INT64 = torch.iinfo(torch.int32), torch.iinfo(torch.int64)


def test_no_op_is_missing() -> None:
    registered = {name.partition("::") for name in torch._C._dispatch_get_all_op_names()}
    names = {op for space, _, op in registered if space == NAMESPACE}
    public = {n for n in li.__all__ if getattr(li, n).__module__.startswith("lightning_indexer.k")}
    assert names == public == {name.partition(",")[0] for name in OPS}


def test_every_integer_tensor_has_its_garbage() -> None:
    for op in OPS.values():
        integers = {
            name
            for name, x in op.valid().items()
            if isinstance(x, torch.Tensor) and x.dtype == torch.int32 and name not in op.writes
        }
        assert integers == op.contents.keys()


def garbage(contents: Contents) -> Iterator[tuple[torch.dtype, int]]:
    """Numbers that mean nothing: around the limits, and such as wrap around to good ones."""
    narrow = (-1, -2, contents.limit, contents.limit + 1, INT32.min, INT32.max)
    yield from ((torch.int32, value) for value in narrow)
    if contents.wide:
        wide = (-1, contents.limit, 2**31, 2**32 + 1, 1 - 2**32, INT64.min, INT64.max)
        yield from ((torch.int64, value) for value in wide)


def groups(contents: Contents, size: int) -> Iterator[tuple[torch.dtype, list[int]]]:
    """Garbage of one call: a number on a CPU; in kernels, which take long, what there is room for.

    Those see int32 in the test below, and here where nothing else is accepted.
    """
    size = size if INTERPRET else 1
    for dtype in (torch.int64, torch.int32):
        values = [value for d, value in garbage(contents) if d == dtype]
        yield from ((dtype, values[i : i + size]) for i in range(0, len(values), size))
        if INTERPRET and values:
            return


CONTENTS = [
    pytest.param(op, name, dtype, values, id=f"{op}: {name} {values} in {dtype}")
    for op, entry in OPS.items()
    for name, contents in entry.contents.items()
    for dtype, values in groups(contents, entry.valid()[name].numel())
]


@pytest.mark.parametrize("op, name, dtype, values", CONTENTS)
def test_garbage_reads_and_writes_nothing_outside_and_gives_what_is_promised(
    op: str, name: str, dtype: torch.dtype, values: list[int]
) -> None:
    arguments = OPS[op].valid()
    spoilt = arguments[name].to(dtype)
    places = slice(1, 2) if len(values) == 1 else slice(len(values))
    spoilt.view(-1)[places] = torch.tensor(values, dtype=dtype)
    kind = f"{OPS[op].contents[name].kind} out of range"
    assert_harmless(OPS[op], arguments | {name: spoilt}, kind, len(values))


@pytest.mark.parametrize(
    "op, name",
    [(op, name) for op, entry in OPS.items() for name in entry.contents],
)
def test_nothing_but_garbage_gives_nothing(op: str, name: str) -> None:
    contents, arguments = OPS[op].contents[name], OPS[op].valid()
    for value in (INT32.min, INT32.max):
        spoilt = torch.full_like(arguments[name], value)
        kind = f"{contents.kind} out of range"
        assert_harmless(OPS[op], arguments | {name: spoilt}, kind, spoilt.numel())


@pytest.mark.once  # contents are checked on the host
@pytest.mark.parametrize("side, value", [("low", INT32.min), ("high", INT32.max)])
@pytest.mark.parametrize(
    "op, name", [(op, name) for op, entry in OPS.items() for name in entry.contents]
)
def test_check_mode_refuses_what_cannot_be_meant_before_anything_is_written(
    op: str, name: str, side: str, value: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIGHTNING_INDEXER_CHECK", "1")
    contents, arguments = OPS[op].contents[name], OPS[op].valid()
    arguments[name].view(-1)[0] = value  # which every op uses
    if side not in contents.refused and not OPS[op].unservable(arguments):
        assert_harmless(OPS[op], arguments, f"{contents.kind} out of range", 1)
        return
    tally(FAULTS, f"{contents.kind} in check mode", right=0)
    words = "total .*must" if OPS[op].unservable(arguments) else f"{name} .*must .*{value}"
    arguments, check = guarded(OPS[op], arguments)
    with launches() as launched, pytest.raises(ValueError, match=f"^{words}"):
        OPS[op].call(**arguments)
    assert launched == []
    check(untouched=True)
    tally(FAULTS, f"{contents.kind} in check mode", done=0, right=1)


def assert_harmless(op: Op, arguments: Arguments, kind: str, faults: int) -> None:
    tally(FAULTS, kind, done=faults, right=0)
    expected = [] if op.unservable(arguments) else op.expected(arguments)
    arguments, check = guarded(op, arguments)
    with guarded_allocations() as scratch:
        if op.unservable(arguments):
            with pytest.raises(ValueError, match=r"^total .* must be at least \d+, got"):
                op.call(**arguments)
            check(untouched=True)
        else:
            op.call(**arguments)
            assert_right(op, arguments, expected)
            check()
    for guard in scratch:
        guard.check_around("scratch")
    tally(FAULTS, kind, done=0, right=faults)


def assert_failures_are_survived(
    op: Op,
    failing: Callable[[int | None], AbstractContextManager[list[str]]],
    kind: str,
    *dropped: str,
) -> int:
    """One after another of what `failing` lists fails (of very many, some); returns how many."""
    expected = op.expected(op.valid())
    arguments = _without(op.valid(), dropped)
    with failing(None) as listed:
        op.call(**arguments)
    for n in range(0, len(listed), len(listed) // MOST_FAILURES + 1):
        arguments, check = guarded(op, op.valid())
        arguments = _without(arguments, dropped)
        tally(FAULTS, kind, right=0)
        with failing(n) as seen, pytest.raises(Injected):
            op.call(**arguments)
        assert len(seen) == n + 1, f"{seen[n]} failed, and the op went on with {seen[n + 1 :]}"
        check()
        if op.call is li.compact_topk_indices:
            _assert_whole_and_restore(op, arguments, expected)
        returned = op.call(**arguments)
        if dropped:
            assert_right(replace(op, writes=("out",)), {"out": returned}, expected)
        else:
            assert_right(op, arguments, expected)
        check()
        tally(FAULTS, kind, done=0, right=1)
    return len(listed)


def _without(arguments: Arguments, names: tuple[str, ...]) -> Arguments:
    return {name: x for name, x in arguments.items() if name not in names}


def _assert_whole_and_restore(op: Op, arguments: Arguments, expected: list[torch.Tensor]) -> None:
    """Each buffer is old or new; what was gathered in place can't be gathered again."""
    for now, old, new in zip(
        written(op, arguments), written(op, op.valid()), expected, strict=True
    ):
        assert torch.equal(now, old) or torch.equal(now, new)
        now.copy_(old)


@pytest.mark.parametrize("name", BUSY)
def test_failing_allocation_reaches_the_caller_and_the_next_call_is_right(name: str) -> None:
    assert_failures_are_survived(BUSY[name], allocations, "workspace allocation failing")


@pytest.mark.once
@pytest.mark.parametrize("name", [name for name, op in BUSY.items() if "out" in op.writes])
def test_failing_allocation_of_the_result_is_no_different(name: str) -> None:
    kind = "result allocation failing"
    assert assert_failures_are_survived(BUSY[name], allocations, kind, "out", "lse") > 0


@pytest.mark.interpreter
@pytest.mark.parametrize("name", BUSY)
def test_failing_launch_reaches_the_caller_and_the_next_call_is_right(name: str) -> None:
    count = assert_failures_are_survived(BUSY[name], launches, "kernel launch failing")
    assert count == LAUNCHES.get(name, 1)


@pytest.mark.once
@pytest.mark.parametrize("name", BUSY)
def test_failing_operation_reaches_the_caller_and_the_next_call_is_right(name: str) -> None:
    count = assert_failures_are_survived(BUSY[name], operations, "operation failing")
    assert count > 5
