"""Runs the properties for hours, round after round under new seeds, on both backends.

    python tests/soak.py [--minutes M] [--seed S] [--examples N] [--backend B] [FILE …]

Each round takes N examples of each property. What fails is reported with the command that repeats
it, seed and all, and kept in FOLDER: its output ends in the smallest failing case, which is Python
for `@example`. Exit code 1 after M minutes if anything failed, else 0.

The file is also the pytest plugin of those runs: properties alone, N examples.
"""

from __future__ import annotations

import argparse
import os
import secrets
import signal
import subprocess
import sys
import time
from itertools import count, product
from pathlib import Path

import pytest
from hypothesis import settings

TESTS = Path(__file__).resolve().parent
BACKENDS = ("cpu", "interpreter")
#: pytest's exit codes: passed, interrupted, and no test for this backend.
PASSED, INTERRUPTED, NOTHING = 0, 2, 5
SECONDS_TO_STOP = 30


def pytest_addoption(parser: pytest.Parser) -> None:
    """What a round hands to its pytest processes, besides `--hypothesis-seed`."""
    parser.getgroup("soak").addoption("--soak-examples", type=int)


def pytest_configure(config: pytest.Config) -> None:
    """Fewer examples than the profile's at a time: all properties shall have their turn."""
    most = settings.get_profile("soak").max_examples
    examples = min(config.getoption("--soak-examples"), most)
    settings.register_profile(
        "soaking",
        max_examples=examples,
        derandomize=False,  # on a CI server hypothesis would else ignore the seed
        database=None,  # seed, case and blob are what a run leaves
        print_blob=True,
    )
    settings.load_profile("soaking")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what another seed would not change."""
    drawn = [item for item in items if _draws(item)]
    config.hook.pytest_deselected(items=[item for item in items if item not in drawn])
    items[:] = drawn


def _draws(item: pytest.Item) -> bool:
    """Whether a test is a property, or runs a state machine."""
    test = item.function  # type: ignore[attr-defined]
    if getattr(test, "is_hypothesis_test", False):
        return True
    return "run_state_machine_as_test" in test.__code__.co_names


def main() -> int:
    """Runs the command line; returns its exit code."""
    args = _arguments()
    args.folder.mkdir(parents=True, exist_ok=True)
    files = [str(f.resolve()) for f in args.files] or property_files()
    print(
        f"seed {args.seed}, {args.minutes:g} minutes, {len(files)} files; what fails: {args.folder}"
    )
    end, runs, failures = time.monotonic() + 60 * args.minutes, 0, 0
    for round_ in count():
        for file, backend in product(files, args.backends):
            left = end - time.monotonic()
            if left <= 0 or round_ == args.rounds:
                print(f"{runs} runs, {failures} failed")
                return int(failures > 0)
            failed = _run(args, file, backend, args.seed + round_, left)
            runs, failures = runs + 1, failures + failed
    raise AssertionError("count() ended")


def property_files() -> list[str]:
    """The test files that draw examples."""
    files = sorted(TESTS.glob("test_*.py"))
    return [str(f) for f in files if "from hypothesis import" in f.read_text()]


def _run(args: argparse.Namespace, file: str, backend: str, seed: int, left: float) -> bool:
    """One file's properties under a seed; whether one of them failed."""
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "-p", "soak", "-p", "no:cacheprovider"]
    command += [f"--hypothesis-seed={seed}", f"--soak-examples={args.examples}", file]
    start = time.monotonic()
    code, output = _run_for(left, command, _environment(backend))
    failed = code not in (PASSED, INTERRUPTED, NOTHING) or "\nFAILED " in output
    verdict = "FAILED" if failed else {INTERRUPTED: "stopped", NOTHING: "nothing"}.get(code, "ok")
    if verdict != "nothing":
        seconds = time.monotonic() - start
        print(
            f"{verdict:8}{backend:12}{Path(file).name:34}{seconds:6.0f} s  seed {seed}", flush=True
        )
    if failed:
        log = args.folder / f"{Path(file).stem}-{backend}-{seed}.txt"
        log.write_text(output)
        again = f"--backend {backend} --seed {seed} --examples {args.examples} --rounds 1 {file}"
        print(f"  {log}\n  again: {sys.executable} {__file__} {again}", flush=True)
    return failed


def _run_for(seconds: float, command: list[str], environment: dict[str, str]) -> tuple[int, str]:
    """(exit code, output) of a command that is interrupted after so many seconds."""
    with subprocess.Popen(
        command,
        env=environment,
        text=True,
        cwd=TESTS.parent,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:
        try:
            output, _ = process.communicate(timeout=seconds)
            return process.returncode, output
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
        try:
            output, _ = process.communicate(timeout=SECONDS_TO_STOP)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
        return INTERRUPTED, output


def _environment(backend: str) -> dict[str, str]:
    names = {"HYPOTHESIS_PROFILE": "soak", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    environment = {**os.environ, **names, "PYTHONPATH": str(TESTS)}
    environment.pop("TRITON_INTERPRET", None)
    if backend == "interpreter":
        environment["TRITON_INTERPRET"] = "1"
    return environment


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60, help="how long (default 60)")
    parser.add_argument("--seed", type=int, help="of the first round (default: random)")
    parser.add_argument("--examples", type=int, default=500, help="a property and round (500)")
    parser.add_argument("--rounds", type=int, help="stop after so many (default: never)")
    parser.add_argument("--backend", choices=BACKENDS, help="this one alone")
    parser.add_argument("--folder", type=Path, default=TESTS.parent / ".hypothesis" / "soak")
    parser.add_argument("files", type=Path, nargs="*", help="test files (default: all properties)")
    args = parser.parse_args()
    args.backends = (args.backend,) if args.backend else BACKENDS
    args.seed = secrets.randbits(31) if args.seed is None else args.seed
    args.folder = args.folder.resolve()
    return args


if __name__ == "__main__":
    sys.exit(main())
