"""What this machine is: GPU, driver, versions, and which optional modules there are."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from typing import Any

import torch

from device_step import missing, parse_arguments, write_json
from lightning_indexer.kernels.backend import HAS_TRITON, INTERPRET, multiprocessors, triton

OPTIONAL = ("einops", "hypothesis", "numpy", "pytest", "rich")


def gpu_facts(device: torch.device) -> dict[str, Any]:
    """Of a GPU: its name, capability, memory, multiprocessors and cache."""
    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_bytes": properties.total_memory,
        "multiprocessors": multiprocessors(device),
        "l2_bytes": properties.L2_cache_size,
    }


def output_of(*command: str) -> str | None:
    """What a command prints, or None if there is no such command."""
    if shutil.which(command[0]) is None:
        return None
    done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    return (done.stdout or done.stderr).strip()


def main() -> int:
    arguments = parse_arguments(__doc__)
    on_gpu = arguments.device.type == "cuda"
    if on_gpu and not torch.cuda.is_available():
        print("torch finds no GPU")
        return 1
    query = "--query-gpu=name,driver_version,clocks.sm,clocks.max.sm,power.limit"
    facts = {
        "device": str(arguments.device),
        "gpu": gpu_facts(arguments.device) if on_gpu else None,
        "interpreter": INTERPRET,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__ if HAS_TRITON else None,
        "cuda": torch.version.cuda,
        "machine": platform.machine(),
        "missing": missing(*OPTIONAL),
        "commit": output_of("git", "describe", "--always", "--dirty", "--abbrev=12"),
        "nvidia_smi": output_of("nvidia-smi", query, "--format=csv"),
    }
    write_json(arguments.out, "facts", facts)
    for name, value in facts.items():
        print(f"{name}: {value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
