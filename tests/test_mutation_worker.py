"""The mutant is what runs: a worker exchanges its code alone, and tells what happened."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mutation.calls import environment_of
from mutation.patch import changes
from sins.sin import ROOT

pytestmark = pytest.mark.once


OLD = """
A = 1
def f(x, y=A):
    def g():
        return x + 1
    return g
class C:
    b = 2
    def f(self):
        return 1
"""


@pytest.mark.parametrize(
    "old, new, path",
    [
        ("x + 1", "x + 2", ("f",)),
        ("return g", "return not g", ("f",)),
        ("return 1", "return 2", ("C", "f")),
        ("A = 1", "A = 2", None),
        ("y=A", "y=-A", None),
        ("b = 2", "b = 3", None),
        ("def f(self)", "@property\n    def f(self)", None),
    ],
)
def test_code_of_functions_is_exchanged_and_nothing_else(
    old: str, new: str, path: tuple[str, ...] | None
) -> None:
    found = changes(OLD, OLD.replace(old, new), "x.py")
    assert (found and [c.path for c in found]) == (path and [path])


MODULE = """from lightning_indexer.kernels.backend import tl, triton

BASE = 1
FINE = True

@triton.jit
def _double(x):
    return x * 2

@triton.jit
def _kernel(x_ptr, TWICE: tl.constexpr):
    tl.store(x_ptr, _double(tl.load(x_ptr)))

def number():
    return BASE + 1
"""
TESTS = """import torch
from hypothesis import given, strategies as st
from lightning_indexer.kernels.small import BASE, _kernel, number

SEEN = []
_kernel[(1,)](torch.tensor([3]), True)  # a warm worker has run it before

def test_number():
    assert number() == 2

@given(st.integers())
def test_examples(x):
    SEEN.append(x)

def test_there_were_four():
    assert len(SEEN) == 4

def test_kernel():
    x = torch.tensor([3])
    _kernel[(1,)](x, True)
    assert x.item() == 6
"""


@pytest.fixture(scope="module")
def small_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package of one module beside kernels/backend.py."""
    tree = tmp_path_factory.mktemp("small")
    package, tests = tree / "src" / "lightning_indexer", tree / "tests"
    (package / "kernels").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "kernels" / "backend.py").write_text((ROOT / "kernels/backend.py").read_text())
    (package / "kernels" / "small.py").write_text(MODULE)
    (tests / "mutation").mkdir(parents=True)
    (tests / "mutation" / "__init__.py").touch()
    for name in ("worker.py", "patch.py"):
        (tests / "mutation" / name).write_text((ROOT / "tests/mutation" / name).read_text())
    (tests / "conftest.py").touch()
    (tests / "test_small.py").write_text(TESTS)
    (tree / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    return tree


class Worker:
    """A worker in a tree."""

    def __init__(self, tree: Path, kind: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mutation.worker", kind],
            cwd=tree,
            env=environment_of(tree, "interpreter"),
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._answer() == {"ready": True}

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout
        return json.loads(self.process.stdout.readline())

    def verdict(
        self, old: str = "", new: str = "", test: str = "", examples: int = 4, memory: int = 2**40
    ) -> str:
        """What becomes of the tests when `new` stands for `old` in the module."""
        request = {
            "file": "kernels/small.py" if old else "",
            "old": MODULE,
            "source": MODULE.replace(old, new),
            "tests": [f"tests/test_small.py{test}"],
            "whole": False,
            "examples": examples,
            "memory": memory,
            "cpu_limit": 2,
        }
        assert self.process.stdin
        print(json.dumps(request), file=self.process.stdin, flush=True)
        return self._answer()["verdict"]


@pytest.fixture(scope="module", params=["warm", "fresh"])
def worker(request: pytest.FixtureRequest, small_tree: Path) -> Iterator[Worker]:
    worker = Worker(small_tree, request.param)
    worker.kind = request.param
    yield worker
    worker.process.kill()
    worker.process.wait()


def test_the_mutant_is_what_runs(worker: Any, small_tree: Path) -> None:
    fresh = worker.kind == "fresh"
    assert worker.verdict() == "passed"
    assert worker.verdict("BASE + 1", "BASE - 1") == "failed"
    assert worker.verdict("x * 2", "x * 3") == "failed"  # Triton's interpreter sees it too
    assert worker.verdict("BASE = 1", "BASE = 2") == ("failed" if fresh else "unpatched")
    assert worker.verdict("FINE = True", "FINE = Tru") == ("import" if fresh else "unpatched")
    assert worker.verdict("x * 2", "2 * x") == "passed"
    assert worker.verdict() == "passed"  # nothing of a mutant is left
    assert (small_tree / "src/lightning_indexer/kernels/small.py").read_text() == MODULE


def test_a_run_that_crashes_or_hangs_or_has_no_test_is_told_apart(worker: Worker) -> None:
    assert worker.verdict("BASE + 1", "__import__('os').abort()") == "crashed"
    assert worker.verdict("BASE + 1", "[0 for _ in iter(int, 1)]") == "hung"
    assert worker.verdict(memory=2**20) == "crashed"  # stopped: it holds more
    assert worker.verdict(test="::test_that_is_not_there") == "nothing ran"
    assert worker.verdict(examples=5, test="::test_examples") == "passed"
    assert worker.verdict(examples=5) == "failed"  # by the test that wants four
