"""What the benchmarks share: timing with spread, one table, JSON lines that say where they ran.

A benchmark makes several sets of inputs and times one call per set in turn, so that on a GPU no
call finds its inputs in the L2 cache:

    bench = Bench("topk_indices", parse_arguments(__doc__))
    sets = bench.input_sets(make_inputs)
    ours = bench.time("T=64 L=64K", "ours", lambda x: topk_indices(x, 2048), sets)
    bench.time("T=64 L=64K", "torch.topk", lambda x: x.topk(2048), sets, against=ours)
    bench.finish()
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from lightning_indexer.kernels.backend import HAS_TRITON, triton

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Timing:
    """Seconds a call: median, and the 20th and 80th percentiles."""

    median: float
    p20: float
    p80: float
    calls: int


def parse_arguments(description: str | None) -> argparse.Namespace:
    """The options of every benchmark: `device`, `json`, `quick`, `threads`."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append one JSON line a row")
    parser.add_argument("--quick", action="store_true", help="small shapes, few calls (for CI)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default 1)")
    return parser.parse_args()


class Bench:
    """The rows of one benchmark run."""

    def __init__(self, op: str, arguments: argparse.Namespace) -> None:
        self.op = op
        self.quick: bool = arguments.quick
        self.device = torch.device(arguments.device)
        self._json: Path | None = arguments.json
        self._seconds = 0.2 if self.quick else 2.0
        torch.set_num_threads(arguments.threads)
        self._where = describe(self.device)
        self._table = Table(title=f"{op} on {self._where['hardware']}")
        for column in ("case", "variant"):
            self._table.add_column(column)
        for column in ("median", "p20", "p80", "ours is faster by"):
            self._table.add_column(column, justify="right")

    def input_sets(self, make: Callable[[int], Any]) -> list[Any]:
        """`make(seed)` as often as it takes for a GPU's L2 cache to forget the first."""
        first = make(0)
        if self.device.type != "cuda":
            return [first]
        cache = torch.cuda.get_device_properties(self.device).L2_cache_size
        count = min(16, 2 + 2 * cache // max(1, _bytes(first)))
        return [first, *(make(seed) for seed in range(1, count))]

    def time(
        self,
        case: str,
        variant: str,
        call: Callable[[Any], object],
        sets: Sequence[Any],
        *,
        against: Timing | None = None,
    ) -> Timing:
        """Times `call(inputs)` over the sets in turn and adds a row.

        With `against`, our own time, the row says how much faster ours is than this variant.
        """
        timing = measure(call, sets, self.device, self._seconds)
        ratio = None if against is None else timing.median / against.median
        row = {"op": self.op, "case": case, "variant": variant, **asdict(timing), "ratio": ratio}
        seconds = (timing.median, timing.p20, timing.p80)
        shown = "" if ratio is None else f"{ratio:.2f}×"
        self._table.add_row(case, variant, *map(_readable, seconds), shown)
        if self._json is not None:
            with self._json.open("a") as file:
                file.write(json.dumps(row | self._where) + "\n")
        return timing

    def finish(self) -> None:
        """Prints the table."""
        Console().print(self._table)


def measure(
    call: Callable[[Any], object], sets: Sequence[Any], device: torch.device, seconds: float
) -> Timing:
    """Time of `call(inputs)`: after a warm-up, at least 5 calls and about `seconds` of them."""
    for inputs in sets[:2]:
        call(inputs)
    started = time.perf_counter()
    call(sets[0])
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    once = max(time.perf_counter() - started, 1e-6)
    count = int(min(max(5, seconds / once), 1000))
    clock = _gpu_times if device.type == "cuda" else _cpu_times
    times = torch.tensor(clock(call, [sets[i % len(sets)] for i in range(count)]))
    p20, median, p80 = times.quantile(torch.tensor([0.2, 0.5, 0.8])).tolist()
    return Timing(median, p20, p80, count)


def _cpu_times(call: Callable[[Any], object], inputs: Sequence[Any]) -> list[float]:
    times = []
    for x in inputs:
        started = time.perf_counter()
        call(x)
        times.append(time.perf_counter() - started)
    return times


def _gpu_times(call: Callable[[Any], object], inputs: Sequence[Any]) -> list[float]:
    events = [[torch.cuda.Event(enable_timing=True) for _ in "se"] for _ in inputs]
    for x, (start, end) in zip(inputs, events, strict=True):
        start.record()
        call(x)
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1e3 for start, end in events]


def describe(device: torch.device) -> dict[str, Any]:
    """Commit, hardware and versions, for every JSON line."""
    cpu = device.type == "cpu"
    return {
        "commit": _commit(),
        "hardware": _cpu_name() if cpu else torch.cuda.get_device_name(device),
        "threads": torch.get_num_threads() if cpu else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__ if HAS_TRITON else None,
    }


def _commit() -> str:
    """The checked-out commit, marked `-dirty` if the tree differs from it."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _bytes(inputs: Any) -> int:
    if isinstance(inputs, torch.Tensor):
        return inputs.nbytes
    if isinstance(inputs, dict):
        inputs = tuple(inputs.values())
    return sum(map(_bytes, inputs)) if isinstance(inputs, (list, tuple)) else 0


def _readable(seconds: float) -> str:
    for factor, unit in ((1.0, "s"), (1e3, "ms")):
        if seconds * factor >= 1:
            return f"{seconds * factor:.2f} {unit}"
    return f"{seconds * 1e6:.1f} µs"
