"""The benches of this folder, one after another, each with its rows in OUT/NAME.json."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from device_step import LEFT_OUT, missing, parse_arguments

FOLDER = Path(__file__).parent
SECONDS = 18  # for one bench: what it has measured until then is in its file


def main() -> int:
    arguments = parse_arguments(__doc__)
    absent = missing("rich", "einops")
    if absent:
        print(f"left out: {' and '.join(absent)} not installed")
        return LEFT_OUT
    names = sorted(path.stem for path in FOLDER.glob("bench_*.py"))
    # interpreted kernels say nothing about time: a dry run takes the PyTorch paths
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    failed = []
    for name in names[:1] if arguments.small else names:
        results = arguments.out / f"{name}.json"
        results.unlink(missing_ok=True)
        command = [sys.executable, str(FOLDER / f"{name}.py"), "--json", str(results)]
        command += ["--device", str(arguments.device), *(["--quick"] if arguments.small else [])]
        try:
            code = subprocess.run(command, env=environment, timeout=SECONDS).returncode
        except subprocess.TimeoutExpired:
            print(f"{name}: cut off after {SECONDS} s", flush=True)
            continue
        print(f"{name}: exit code {code}", flush=True)
        failed += [name] if code else []
    if failed:
        print(f"failed: {', '.join(failed)}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
