"""What a fault is injected into: an op with a right call, guarded memory, and launches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_indexer.kernels.backend import INTERPRET
from lightning_indexer.kernels.registry import NAMESPACE
from lightning_indexer.testing.canary import Guarded
from lightning_indexer.testing.compare import assert_matches

Arguments = dict[str, Any]


@dataclass(frozen=True)
class Contents:
    """What an integer argument holds: `kind` of number, good below `limit`.

    `wide`: int64 is accepted too. `refused`: the side ("low", "high") on which check mode raises.
    """

    kind: str
    limit: int
    refused: str = "low high"
    wide: bool = True


@dataclass(frozen=True)
class Op:
    """An op, arguments it accepts, and what may be wrong with each.

    checks: names of mutations (test_bad_inputs.py) that an argument must be refused under.
    writes: arguments that the op writes.
    expected: what `writes` hold after a call, one after another, by the oracle.
    bound: how far floats may be off.
    unservable: whether contents are refused in any mode, as out has too few rows for them.
    """

    call: Callable[..., object]
    valid: Callable[[], Arguments]
    checks: dict[str, str]
    expected: Callable[[Arguments], list[torch.Tensor]]
    contents: dict[str, Contents] = field(default_factory=dict)
    writes: tuple[str, ...] = ("out",)
    bound: float = 0.0
    unservable: Callable[[Arguments], bool] = lambda _: False


def tensors_of(value: object) -> Iterator[torch.Tensor]:
    """Those of an argument, or of all of a call's."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_of(item)
    elif isinstance(value, dict):
        yield from tensors_of(list(value.values()))


def written(op: Op, arguments: Arguments) -> list[torch.Tensor]:
    return [x for name in op.writes for x in tensors_of(arguments[name])]


def guarded(op: Op, arguments: Arguments) -> tuple[Arguments, Callable[..., None]]:
    """The arguments between guards, and what raises if a byte has changed that may not.

    That takes `untouched=True` where nothing may have been written at all.
    """
    guards: list[tuple[str, Guarded]] = []

    def held(name: str, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(held(name, item) for item in value)
        if not isinstance(value, torch.Tensor) or value.device.type != "cpu":
            return value
        guards.append((name, Guarded.like(value)))
        return guards[-1][1].tensor

    def check(*, untouched: bool = False) -> None:
        for name, guard in guards:
            if name in op.writes and not untouched:
                guard.check_around(name)
            else:
                guard.check_unchanged(name)

    return {name: held(name, value) for name, value in arguments.items()}, check


def assert_right(op: Op, arguments: Arguments, expected: list[torch.Tensor]) -> None:
    """Asserts that what the op writes is what the oracle says."""
    for got, want in zip(written(op, arguments), expected, strict=True):
        if got.is_floating_point():
            assert_matches(got.double(), want.double(), op.bound)
        else:
            assert torch.equal(got.long(), want.long())


class Injected(RuntimeError):
    """What a test makes fail."""


#: What ops ask memory of. (What PyTorch's own operations allocate is `operations`' matter.)
ALLOCATORS = (
    *((torch, n) for n in ("empty", "empty_like", "empty_strided", "zeros", "full", "arange")),
    *((torch.Tensor, n) for n in ("new_empty", "new_zeros", "new_full", "clone")),
)


@contextmanager
def allocations(fail_at: int | None = None) -> Iterator[list[str]]:
    """Lists the allocations asked for meanwhile, one of which may fail."""
    names: list[str] = []
    launching = False

    def failing(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if launching:
                return original(*args, **kwargs)
            names.append(name)
            if len(names) - 1 == fail_at:
                raise Injected("allocation")
            return original(*args, **kwargs)

        return run

    def launched(_: str, launch: Callable[[], Any]) -> Any:
        """The interpreter copies arguments: that is no allocation of the op's."""
        nonlocal launching
        launching = True
        try:
            return launch()
        finally:
            launching = False

    with ExitStack() as stack:
        for owner, name in ALLOCATORS:
            stack.enter_context(patch.object(owner, name, failing(name, getattr(owner, name))))
        stack.enter_context(_watched_launches(launched))
        yield names


class operations(TorchDispatchMode):
    """Lists PyTorch's operations meanwhile, those in the bodies of ops too; one may fail."""

    def __init__(self, fail_at: int | None = None) -> None:
        super().__init__()
        self.names: list[str] = []
        self.fail_at = fail_at

    def __enter__(self) -> list[str]:
        super().__enter__()
        return self.names

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace == NAMESPACE:
            with self:  # or its body would be out of sight
                return func._op_dk(torch._C.DispatchKey.CPU, *args, **(kwargs or {}))
        self.names.append(str(func))
        if len(self.names) - 1 == self.fail_at:
            raise Injected("operation")
        return func(*args, **(kwargs or {}))


@contextmanager
def launches(fail_at: int | None = None) -> Iterator[list[str]]:
    """Lists the kernels launched meanwhile (none on a CPU's own path); one of them may fail."""
    names: list[str] = []

    def launched(name: str, launch: Callable[[], Any]) -> Any:
        names.append(name)
        if len(names) - 1 == fail_at:
            raise Injected("launch")
        return launch()

    with _watched_launches(launched):
        yield names


def _watched_launches(
    launched: Callable[[str, Callable[[], Any]], Any],
) -> AbstractContextManager[object]:
    """In the interpreter `launched` is called with a kernel's name and what launches it."""
    if not INTERPRET:
        return nullcontext()
    from triton.runtime.interpreter import InterpretedFunction

    original = InterpretedFunction.run

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        return launched(self.fn.__name__, lambda: original(self, *args, **kwargs))

    return patch.object(InterpretedFunction, "run", run)
