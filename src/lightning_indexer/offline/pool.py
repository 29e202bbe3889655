"""Compiling many cases for many targets, in subprocesses, with what is known kept on disk.

A subprocess (`python -m lightning_indexer.offline.pool FOLDER`) reads a line [target, number of
the case] and answers with a line of JSON. It runs without TRITON_INTERPRET, because jitted
functions of an interpreting process cannot be compiled, and may crash without harm.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import queue
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from .case import TARGETS, CompileCase
from .compile import CompiledKernel, all_cases, compile_case
from .count import Count

Compiled = tuple[CompileCase, CompiledKernel]

#: The modules that read and count what was compiled.
_READERS = (
    *("assembly", "attribution", "compile", "count", "cubin"),
    *("executed", "flow", "places", "source"),
)


def default_folder() -> Path:
    """Where compiled kernels are kept: $XDG_CACHE_HOME/lightning-indexer, or under ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning-indexer"


def compile_all(
    targets: Sequence[str],
    op: str | None = None,
    *,
    jobs: int | None = None,
    folder: Path | None = None,
    on_done: Callable[[int, int], None] | None = None,
) -> list[Compiled]:
    """Compiles all cases (of one op) for `targets`, names of TARGETS, in the cases' order.

    `jobs` processes run at a time (default: one a core). `folder` keeps results and Triton's
    cache (default: `default_folder()`). `on_done` is told how many are done, and of how many.
    """
    folder = folder or default_folder()
    listed = [
        (target, number, case)
        for target in targets
        for number, case in enumerate(all_cases(TARGETS[target]))
        if op in (None, case.op)
    ]
    results: list[CompiledKernel | None] = [None] * len(listed)
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    for i in range(len(listed)):
        waiting.put(i)

    def work() -> None:
        with _Worker(folder) as worker:
            while True:
                try:
                    i = waiting.get_nowait()
                except queue.Empty:
                    return
                results[i] = worker.compile(*listed[i])
                if on_done is not None:
                    on_done(sum(r is not None for r in results), len(listed))

    with _only_one(folder), ThreadPoolExecutor() as threads:
        count = min(jobs or os.cpu_count() or 1, len(listed))
        for future in [threads.submit(work) for _ in range(count)]:
            future.result()
    return [(case, r) for (_, _, case), r in zip(listed, results, strict=True) if r is not None]


class _Worker:
    """A compiling subprocess; one that crashed is replaced."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[str] | None = None
        self._errors: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed in __exit__)

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.communicate()
        self._errors.close()

    def compile(self, target: str, number: int, case: CompileCase) -> CompiledKernel:
        process = self._process = self._process or self._start()
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps([target, number]) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if answer:
            return _from_json(json.loads(answer))
        code, self._process = process.wait(), None
        self._errors.seek(0)
        error = f"the compiling process ended with code {code}: {self._errors.read()[-1500:]}"
        return CompiledKernel(case.op, case.label, target, error=error)

    def _start(self) -> subprocess.Popen[str]:
        # Source lines in Triton's cache are those of the checkout that filled it.
        place = hashlib.sha256(str(Path(__file__).resolve()).encode()).hexdigest()[:16]
        env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        env |= {
            "TRITON_CACHE_DIR": str(self._folder / f"triton-{place}"),
            "PYTHONWARNINGS": "ignore",
        }
        return subprocess.Popen(
            [sys.executable, "-m", __name__, str(self._folder)],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )


@contextlib.contextmanager
def _only_one(folder: Path) -> Iterator[None]:
    """Whoever comes second waits, and then finds everything compiled."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _from_json(fields: dict[str, Any]) -> CompiledKernel:
    counts = tuple(Count(**count) for count in fields.pop("counts"))
    return CompiledKernel(**{**fields, "tensor_ops": tuple(fields["tensor_ops"])}, counts=counts)


def _key(case: CompileCase, target: str) -> str:
    """Names all that a result follows from: compilers, kernel, case, and this package's code."""
    import triton

    described = {**vars(case), "kernel": case.kernel.cache_key}
    described["work"] = [dict(vars(work)) for work in case.work]
    parts = [triton.__version__, target, repr(described)]
    here = Path(__file__).parent
    parts += [(here / f"{module}.py").read_text("utf-8") for module in _READERS]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _known_or_compiled(case: CompileCase, target: str, folder: Path) -> CompiledKernel:
    file = folder / "kernels" / f"{_key(case, target)}.json"
    with contextlib.suppress(OSError, ValueError):
        return _from_json(json.loads(file.read_text("utf-8")))
    result = compile_case(case, target)
    if result.error is None and result.uncounted is None:
        file.parent.mkdir(parents=True, exist_ok=True)
        new = file.with_suffix(f".{os.getpid()}")
        new.write_text(json.dumps(asdict(result)), "utf-8")
        new.replace(file)
    return result


def main() -> None:
    """Answers requests until there are no more."""
    folder = Path(sys.argv[1])
    answers, sys.stdout = sys.stdout, sys.stderr  # Triton prints what a compiler says
    cases: dict[str, list[CompileCase]] = {}
    for line in sys.stdin:
        target, number = json.loads(line)
        if target not in cases:
            cases[target] = list(all_cases(TARGETS[target]))
        result = _known_or_compiled(cases[target][number], target, folder)
        print(json.dumps(asdict(result)), file=answers, flush=True)


if __name__ == "__main__":
    main()
