"""The soak: seeds repeat themselves, failures are kept, and it ends when it should."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from soak import property_files

pytestmark = pytest.mark.once

SOAK = Path(__file__).with_name("soak.py")
PLANTED = """
import time
import hypothesis

@hypothesis.given(hypothesis.strategies.integers(0, 10**6))
def test_drawn(x):
    open({drawn!r}, "a").write(f"{{x}} ")
    {body}

def test_that_draws_nothing():
    raise AssertionError("left out")
"""
PROFILE = 'import hypothesis\nhypothesis.settings.register_profile("soak", deadline=None)\n'


class Soak:
    """Soaks one file with one property, whose body ends in `body`."""

    def __init__(self, folder: Path, body: str) -> None:
        self.folder, self.drawn = folder, folder / "drawn"
        self.file = folder / "test_planted.py"
        self.file.write_text(PLANTED.format(drawn=str(self.drawn), body=body))
        (folder / "conftest.py").write_text(PROFILE)

    def __call__(self, *options: str) -> tuple[subprocess.CompletedProcess, list[str]]:
        """The finished process, and what the property has drawn."""
        self.drawn.write_text("")
        where = ["--folder", str(self.folder / "kept"), "--backend", "cpu", str(self.file)]
        command = [sys.executable, str(SOAK), "--examples", "20", *options, *where]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        return done, self.drawn.read_text().split()


def test_every_round_has_a_seed_that_repeats_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CI", "true")  # hypothesis knows it, and repeats itself there
    soak = Soak(tmp_path, "pass")
    both, drawn = soak("--seed", "4", "--rounds", "2")
    assert both.returncode == 0, both.stdout
    assert "2 runs, 0 failed" in both.stdout
    (_, first), (_, second) = (soak("--seed", s, "--rounds", "1") for s in ("4", "5"))
    assert drawn == [*first, *second]
    assert first != second


def test_failure_is_kept_with_the_command_that_repeats_it(tmp_path: Path) -> None:
    done, _ = Soak(tmp_path, "assert x < 0")("--rounds", "1")
    assert done.returncode == 1, done.stdout
    assert "1 runs, 1 failed" in done.stdout
    (kept,) = (tmp_path / "kept").iterdir()
    assert "x=0" in kept.read_text()
    assert str(kept) in done.stdout
    (again,) = (line for line in done.stdout.splitlines() if "again:" in line)
    repeated = subprocess.run(
        shlex.split(again.partition("again:")[2]), capture_output=True, text=True, timeout=120
    )
    assert repeated.returncode == 1, repeated.stdout


def test_it_ends_in_the_middle_of_a_property_when_its_time_is_over(tmp_path: Path) -> None:
    done, drawn = Soak(tmp_path, "time.sleep(1)")("--minutes", "0.1")
    assert done.returncode == 0, done.stdout
    assert "stopped" in done.stdout
    assert len(drawn) < 20


def test_all_files_with_properties_are_soaked() -> None:
    names = {Path(file).name for file in property_files()}
    assert {"test_topk.py", "test_compact.py", "test_state_machine.py"} <= names
    assert "test_layout.py" not in names
