"""The stages: each is a process of its own, and gives back what it counted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

from .plan import ROOT, Plan

Result = dict[str, Any]


class StageError(Exception):
    """A stage ended without its result."""


def run_pass(plan: Plan, backend: str, folder: Path, jobs: int) -> Result:
    """One pass of the suite: how many tests passed, names of the failed, and the counters."""
    figures, report = folder / f"{backend}.json", folder / f"{backend}.xml"
    options = (f"--figures-json={figures}", f"--junitxml={report}", *plan.tests[backend])
    output = _pytest(backend, plan.profile, jobs, options)
    if not (figures.exists() and report.exists()):
        raise StageError(f"{backend} pass: no result\n{output[-4000:]}")
    return outcomes(report) | {"counters": json.loads(figures.read_text())}


def _pytest(
    backend: str, profile: str, jobs: int, options: tuple[str, ...], **variables: str
) -> str:
    command = [sys.executable, "-m", "pytest", "-q", "-n", str(jobs), "--dist", "loadfile"]
    variables["HYPOTHESIS_PROFILE"] = profile
    if backend == "interpreter":
        variables["TRITON_INTERPRET"] = "1"
    return _run([*command, "-p", "no:cacheprovider", *options], variables)


def outcomes(report: Path) -> Result:
    """Of a JUnit report: how many tests passed and were skipped, and the names of the others."""
    cases = list(ElementTree.parse(report).iter("testcase"))
    bad = [c for c in cases if c.find("failure") is not None or c.find("error") is not None]
    skipped = sum(c.find("skipped") is not None for c in cases)
    return {
        "passed": len(cases) - len(bad) - skipped,
        "skipped": skipped,
        "failed": [f"{c.get('classname')}::{c.get('name')}" for c in bad],
    }


def measure_coverage(plan: Plan, folder: Path, jobs: int) -> Result:
    """Both backends together, by folder: statements and branches, and those run."""
    output = ""
    for backend, tests in plan.covered.items():
        options = ("--cov", "--cov-report=", *tests)
        file = str(folder / f"{backend}.cov")
        output += _pytest(backend, "few", jobs, options, COVERAGE_FILE=file)
    report = folder / "coverage.json"
    files = [str(path) for path in sorted(folder.glob("*.cov"))]
    coverage = [sys.executable, "-m", "coverage"]
    variables = {"COVERAGE_FILE": str(folder / "all.cov")}
    output += _run([*coverage, "combine", "--keep", "-q", *files], variables)
    output += _run([*coverage, "json", "-q", "-o", str(report)], variables)
    if len(files) < len(plan.covered) or not report.exists():
        raise StageError(f"coverage: no result\n{output[-4000:]}")
    return by_folder(json.loads(report.read_text())["files"])


def by_folder(files: dict[str, Any]) -> Result:
    """Sums coverage.py's summaries."""
    found: dict[str, dict[str, int]] = {}
    for name, report in files.items():
        row = found.setdefault(_folder(name), dict.fromkeys(_COUNTED, 0))
        for key in _COUNTED:
            row[key] += report["summary"][key]
    return dict(sorted(found.items()))


_COUNTED = ("num_statements", "covered_lines", "num_branches", "covered_branches")


def _folder(name: str) -> str:
    """kernels, indexer, …, testing, adapters; "" for what lies beside them."""
    parts = [p for p in Path(name).parent.parts if p not in ("src", "lightning_indexer")]
    return parts[0] if parts else ""


def commit_sins(plan: Plan, folder: Path, jobs: int) -> Result:
    """How many sins were committed and rejected, and the names of those that survived."""
    report = folder / "sins.json"
    only = ["--only", *plan.sins] if plan.sins else []
    command = [sys.executable, "-m", "sins", "--jobs", str(jobs), "--json", str(report), *only]
    output = _run(command, {})
    if not report.exists():
        raise StageError(f"sins: no result\n{output[-4000:]}")
    return read_sins(json.loads(report.read_text()))


def read_sins(found: Result) -> Result:
    """From what `python -m sins --json` writes."""
    accepted = [s["name"] for s in found["sins"] if s["verdict"] not in REJECTED]
    return {
        "committed": len(found["sins"]),
        "rejected": len(found["sins"]) - len(accepted),
        "accepted": accepted,
        "innocent_pass": found["innocent_pass"],
    }


#: Verdicts of a sin's or a mutant's tests that reject it.
REJECTED = ("failed", "crashed", "hung")


def sample_mutants(plan: Plan, seed: int, folder: Path, jobs: int) -> Result:
    """How many mutants of a seeded sample were run and killed, and the survivors."""
    report = folder / "mutants.json"
    command = [sys.executable, "-m", "mutation", "--sample", str(plan.mutants)]
    command += ["--seed", str(seed), "--jobs", str(jobs), "--json", str(report)]
    output = _run(command, {})
    if not report.exists():
        raise StageError(f"mutation: no result\n{output[-4000:]}")
    passes = "fails without any mutant" not in output
    return read_mutants(report.read_text()) | {"seed": seed, "innocent_pass": passes}


def read_mutants(report: str) -> Result:
    """From what `python -m mutation --json` writes: its first line has the sums."""
    head = json.loads(report.splitlines()[0])
    return {
        "run": head["mutants"],
        "killed": sum(head["killed"].values()),
        "killed_by": head["killed"],
        "unexplained": head["unexplained"],
        "survivors_by_reason": head["survivors_by_reason"],
    }


def timed(stage: str, seconds: dict[str, float], run: Any, *args: Any) -> Any:
    """What `run(*args)` gives; says how long it took."""
    start = time.monotonic()
    result = run(*args)
    seconds[stage] = round(time.monotonic() - start, 1)
    print(f"{seconds[stage]:6.0f} s  {stage}", file=sys.stderr, flush=True)
    return result


def _run(command: list[str], variables: dict[str, str]) -> str:
    """Runs to the end, whatever the exit code; standard output and error."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "tests"), **variables}
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    return done.stdout
