"""bench/device_check.sh: a dry run, and how the summary judges what steps left behind."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.once

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "bench" / "device_check.sh"
STEPS = ["facts", "oracles", "repeats", "targets", "tests", "benches", "sanitizer"]


def test_dry_run_passes_every_step_and_judges_no_target(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHON": sys.executable}
    command = ["bash", str(SCRIPT), "results", "--dry-run"]  # a folder where it is called from
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "results" / "summary.json").read_text())
    results = {step["step"]: step["result"] for step in summary["steps"]}
    assert list(results) == STEPS
    assert results.pop("sanitizer") == "left out"
    assert set(results.values()) == {"ok"}
    assert summary["facts"]["interpreter"] is True
    assert [row["met"] for row in summary["targets"]] == [None] * 4
    assert done.stdout.strip().endswith("all passed")


def test_steps_take_eight_minutes_together_at_most() -> None:
    limits = re.findall(r"^step (\w+) (\d+) ", SCRIPT.read_text(), flags=re.MULTILINE)
    assert [name for name, _ in limits] == STEPS
    assert sum(int(seconds) for _, seconds in limits) <= 475  # the summary takes some, too


def summarise(folder: Path, steps: dict[str, int]) -> subprocess.CompletedProcess:
    lines = [f"{name}\t60\t{code}\t3\n" for name, code in steps.items()]
    (folder / "steps.tsv").write_text("".join(lines))
    for name in steps:
        (folder / f"{name}.log").write_text("first line\nlast line\n")
    command = [sys.executable, str(ROOT / "bench" / "device_summary.py"), str(folder)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.parametrize(
    "codes, exit_code, results",
    [
        ((0, 0), 0, ["ok", "ok"]),
        ((0, 77), 0, ["ok", "left out"]),
        ((1, 0), 1, ["FAILED", "ok"]),
        ((124, 0), 1, ["too slow", "ok"]),
        ((-11, 0), 1, ["FAILED", "ok"]),
    ],
)
def test_exit_code_tells_whether_any_step_failed(
    codes: tuple[int, int], exit_code: int, results: list[str], tmp_path: Path
) -> None:
    done = summarise(tmp_path, dict(zip(("oracles", "targets"), codes, strict=True)))
    assert done.returncode == exit_code, done.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert [step["result"] for step in summary["steps"]] == results
    assert summary["passed"] is (exit_code == 0)
    assert "last line" in done.stdout


def test_summary_names_missed_targets_and_failed_checks(tmp_path: Path) -> None:
    target = {
        "name": "topk_indices",
        "measured": 25.0,
        "target": 20.0,
        "unit": "µs",
        "at_least": False,
        "detail": "",
        "met": False,
    }
    (tmp_path / "targets.json").write_text(json.dumps([target]))
    checks = [
        {"check": "a", "seconds": 1, "error": None},
        {"check": "b", "seconds": 1, "error": "x"},
    ]
    (tmp_path / "oracles.json").write_text(json.dumps(checks))
    done = summarise(tmp_path, {"oracles": 1, "targets": 1})
    assert done.returncode == 1
    assert "topk_indices: 25.0 µs, at most 20 µs: MISSED" in done.stdout
    assert "oracles: b: x" in done.stdout and "oracles: a" not in done.stdout


def test_without_a_folder_the_script_says_how_to_call_it() -> None:
    done = subprocess.run(["bash", str(SCRIPT)], capture_output=True, text=True)
    assert done.returncode == 2
    assert "bench/device_check.sh OUT [--dry-run]" in done.stderr
