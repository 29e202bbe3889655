"""What the stages counted, as one document: examples by op and regime, figures by kind."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from collections import defaultdict
from importlib.metadata import version
from typing import Any

from counting import FIGURES

from .plan import BACKENDS, ROOT

Result = dict[str, Any]


def describe(plan: str) -> Result:
    """What was verified, when and where."""
    return {
        "plan": plan,
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "triton", "hypothesis")},
    }


def _commit() -> str:
    """Its name, "-dirty" behind it if the tree has changes."""
    command = ["git", "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty"]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True)
    return done.stdout.strip() or "unknown"


def gather(passes: dict[str, Result]) -> Result:
    """The passes' counters side by side; a pass that was not run has no key.

    Returns:
        "tests": {backend: outcomes}; "examples": {op: {regime: {backend: count}}}; "figures":
        {figure: {kind: {backend: [done, right]}}}.
    """
    examples: Any = defaultdict(lambda: defaultdict(dict))
    figures: Any = defaultdict(lambda: defaultdict(dict))
    for backend, outcome in passes.items():
        counters = outcome["counters"]
        for op, regime, count in counters["examples"]:
            examples[op][regime][backend] = count
        right = {(figure, kind): count for figure, kind, count in counters["right"]}
        for figure, kind, done in counters["done"]:
            figures[figure][kind][backend] = [done, right.get((figure, kind), 0)]
    tests = {b: {k: v for k, v in p.items() if k != "counters"} for b, p in passes.items()}
    return {
        "tests": tests,
        "examples": {op: dict(examples[op]) for op in sorted(examples)},
        "figures": {f: {k: figures[f][k] for k in sorted(figures[f])} for f in FIGURES},
    }


def examples_of(result: Result, op: str | None = None, backend: str | None = None) -> int:
    """Property examples, of one op and pass or of all."""
    return sum(
        count
        for name, regimes in result["examples"].items()
        for counts in regimes.values()
        for b, count in counts.items()
        if op in (None, name) and backend in (None, b)
    )


def figure_of(result: Result, figure: str, backend: str | None = None) -> tuple[int, int]:
    """Done and right, of one pass or of all."""
    done = right = 0
    for counts in result["figures"].get(figure, {}).values():
        for b in BACKENDS:
            if b in counts and backend in (None, b):
                done, right = done + counts[b][0], right + counts[b][1]
    return done, right


def branch_share(coverage: dict[str, dict[str, int]]) -> float:
    """Of the branches of host code, those that a test takes."""
    branches = sum(row["num_branches"] for row in coverage.values())
    return sum(row["covered_branches"] for row in coverage.values()) / max(branches, 1)
