"""Commits every sin, each in a copy of the tree, and reports which tests reject it.

    PYTHONPATH=tests python -m sins [--only NAME …] [--jobs N] [--json FILE] [--markdown FILE]

Exit code 0: every sin is rejected, and the tests that reject them pass without any; else 1.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.console import Console
from rich.table import Table

from .judge import Outcome, judge, judge_innocent
from .sin import BACKENDS, Sin, read_sins

VERDICTS = {"failed": "rejected", "passed": "[bold red]SURVIVED[/]", "error": "[bold red]ERROR[/]"}


def main() -> int:
    """Runs the command line; returns its exit code."""
    args = _arguments()
    sins = [sin for sin in read_sins() if not args.only or sin.name in args.only]
    unknown = set(args.only) - {sin.name for sin in sins}
    if unknown:
        sys.exit(f"no such sin: {', '.join(sorted(unknown))}")
    console = Console()
    backends = [b for b in BACKENDS if any(sin.backend == b for sin in sins)]
    with ThreadPoolExecutor(args.jobs) as pool:
        clean = [pool.submit(judge_innocent, sins, b, args.limit * len(sins)) for b in backends]
        pending = [pool.submit(judge, sin, args.limit) for sin in sins]
        try:
            innocent = {b: run.result() for b, run in zip(backends, clean, strict=True)}
            outcomes = [
                _announced(sin, run.result()) for sin, run in zip(sins, pending, strict=True)
            ]
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    console.print(_table(sins, outcomes))
    bad = [name for name, run in innocent.items() if run.verdict != "passed"]
    for name in bad:
        console.print(f"[bold red]without any sin, tests do not pass ({name}):[/]")
        console.print(innocent[name].output[-4000:], markup=False, highlight=False)
    for sin, run in zip(sins, outcomes, strict=True):
        if not run.rejects:
            console.print(f"[bold red]{sin.name}[/]: {run.output[-2000:]}", highlight=False)
    rejected = sum(run.rejects for run in outcomes)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    console.print(
        f"{rejected} of {len(sins)} sins rejected in {used.ru_utime + used.ru_stime:.0f} s of CPU"
    )
    rows = [_row(sin, run) for sin, run in zip(sins, outcomes, strict=True)]
    if args.json:
        args.json.write_text(json.dumps({"innocent_pass": not bad, "sins": rows}, indent=1) + "\n")
    if args.markdown:
        args.markdown.write_text(_markdown(rows))
    return int(bool(bad) or rejected < len(sins))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m sins", description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these sins alone")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time (default 1)")
    parser.add_argument("--limit", type=float, default=240, help="seconds a sin (default 240)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write them as a table")
    return parser.parse_args()


def _announced(sin: Sin, run: Outcome) -> Outcome:
    print(f"{run.seconds:5.0f} s  {run.verdict:8}{sin.name}", file=sys.stderr, flush=True)
    return run


def _table(sins: list[Sin], outcomes: list[Outcome]) -> Table:
    table = Table("backend", "verdict", "s", title="Sins")
    table.add_column("sin", overflow="fold")
    table.add_column("by", overflow="fold")
    for sin, run in zip(sins, outcomes, strict=True):
        verdict = VERDICTS.get(run.verdict, run.verdict)
        table.add_row(sin.backend, verdict, f"{run.seconds:.0f}", sin.name, _by(run))
    return table


def _by(run: Outcome) -> str:
    """The first test that failed, without its parameters."""
    return run.failed[0].split("[")[0].removeprefix("tests/") if run.failed else ""


def _row(sin: Sin, run: Outcome) -> dict[str, object]:
    return {
        "name": sin.name,
        "what": sin.what,
        "file": sin.file,
        "backend": sin.backend,
        "verdict": run.verdict,
        "rejected_by": _by(run),
        "why": run.why,
        "seconds": round(run.seconds, 1),
    }


def _markdown(rows: list[dict[str, object]]) -> str:
    """A table of what was committed and the first test to fail."""
    lines = ["| sin | in | on | rejected by |", "|---|---|---|---|"]
    for row in rows:
        by = f"`{row['rejected_by']}`" if row["rejected_by"] else f"{row['verdict']}"
        lines.append(f"| {row['what']} | `{row['file']}` | {row['backend']} | {by} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
