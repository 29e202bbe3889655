"""What the steps of `device_check.sh` share: arguments, and checks of which all are run.

Importing it makes `lightning_indexer.kernels` importable on a machine without einops, which only
the indexer layer needs: import it before any module of the package.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
import traceback
import types
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
#: A step's exit code when this machine lacks what it needs.
LEFT_OUT = 77

Check = tuple[str, Callable[[], None]]


def _without_einops() -> None:
    package = types.ModuleType("lightning_indexer")
    package.__path__ = [str(ROOT / "src" / "lightning_indexer")]
    sys.modules.setdefault("lightning_indexer", package)


if importlib.util.find_spec("einops") is None:
    _without_einops()


def parse_arguments(description: str | None) -> argparse.Namespace:
    """The arguments of every step: `out`, `device`, `small`."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for results")
    parser.add_argument("--device", type=torch.device, required=True)
    parser.add_argument("--small", action="store_true", help="tiny shapes, for a dry run")
    return parser.parse_args()


def missing(*modules: str) -> list[str]:
    """Those of the modules that are not installed."""
    return [name for name in modules if importlib.util.find_spec(name) is None]


def write_json(folder: Path, name: str, value: Any) -> None:
    """Writes `folder/name.json`."""
    (folder / f"{name}.json").write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def run_checks(checks: Iterable[Check], folder: Path, name: str) -> int:
    """Runs every check, writes what each came to, and returns the exit code of the step."""
    rows = []
    for label, check in checks:
        started = time.perf_counter()
        error = None
        try:
            check()
        except Exception as failure:  # whatever a check raises is its result
            error = f"{type(failure).__name__}: {failure}"[:500]
            traceback.print_exc()
        seconds = round(time.perf_counter() - started, 3)
        print(f"{'FAILED' if error else 'ok':6} {seconds:8.2f} s  {label}", flush=True)
        rows.append({"check": label, "seconds": seconds, "error": error})
        write_json(folder, name, rows)  # a time limit may end the step at any moment
    failed = sum(row["error"] is not None for row in rows)
    print(f"{len(rows) - failed} of {len(rows)} checks passed")
    return int(failed > 0 or not rows)
