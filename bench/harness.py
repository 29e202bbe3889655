"""What the benchmarks share: timing with spread, one table, JSON lines that say where they ran.

A benchmark makes several sets of inputs and times one call per set in turn, so that on a GPU no
call finds its inputs in the L2 cache:

    bench = Bench("topk_indices", parse_arguments(__doc__))
    sets = bench.input_sets(make_inputs)
    ours = bench.time("T=64 L=64K", "ours", lambda x: topk_indices(x, 2048), sets)
    bench.time("T=64 L=64K", "torch.topk", lambda x: x.topk(2048), sets, against=ours)
    bench.finish()

`bench.race` times several calls in turn instead, round after round: what else the machine does
then meets all of them, and the ratios hold where the times do not.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
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

    @classmethod
    def of(cls, times: torch.Tensor) -> Timing:
        """Of the seconds of each call."""
        p20, median, p80 = times.quantile(torch.tensor([0.2, 0.5, 0.8])).tolist()
        return cls(median, p20, p80, len(times))


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
        self._shown: list[tuple[str, ...]] = []

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
        self._add_row(case, variant, timing, ratio, None)
        return timing

    def race(
        self,
        case: str,
        calls: Mapping[str, Callable[[Any], object]],
        sets: Sequence[Any],
        peaks: Mapping[str, int | None],
    ) -> dict[str, float]:
        """Times the calls, the first of them ours, in turn, and adds a row for each.

        Returns how many times faster ours is than each other: the median over the rounds.
        `peaks` are the bytes that each call takes at its peak.
        """
        times = measure_in_turn(list(calls.values()), sets, self.device, self._seconds)
        others = list(calls)[1:]
        ratios = {
            name: float((own / times[0]).median())
            for name, own in zip(others, times[1:], strict=True)
        }
        for name, own in zip(calls, times, strict=True):
            self._add_row(case, name, Timing.of(own), ratios.get(name), peaks[name])
        return ratios

    def _add_row(
        self, case: str, variant: str, timing: Timing, ratio: float | None, peak: int | None
    ) -> None:
        row = {"op": self.op, "case": case, "variant": variant, **asdict(timing), "ratio": ratio}
        seconds = (timing.median, timing.p20, timing.p80)
        shown = "" if ratio is None else f"{ratio:.2f}×"
        memory = "" if peak is None else f"{peak / 1e6:.0f} MB"
        self._shown.append((case, variant, *map(_readable, seconds), shown, memory))
        if self._json is not None:
            with self._json.open("a") as file:
                file.write(json.dumps(row | {"peak_bytes": peak} | self._where) + "\n")

    def finish(self) -> None:
        """Prints the table, without the columns that no row fills."""
        table = Table(title=f"{self.op} on {self._where['hardware']}")
        columns = ("case", "variant", "median", "p20", "p80", "ours is faster by", "peak memory")
        filled = [i for i in range(len(columns)) if any(row[i] for row in self._shown)]
        for i in filled:
            table.add_column(columns[i], justify="left" if i < 2 else "right")
        for row in self._shown:
            table.add_row(*(row[i] for i in filled))
        Console().print(table)


def measure(
    call: Callable[[Any], object], sets: Sequence[Any], device: torch.device, seconds: float
) -> Timing:
    """Time of `call(inputs)`: after a warm-up, at least 5 calls and about `seconds` of them."""
    return Timing.of(measure_in_turn([call], sets, device, seconds)[0])


def measure_in_turn(
    calls: Sequence[Callable[[Any], object]],
    sets: Sequence[Any],
    device: torch.device,
    seconds: float,
) -> list[torch.Tensor]:
    """Seconds of every round, call by call, in rounds of one call each: see `measure`."""
    for call in calls:
        for inputs in sets[:2]:
            call(inputs)
    started = time.perf_counter()
    for call in calls:
        call(sets[0])
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    once = max(time.perf_counter() - started, 1e-6)
    count = int(min(max(5, len(calls) * seconds / once), 1000))
    clock = _gpu_times if device.type == "cuda" else _cpu_times
    rounds = [sets[i % len(sets)] for i in range(count)]
    times = torch.tensor(clock([(call, x) for x in rounds for call in calls]))
    return list(times.view(count, len(calls)).unbind(1))


def _cpu_times(work: Sequence[tuple[Callable[[Any], object], Any]]) -> list[float]:
    times = []
    for call, x in work:
        started = time.perf_counter()
        call(x)
        times.append(time.perf_counter() - started)
    return times


def _gpu_times(work: Sequence[tuple[Callable[[Any], object], Any]]) -> list[float]:
    events = [[torch.cuda.Event(enable_timing=True) for _ in "se"] for _ in work]
    for (call, x), (start, end) in zip(work, events, strict=True):
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
