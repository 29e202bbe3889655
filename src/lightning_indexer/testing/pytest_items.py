"""Conformance as pytest items: one for each property of a kernel named on the command line."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from .conformance import SUITES, properties
from .contracts import KernelContract
from .report import ConformanceError
from .runner import Property, run_property

CONTRACT = "lightning_indexer_contract"
#: Parameters that only one op has together.
PARAMETERS = {
    "topk": {"logits"},
    "mqa_logits": {"q", "k", "weights", "row_starts", "row_ends"},
    "paged_mqa_logits": {"q", "cache", "weights", "context_lens", "block_table"},
    "compact": {"rows"},
    "slots": {"indices", "block_table", "row_to_request"},
    "sparse_attention": {"q", "kv", "indices"},
}
#: Words in a function's name, the most telling first; all of a line's must be there.
WORDS = (
    (("compact",), "compact"),
    (("slot",), "slots"),
    (("attention",), "sparse_attention"),
    (("paged", "logits"), "paged_mqa_logits"),
    (("logits",), "mqa_logits"),
    (("topk",), "topk"),
    (("top_k",), "topk"),
)


class KernelSuite(pytest.Collector):
    """A kernel named on the command line: the parent of its items."""

    def collect(self) -> list[pytest.Item]:
        """None: the plugin makes the items."""
        return []


class PropertyItem(pytest.Item):
    """One property of one kernel."""

    def __init__(self, *, prop: Property, examples: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.prop, self.examples = prop, examples

    def runtest(self) -> None:
        """Tries the property, and fails with the smallest case on which it does not hold."""
        failure = run_property(self.prop, self.examples).failure
        if failure is not None:
            raise ConformanceError(str(failure))

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """The reason and the case; a traceback only for faults of the suite itself."""
        if isinstance(excinfo.value, ConformanceError):
            return f"{self.prop.name}:\n  {excinfo.value}"
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, None, str]:
        """Where pytest says that the item is."""
        return self.path, None, self.nodeid


def conformance_items(
    session: pytest.Session, spec: str, op: str | None, examples: int
) -> Iterator[pytest.Item]:
    """The items of the kernel `spec`, "module:function"; UsageError if it can't be judged."""
    fn = load_kernel(spec, str(session.config.invocation_params.dir))
    contract = getattr(fn, CONTRACT, None)
    op = op or infer_op(fn, contract, spec)
    try:
        found = properties(op, fn, contract)
    except TypeError as error:
        raise pytest.UsageError(f"{spec}: {error}") from error
    parent = KernelSuite.from_parent(session, name=spec, nodeid=spec)
    for prop in found:
        name = prop.name.replace(" ", "-")
        yield PropertyItem.from_parent(
            parent, name=name, nodeid=f"{spec}::{name}", prop=prop, examples=examples
        )


def load_kernel(spec: str, folder: str) -> Callable[..., Any]:
    """The function "module:function"; modules of `folder` are found too."""
    module, _, name = spec.partition(":")
    if not module or not name:
        raise pytest.UsageError(f"--lightning-indexer-kernel must be module:function, got {spec!r}")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        fn: Any = importlib.import_module(module)
        for part in name.split("."):
            fn = getattr(fn, part)
    except (ImportError, AttributeError) as error:
        raise pytest.UsageError(f"{spec} can't be loaded: {error}") from error
    if not callable(fn):
        raise pytest.UsageError(f"{spec} must be callable, got {type(fn).__name__}")
    return fn


def infer_op(fn: Callable[..., Any], contract: object, spec: str) -> str:
    """Which op `fn` is of: by its contract, else by its name, else by its parameters."""
    if isinstance(contract, KernelContract):
        return next(op for op, (kind, _) in SUITES.items() if isinstance(contract, kind))
    if contract is not None:
        raise pytest.UsageError(f"{spec}: {CONTRACT} must be a contract, got {contract!r}")
    try:
        names = set(inspect.signature(fn).parameters)
    except (TypeError, ValueError):  # built-in functions have none
        names = set()
    name = spec.partition(":")[2].lower()
    told = [op for words, op in WORDS if all(word in name for word in words)][:1]
    fitting = [op for op, needed in PARAMETERS.items() if needed <= names]
    found = [op for op in told if op in fitting] if told and fitting else told + fitting
    if len(found) != 1:
        raise pytest.UsageError(
            f"{spec}: can't tell which op this is; give --lightning-indexer-op={'|'.join(SUITES)}"
            f" or set {CONTRACT} on it"
        )
    return found[0]
