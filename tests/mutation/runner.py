"""Runs the tests chosen for each mutant, few and quick ones first, until one of them fails."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from threading import local
from typing import Any

from .calls import Calls, environment_of
from .mutants import Mutant

KILLED = ("failed", "import", "crashed", "hung")
BRIEF = "quick tests alone"


@dataclass(frozen=True)
class Row:
    """Tests of a backend that run in one process."""

    backend: str
    tests: tuple[str, ...]
    examples: int
    cpu_limit: int  # seconds a test
    warm: bool = False


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant: "survived", or how it was killed and by which test."""

    how: str
    by: str = ""
    why: str = ""
    backend: str = ""
    examples: int = 0
    seconds: float = 0.0
    commit: str = ""  # at which it was judged, if not in this clone

    @property
    def killed(self) -> bool:
        return self.how in KILLED

    @property
    def brief(self) -> bool:
        """Whether only the quick tests have run."""
        return self.why == BRIEF


#: (backend, seconds of tests, examples a property) of each row, as the map has seconds.
QUICK = {"cpu": (3.0, 6), "interpreter": (3.0, 5)}
LONG = {"cpu": (10.0, 16), "interpreter": (15.0, 8)}
#: Bytes that a mutant may hold: a mutated size must not take the machine's memory.
MEMORY = 4 * 2**30
#: Examples a property when the map was made.
MAPPED = 4


class Runner:
    """Judges mutants of the tree at `root`; one thread has one process for each backend."""

    def __init__(self, root: Path, calls: Calls, patience: float) -> None:
        self.root, self.calls, self.patience = root, calls, patience
        #: Tests of the map that are gone: (backend, test).
        self.missing: set[tuple[str, str]] = set()
        self._own = local()
        self._kills: Counter[tuple[str, int]] = Counter()
        self._processes: list[subprocess.Popen[str]] = []

    def judge(self, mutant: Mutant, quick: bool = True, long: bool = True) -> Verdict:
        """Runs its rows, the quick one and the long ones, until one kills it."""
        old = (self.root / mutant.file).read_text()
        texts = {"file": mutant.file, "old": old, "source": mutant.source(old)}
        seconds, ran = 0.0, 0
        for row in self._rows(mutant, quick, long):
            answer = self._ask_for_what_exists(row, texts)
            seconds, ran = seconds + answer["seconds"], ran + answer["ran"]
            how, by = answer["verdict"], answer["by"]
            if how in KILLED:
                self._remember(mutant, row.backend, by)
                return Verdict(how, by, answer["why"], row.backend, row.examples, seconds)
        why = "" if long else BRIEF
        return Verdict("survived", why=why if ran else "no test runs it", seconds=seconds)

    def innocent(self, verdicts: Collection[Verdict]) -> set[tuple[str, str]]:
        """Of the tests that killed, (backend, test) of those that fail without any mutant too."""
        guilty = set()
        for row in self._rows_of_killers(verdicts):
            answer = self._ask_for_what_exists(row, {"file": ""}, whole=True)
            guilty |= {(row.backend, test) for test in answer["failed"]}
            if answer["verdict"] not in ("passed", "failed"):
                raise RuntimeError(f"{answer['verdict']}: {answer['output']}")
        return guilty

    def _rows_of_killers(self, verdicts: Collection[Verdict]) -> Iterator[Row]:
        """All that killed, with as many examples, in a warm worker and in a fresh one."""
        kinds = sorted({(v.backend, v.examples) for v in verdicts if "/" in v.by})
        for backend, examples in kinds:
            mine = [v for v in verdicts if (v.backend, v.examples) == (backend, examples)]
            tests = sorted({v.by for v in mine if "/" in v.by})
            for i in range(0, len(tests), 100):
                for warm in (True, False):
                    yield Row(backend, tuple(tests[i : i + 100]), examples, 3000, warm)

    def _ask_for_what_exists(
        self, row: Row, texts: dict[str, str], whole: bool = False
    ) -> dict[str, Any]:
        """Leaves out tests that are gone since the map was made; pytest runs none otherwise."""
        while True:
            tests = tuple(t for t in row.tests if (row.backend, t) not in self.missing)
            if not tests:
                return {"verdict": "passed", "ran": 0, "seconds": 0.0, "by": "", "failed": []}
            answer = self.ask(replace(row, tests=tests), texts, whole)
            if answer["verdict"] == "unpatched":
                answer = self.ask(replace(row, tests=tests, warm=False), texts, whole)
            if answer["verdict"] != "nothing ran":
                return answer
            names = re.findall(r"not found: .*(tests/\S+)", answer["output"])
            gone = {t for t in tests if t in names or t.partition("[")[0] in names}
            if not gone:
                raise RuntimeError(f"{texts['file']}: {answer}")
            self.missing |= {(row.backend, test) for test in gone}

    def ask(self, row: Row, texts: dict[str, str], whole: bool) -> dict[str, Any]:
        """Has a process run a row, with `texts["source"]` in the place of `texts["file"]`."""
        process = self._process(row.backend, "warm" if row.warm else "fresh")
        request: dict[str, Any] = {**texts, "whole": whole, "tests": row.tests}
        request |= {"examples": row.examples, "cpu_limit": row.cpu_limit, "memory": MEMORY}
        assert process.stdin and process.stdout
        print(json.dumps(request), file=process.stdin, flush=True)
        return json.loads(process.stdout.readline())

    def close(self) -> None:
        for process in self._processes:
            process.kill()

    def _rows(self, mutant: Mutant, quick: bool, long: bool) -> Iterator[Row]:
        ids = self.calls.of(mutant)
        backends = [b for b in QUICK if any(self.calls.tests[i][0] == b for i in ids)]
        if not mutant.file.startswith("kernels/"):  # runs the same lines on both
            backends = backends[:1]
        warm = self.calls.has_callers(mutant)
        plan = [(b, *QUICK[b], warm) for b in backends[:1]] if quick else []
        if long:
            plan += [(b, self.patience * LONG[b][0], LONG[b][1], False) for b in backends]
        for backend, budget, examples, warm in plan:
            mine = [i for i in ids if self.calls.tests[i][0] == backend]
            chosen, seconds = [], 0.0
            if examples == QUICK[backend][1]:
                mine.sort(key=lambda i: self._price(mutant, i))
            for i in mine:
                if not chosen or seconds + self.calls.tests[i][2] <= budget:
                    chosen.append(i)
                    seconds += self.calls.tests[i][2]
            if chosen:
                tests = tuple(self.calls.tests[i][1] for i in chosen)
                slowest = max(self.calls.tests[i][2] for i in chosen)
                limit = int(3 + 3 * slowest * examples / MAPPED)
                yield Row(backend, tests, examples, limit, warm)

    def _price(self, mutant: Mutant, i: int) -> float:
        """Seconds a kill, as far as one can tell: little for what has killed its neighbours."""
        _, test, seconds = self.calls.tests[i]
        own = test.startswith(f"tests/test_{Path(mutant.file).stem}")
        killer = i in self.calls.killers(mutant)
        return (seconds + 0.02) / (1 + 4 * own + 3 * self._kills[mutant.file, i] + 50 * killer)

    def _remember(self, mutant: Mutant, backend: str, by: str) -> None:
        for i in self.calls.of(mutant):
            if self.calls.tests[i][:2] in ((backend, by), (backend, by.partition("[")[0])):
                self._kills[mutant.file, i] += 1

    def _process(self, *kind: str) -> subprocess.Popen[str]:
        mine = self._own.__dict__.setdefault("processes", {})
        if kind not in mine or mine[kind].poll() is not None:
            mine[kind] = _start(self.root, *kind)
            self._processes.append(mine[kind])
        return mine[kind]


def _start(root: Path, backend: str, kind: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "mutation.worker", kind],
        cwd=root,
        env=environment_of(root, backend),
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdout and json.loads(process.stdout.readline())["ready"]
    return process


def run_all(
    judge: Callable[[Mutant], Verdict],
    mutants: list[Mutant],
    jobs: int,
    done: Callable[[Mutant, Verdict], None],
) -> None:
    """Judges mutants in their order, `jobs` at a time, and hands each verdict to `done`."""
    with ThreadPoolExecutor(jobs) as pool:
        left, running = iter(mutants), {}
        while True:
            while len(running) < jobs and (mutant := next(left, None)):
                running[pool.submit(judge, mutant)] = mutant
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                done(running.pop(future), future.result())
