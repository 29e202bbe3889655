"""The tests that need a GPU, by pytest, as far as it and hypothesis are installed."""

from __future__ import annotations

import subprocess
import sys

from device_step import LEFT_OUT, ROOT, missing, parse_arguments


def main() -> int:
    arguments = parse_arguments(__doc__)
    absent = missing("pytest", "hypothesis")
    if absent:
        print(f"left out: {' and '.join(absent)} not installed")
        return LEFT_OUT
    chosen = ["-m", "gpu"]
    if arguments.small:
        chosen = ["tests/test_reported_offsets.py", "-k", "cpu"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen]
    return subprocess.run(command, cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())
