"""The table that `device_check.sh` ends with, and the same as summary.json."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

MOST_SHOWN = 20  # failed checks in the table
#: Exit codes that mean something other than a failed step.
MEANING = {0: "ok", 77: "left out", 124: "too slow", 137: "too slow"}


def read_steps(folder: Path) -> list[dict[str, Any]]:
    """A row for each step: name, time limit, exit code, seconds, and its log's last line."""
    rows = []
    for line in (folder / "steps.tsv").read_text().splitlines():
        name, limit, code, seconds = line.split("\t")
        log = (folder / f"{name}.log").read_text(errors="replace").splitlines()
        rows.append(
            {
                "step": name,
                "limit_s": int(limit),
                "exit_code": int(code),
                "seconds": int(seconds),
                "result": MEANING.get(int(code), "FAILED"),
                "last_line": log[-1] if log else "",
            }
        )
    return rows


def read_json(folder: Path, name: str) -> Any:
    """What a step wrote, or an empty list."""
    path = folder / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else []


def verdict(row: dict[str, Any]) -> str:
    """Of a target."""
    return {True: "met", False: "MISSED", None: "not judged"}[row["met"]]


def main() -> int:
    folder = Path(sys.argv[1])
    steps, targets = read_steps(folder), read_json(folder, "targets")
    failed_checks = [
        row | {"step": name}
        for name in ("oracles", "repeats")
        for row in read_json(folder, name)
        if row["error"]
    ]
    passed = all(step["exit_code"] in (0, 77) for step in steps) and bool(steps)
    print(f"{'step':10} {'result':9} {'exit':>4} {'seconds':>7} {'limit':>5}")
    for step in steps:
        print(
            f"{step['step']:10} {step['result']:9} {step['exit_code']:4} {step['seconds']:7}"
            f" {step['limit_s']:5}  {step['last_line'][:80]}"
        )
    for row in targets:
        bound = "at least" if row["at_least"] else "at most"
        print(
            f"{row['name']}: {row['measured']:.1f} {row['unit']}, {bound} {row['target']:g}"
            f" {row['unit']}: {verdict(row)} ({row['detail']})"
        )
    for row in failed_checks[:MOST_SHOWN]:
        print(f"{row['step']}: {row['check']}: {row['error'][:160]}")
    if len(failed_checks) > MOST_SHOWN:
        print(f"and {len(failed_checks) - MOST_SHOWN} failed checks more, in summary.json")
    print("all passed" if passed else "something failed")
    summary = {
        "passed": passed,
        "facts": read_json(folder, "facts"),
        "steps": steps,
        "targets": targets,
        "failed_checks": failed_checks,
    }
    (folder / "summary.json").write_text(json.dumps(summary, indent=1, ensure_ascii=False) + "\n")
    return int(not passed)


if __name__ == "__main__":
    sys.exit(main())
