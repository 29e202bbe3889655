"""compute-sanitizer on small shapes of every op: stray accesses, and races in shared memory."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from device_step import LEFT_OUT, parse_arguments

FOLDER = Path(__file__).parent
#: Each tool, and how its reports begin.
TOOLS = {"memcheck": "========= Invalid ", "racecheck": "========= Error: Race "}
SECONDS = 37  # for one tool


def find_sanitizer() -> str | None:
    """Where compute-sanitizer is, in PATH or beside a CUDA toolkit."""
    return shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path="/usr/local/cuda/bin:/usr/local/cuda/compute-sanitizer"
    )


def main() -> int:
    arguments = parse_arguments(__doc__)
    sanitizer = find_sanitizer()
    if arguments.device.type != "cuda" or sanitizer is None:
        print("left out: no GPU" if sanitizer else "left out: no compute-sanitizer")
        return LEFT_OUT
    # a caching allocator would hide accesses between its blocks
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    found = [tool for tool in TOOLS if not passes(tool, sanitizer, arguments, environment)]
    return int(bool(found))


def passes(
    tool: str, sanitizer: str, arguments: argparse.Namespace, environment: dict[str, str]
) -> bool:
    """Whether a tool found nothing, and no check failed under it, in the time it has."""
    folder = arguments.out / tool
    folder.mkdir(exist_ok=True)
    command = [sanitizer, "--tool", tool, "--error-exitcode", "9", sys.executable]
    command += [str(FOLDER / "device_oracles.py"), "--out", str(folder)]
    command += ["--device", str(arguments.device), "--small"]
    log = folder / "log.txt"
    with log.open("w") as file:
        try:
            options = {"env": environment, "timeout": SECONDS, "stderr": subprocess.STDOUT}
            code = subprocess.run(command, stdout=file, **options).returncode
            ending = f"exit code {code}"
        except subprocess.TimeoutExpired:
            code, ending = 0, f"not finished in {SECONDS} s"
    reports = log.read_text(errors="replace").count(TOOLS[tool])
    print(f"{tool}: {ending}, {reports} reports", flush=True)
    return code == 0 and reports == 0


if __name__ == "__main__":
    sys.exit(main())
