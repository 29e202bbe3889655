"""Which tests are run against a mutant: those that were seen to run its statement, cheapest first.

`calls.json` is written by `python -m mutation --map`: every test runs once under a trace. A place
is a statement, named by its function and the lines from there, so that changes elsewhere in a file
leave it valid; where a function has changed, the tests that call it are taken. `killers.json` says
which tests have killed mutants of a statement: a full run writes it, and they come first.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from .mutants import Mutant, files
from .places import Places

BACKENDS = ("cpu", "interpreter")
FILE = Path(__file__).with_name("calls.json")
KILLERS = Path(__file__).with_name("killers.json")
#: Tests listed for a statement that killed its mutants, those that killed most first.
MOST_KILLERS = 12
#: Not mapped: they start processes, which see no mutant, run for long, or test other folders.
LEFT_OUT = (
    "cli cli_build_kernels cli_check_sharing compile_report compiled_draft compiled_figures count"
    " device_check identical_texts layout lossless mutation offline_compile on_gpu packaging readme"
    " sins soak tinylm tinylm_training testing_canary testing_cases testing_judges testing_plugin"
    " testing_regimes testing_relations"
)
#: Tests of one name are one entry if all of them together take less than this many seconds.
TOGETHER = 1.0
#: Seconds of tests listed for a statement on a backend, and how many of them.
ENOUGH, MOST = 25.0, 25


@dataclass(frozen=True)
class Calls:
    """`tests[i]` is (backend, node id, seconds); `by_place["file::name+3"]` lists indices.

    So does `by_killed`, of those that are known to kill.
    """

    tests: list[Test]
    by_place: dict[str, list[int]]
    by_killed: dict[str, list[int]]
    root: Path

    def of(self, mutant: Mutant) -> list[int]:
        """The tests against a mutant, the most telling ones first."""
        found = self._callers(mutant)
        if not found:  # runs when the module is imported, or so rarely that no test was seen to
            found = self._of_files({mutant.file}) or self._of_files(self._importers(mutant.file))
        return list(dict.fromkeys([*self.killers(mutant), *found]))

    def killers(self, mutant: Mutant) -> list[int]:
        """The tests that have killed mutants of its statement."""
        return self.by_killed.get(self.place(mutant), [])

    def place(self, mutant: Mutant) -> str:
        """Of its statement; "file::" where it runs when the module is imported."""
        return f"{mutant.file}::{self._places[mutant.file].of_mutant(mutant.start)}"

    def seconds(self, backend: str, test: str) -> float | None:
        """What a test took, or all tests of its function; None if it is not in the map."""
        return next(
            (
                self._seconds[backend, name]
                for name in (test, test.partition("[")[0])
                if (backend, name) in self._seconds
            ),
            None,
        )

    def has_callers(self, mutant: Mutant) -> bool:
        """Whether tests were seen to call its function, which may run at import alone."""
        return bool(self._callers(mutant))

    def _callers(self, mutant: Mutant) -> list[int]:
        key = self.place(mutant)
        if key in self.by_place or key.endswith("::"):
            return self.by_place.get(key, [])
        return self._by_function.get(key.partition("+")[0], [])

    def _of_files(self, names: set[str]) -> list[int]:
        rows = [ids for key, ids in self._by_function.items() if key.split("::")[0] in names]
        return list(dict.fromkeys(i for ids in rows for i in ids))

    def _importers(self, file: str) -> set[str]:
        pattern = re.compile(rf"^\s*from [.\w]*\b{Path(file).stem} import", re.MULTILINE)
        return {name for name in files(self.root) if pattern.search((self.root / name).read_text())}

    @cached_property
    def _by_function(self) -> dict[str, list[int]]:
        found: dict[str, dict[int, None]] = {}
        for key, ids in self.by_place.items():
            found.setdefault(key.partition("+")[0], {}).update(dict.fromkeys(ids))
        return {function: list(ids) for function, ids in found.items()}

    @cached_property
    def _seconds(self) -> dict[tuple[str, str], float]:
        return {(backend, test): seconds for backend, test, seconds in self.tests}

    @cached_property
    def _places(self) -> dict[str, Places]:
        return {name: Places((self.root / name).read_text()) for name in files(self.root)}


def read_calls(root: Path) -> Calls:
    data = json.loads(FILE.read_text())
    groups = data["groups"]
    by_place = {key: groups[group] for key, group in data["places"].items()}
    tests: list[Test] = [tuple(test) for test in data["tests"]]
    number = {test[:2]: i for i, test in enumerate(tests)}
    by_killed: dict[str, list[int]] = defaultdict(list)
    for key, killers in json.loads(KILLERS.read_text()).items():
        for backend, test, seconds in killers:
            if (backend, test) not in number:
                number[backend, test] = len(tests)
                tests.append((backend, test, seconds))
            by_killed[key].append(number[backend, test])
    return Calls(tests, by_place, dict(by_killed), root)


def write_killers(
    calls: Calls,
    kills: Iterable[tuple[Mutant, str, str, float]],
    kept: Collection[str] = (),
) -> None:
    """Writes which tests killed: (mutant, backend, test, seconds that it took at most).

    Of the files in `kept`, what is known already stays.
    """
    counts: dict[str, Counter[tuple[str, str]]] = defaultdict(Counter)
    took: dict[tuple[str, str], float] = {}
    for mutant, backend, test, seconds in kills:
        counts[calls.place(mutant)][backend, test] += 1
        usual = calls.seconds(backend, test)
        took[backend, test] = round(seconds if usual is None else usual, 2)
    known = json.loads(KILLERS.read_text()) if kept else {}
    killers = {key: tests for key, tests in known.items() if key.partition("::")[0] in kept}
    for key, tests in counts.items():
        best = sorted(tests, key=lambda test: (-tests[test], took[test], test))[:MOST_KILLERS]
        killers[key] = [[*test, took[test]] for test in best]
    rows = [
        f"{json.dumps(key)}: {json.dumps(tests, ensure_ascii=False)}"
        for key, tests in sorted(killers.items())
    ]
    KILLERS.write_text("{\n" + ",\n".join(rows) + "\n}\n")


#: Backend, node id, seconds.
Test = tuple[str, str, float]
#: The same, and the places that it runs.
Seen = tuple[str, str, float, set[str]]
#: The statements of a function that a test runs.
Run = frozenset[str]


def write_calls(seen: Iterable[Seen]) -> None:
    """Writes what was seen of each test."""
    by_name = defaultdict(list)
    for backend, test, seconds, run in seen:
        by_name[backend, test.partition("[")[0]].append((test, seconds, run))
    tests: list[Test] = []
    by_place: dict[str, list[int]] = defaultdict(list)
    for (backend, name), members in sorted(by_name.items()):
        for test, seconds, run in _together(name, members):
            for key in run:
                by_place[key].append(len(tests))
            tests.append((backend, test, round(seconds, 2)))
    paths = _paths(by_place)
    chosen = {}
    for key, ids in sorted(by_place.items()):
        own = f"tests/test_{Path(key.split('::')[0]).stem}.py"
        chosen[key] = _enough(ids, tests, own, paths[key.partition("+")[0]])
    _write(tests, chosen)


def _write(tests: list[Test], by_place: dict[str, list[int]]) -> None:
    used = sorted({i for ids in by_place.values() for i in ids})
    number = {i: n for n, i in enumerate(used)}
    groups: dict[str, int] = {}
    rows = []
    for key, ids in by_place.items():
        group = json.dumps([number[i] for i in ids], separators=(",", ":"))
        rows.append(f"{json.dumps(key)}: {groups.setdefault(group, len(groups))}")
    parts = ['{"tests": [', ",\n".join(json.dumps(tests[i]) for i in used)]
    parts += ['],\n"groups": [', ",\n".join(groups), '],\n"places": {', ",\n".join(rows), "}}\n"]
    FILE.write_text("\n".join(parts))


_Member = tuple[str, float, set[str]]


def _together(name: str, members: list[_Member]) -> list[_Member]:
    seconds = sum(member[1] for member in members)
    if seconds > TOGETHER and len(members) > 1:
        return members
    return [(name, seconds, set().union(*(member[2] for member in members)))]


def _enough(ids: list[int], tests: list[Test], own: str, paths: dict[int, Run]) -> list[int]:
    """At most MOST tests and ENOUGH seconds a backend, the most telling ones first.

    Those are the cheapest of every path through the function, then the second of each, and so on;
    `own` begins the names of tests that are named after the module, which come before others.
    """
    kept = []
    for backend in BACKENDS:
        mine = [i for i in ids if tests[i][0] == backend]
        mine.sort(key=lambda i: (not tests[i][1].startswith(own), tests[i][2]))
        seen: Counter[Run] = Counter()
        turns = []
        for i in mine:
            turns.append((seen[paths[i]], i))
            seen[paths[i]] += 1
        seconds, count = 0.0, 0
        for _, i in sorted(turns, key=lambda turn: turn[0]):
            if count < MOST and (seconds + tests[i][2] <= ENOUGH or not count):
                seconds, count = seconds + tests[i][2], count + 1
                kept.append(i)
    return kept


def _paths(by_place: dict[str, list[int]]) -> dict[str, dict[int, Run]]:
    """The statements of each function that a test runs."""
    found: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for key, ids in by_place.items():
        for i in ids:
            found[key.partition("+")[0]][i].add(key)
    return {
        function: {i: frozenset(keys) for i, keys in tests.items()}
        for function, tests in found.items()
    }


def make_map(root: Path, test_files: list[str]) -> int:
    """Runs tests on both backends under the plugin `mutation.probe`; returns an exit code.

    With `test_files` (else all) what is known of others is kept.
    """
    seen = [row for row in _known(root) if test_files and _file(row[1]) not in test_files]
    places = {name: Places((root / name).read_text()) for name in files(root)}
    with tempfile.TemporaryDirectory() as folder:
        for backend in BACKENDS:
            path = Path(folder, backend)
            path.touch()
            command = [sys.executable, "-m", "pytest", "-q", "-p", "mutation.probe"]
            command += ["-p", "no:cacheprovider"]
            environment = environment_of(root, backend) | {"MUTATION_PROBE": str(path)}
            ignored = [f"--ignore=tests/test_{name}.py" for name in LEFT_OUT.split()]
            chosen = test_files or ["tests", "--ignore=tests/clients", *ignored]
            subprocess.run([*command, *chosen], cwd=root, env=environment)
            for line in path.read_text().splitlines():
                test, seconds, passed, lines = json.loads(line)
                if passed:
                    run = {(file, places[file].of_line(number)) for file, number in lines}
                    keys = {f"{file}::{place}" for file, place in run if place}
                    seen.append((backend, test, seconds, keys))
    write_calls(seen)
    return 0


def _known(root: Path) -> list[Seen]:
    calls = read_calls(root)
    run: list[set[str]] = [set() for _ in calls.tests]
    for key, ids in calls.by_place.items():
        for i in ids:
            run[i].add(key)
    return [(*test, keys) for test, keys in zip(calls.tests, run, strict=True)]


def _file(test: str) -> str:
    return test.partition("::")[0]


def environment_of(root: Path, backend: str) -> dict[str, str]:
    """The environment in which the tests of the tree at `root` run on a backend."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(root / "src"), str(root / "tests")]),
        "HYPOTHESIS_PROFILE": "dev",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    environment.pop("TRITON_INTERPRET", None)
    if backend == "interpreter":
        environment["TRITON_INTERPRET"] = "1"
    return environment
