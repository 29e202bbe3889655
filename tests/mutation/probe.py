"""A pytest plugin that writes which lines of the three folders each test runs, and its seconds.

The file is `$MUTATION_PROBE`, one line of JSON a test. A test that takes more than 10 s is of no
use against thousands of mutants: it is interrupted, and counts as failed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

from .mutants import FOLDERS
from .runner import MAPPED
from .worker import SETTINGS, few

LIMIT = 10
ROOT = Path(__file__).resolve().parents[2]


class Probe:
    """Traces the calls of one test after another."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.called: set[tuple[CodeType, int]] = set()
        self.passed = True
        self.caches: list[Any] = []

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        for item in items:
            function = getattr(item, "obj", None)
            if hasattr(function, SETTINGS):
                setattr(function, SETTINGS, few(MAPPED, getattr(function, SETTINGS)))
        modules = [m for name, m in sys.modules.items() if name.startswith("lightning_indexer.")]
        values = [value for module in modules for value in vars(module).values()]
        self.caches = [value for value in values if hasattr(value, "cache_clear")]

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: Any) -> Iterator[None]:
        self.called, self.passed = set(), True
        for value in self.caches:  # else only the first test is seen to call a cached function
            value.cache_clear()
        start = time.process_time()
        signal.signal(signal.SIGALRM, _interrupt)
        signal.alarm(LIMIT)
        sys.settrace(self._trace)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            signal.alarm(0)
            row = [item.nodeid, round(time.process_time() - start, 3), self.passed]
            lines = {(_module(code.co_filename), line) for code, line in self.called}
            with self.path.open("a") as file:
                file.write(json.dumps([*row, sorted(lines)]) + "\n")

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.passed &= not report.failed

    def _trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        """Traces the lines of functions of the three folders, and nothing else."""
        if not _module(frame.f_code.co_filename):
            return None
        if event == "line":
            self.called.add((frame.f_code, frame.f_lineno))
        return self._trace


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Probe(Path(os.environ["MUTATION_PROBE"])))


@cache
def _module(filename: str) -> str:
    """`kernels/topk.py`, whichever of its two paths a module was imported from; else nothing."""
    path = Path(filename).resolve()
    inside = path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in FOLDERS
    return str(path.relative_to(ROOT)) if inside else ""


def _interrupt(*_: Any) -> None:
    raise TimeoutError(f"more than {LIMIT} s")
