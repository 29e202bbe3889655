"""Runs everything that yields a reliability figure, and says whether each promise holds.

    PYTHONPATH=tests python -m verify [--quick] [--jobs N] [--seed S] [--json FILE] [--markdown]

`--markdown` writes the tables into docs/reliability.md; with `--read FILE` nothing is run, and they
are those of an earlier `--json`. Exit code 0: every promise holds; else 1, with each that does not.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from .figures import describe, gather
from .floors import misses
from .plan import FULL, QUICK, Plan
from .stages import commit_sins, measure_coverage, run_pass, sample_mutants, timed
from .table import PAGE, insert, markdown


def main() -> int:
    """Runs the command line; returns its exit code."""
    args = _arguments()
    if args.read:
        result = json.loads(args.read.read_text())
    else:
        result = verify(QUICK if args.quick else FULL, args.seed, args.jobs)
    print(markdown(result))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    if args.markdown:
        PAGE.write_text(insert(PAGE.read_text(), markdown(result)))
    missed = misses(result)
    for sentence in missed:
        print(f"BROKEN: {sentence}")
    print(f"{len(missed)} promises broken" if missed else "every promise holds")
    return int(bool(missed))


def verify(plan: Plan, seed: int, jobs: int) -> dict[str, Any]:
    """Runs all stages of the plan."""
    result, seconds = describe(plan.name), {}
    with tempfile.TemporaryDirectory(prefix="verify-") as name:
        folder = Path(name)
        passes = {
            backend: timed(f"{backend} pass", seconds, run_pass, plan, backend, folder, jobs)
            for backend in plan.tests
        }
        result |= gather(passes)
        if plan.covered:
            result["coverage"] = timed("coverage", seconds, measure_coverage, plan, folder, jobs)
        result["sins"] = timed("sins", seconds, commit_sins, plan, folder, jobs)
        result["mutation"] = timed("mutants", seconds, sample_mutants, plan, seed, folder, jobs)
    return result | {"seconds": seconds}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m verify", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a part of it: five minutes")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time (default 2)")
    parser.add_argument("--seed", type=int, default=0, help="of the sample of mutants (default 0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--markdown", action="store_true", help="write the tables into docs/")
    parser.add_argument("--read", type=Path, metavar="FILE", help="run nothing: figures of --json")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
