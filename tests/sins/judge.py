"""Commits a sin in a copy of the tree and says what became of its tests."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from .sin import ROOT, Sin

#: Left out of a copy: what tools made, and everything hidden.
IGNORED = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist")
#: pytest's exit codes.
PASSED, FAILED = 0, 1


@dataclass(frozen=True)
class Outcome:
    """How a run of tests ended: "passed", "failed", "crashed", "hung" or "error".

    An error is a run that says nothing: no such test, a file that cannot be imported.
    """

    verdict: str
    seconds: float
    failed: tuple[str, ...]  # tests that failed
    why: str  # of the first of them, in short
    output: str

    @property
    def rejects(self) -> bool:
        """Whether a sin that led to it is rejected."""
        return self.verdict in ("failed", "crashed", "hung")


def judge(sin: Sin, limit: float) -> Outcome:
    """Runs the tests of a sin in a copy of the tree that has it, up to the first that fails."""
    with copied_tree() as tree:
        path = tree / sin.file
        path.write_text(sin.commit(path.read_text()))
        return run_tests(tree, sin.tests, sin.backend, limit, "-x")


def judge_innocent(sins: Sequence[Sin], backend: str, limit: float) -> Outcome:
    """Runs what is to reject the sins of a backend in a copy without any: all of it must pass."""
    tests = sorted({test for sin in sins if sin.backend == backend for test in sin.tests})
    with copied_tree() as tree:
        return run_tests(tree, tests, backend, limit)


@contextmanager
def copied_tree() -> Iterator[Path]:
    """A copy of the tree, links kept."""
    with tempfile.TemporaryDirectory(prefix="sins-") as folder:
        tree = Path(folder).resolve() / "tree"
        shutil.copytree(ROOT, tree, symlinks=True, ignore=IGNORED)
        yield tree


def run_tests(
    tree: Path, tests: Sequence[str], backend: str, limit: float, *options: str
) -> Outcome:
    """Runs `tests` of a copy on a backend for at most `limit` seconds."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tree / "src"), str(tree / "tests")]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "HYPOTHESIS_PROFILE": "dev",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "COLUMNS": "200",  # else pytest cuts its summary short
    }
    environment.pop("TRITON_INTERPRET", None)
    if backend == "interpreter":
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-rfE", "-p", "sins.guard"]
    command += ["-p", "no:cacheprovider", *options, *tests]
    start = time.monotonic()
    with subprocess.Popen(
        command,
        cwd=tree,
        env=environment,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:
        try:
            output, _ = process.communicate(timeout=limit)
            verdict = _verdict(process.returncode)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
            verdict = "hung"
    lines = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - (.*))?$", output, re.MULTILINE)
    failed, reasons = zip(*lines, strict=True) if lines else ((), ("",))
    return Outcome(verdict, time.monotonic() - start, failed, reasons[0], output)


def _verdict(code: int) -> str:
    if code < 0:
        return "crashed"
    return {PASSED: "passed", FAILED: "failed"}.get(code, "error")
