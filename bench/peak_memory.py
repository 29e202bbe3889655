"""The memory a call takes at its peak, its result included, beyond its inputs."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def peak_bytes(
    call: Callable[[Any], object], make: Callable[[int, torch.device], Any], device: torch.device
) -> int | None:
    """Bytes `call(make(0, device))` adds at its peak; None where this system does not say.

    On a GPU, what torch's allocator hands out. On a CPU, how far the resident set of a fresh
    process rises above what it is with the inputs made: memory that libraries load and keep on a
    first call counts too. Both functions must be picklable, and the threads are this process's.
    """
    if device.type == "cuda":
        return _on_gpu(call, make(0, device), device)
    if not _CLEAR.exists():
        return None
    # not fork: the child would share the parent's pages, and the heap it has already grown
    with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_in_this_process, call, make, torch.get_num_threads()).result()


def _on_gpu(call: Callable[[Any], object], inputs: Any, device: torch.device) -> int:
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call(inputs)
    return torch.cuda.max_memory_allocated(device) - before


def _in_this_process(
    call: Callable[[Any], object], make: Callable[[int, torch.device], Any], threads: int
) -> int:
    torch.set_num_threads(threads)
    inputs = make(0, torch.device("cpu"))
    _CLEAR.write_text("5")  # the high-water mark falls to what is resident now
    before = _high_water()
    call(inputs)
    return _high_water() - before


def _high_water() -> int:
    fields = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines())
    return int(fields["VmHWM"].split()[0]) * 1024
