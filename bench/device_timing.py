"""Time of a call by replays of a CUDA graph; what memory and matrix units of this device reach."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

GIB = 2**30


def seconds_a_call(
    call: Callable[[Any], object], sets: Sequence[Any], device: torch.device, budget: float = 1.0
) -> float:
    """Median seconds of `call(inputs)`, over several sets of inputs in turn.

    On a GPU the sets are captured into one graph, so that no launch is waited for; they should
    exceed the L2 cache together. At least 5 replays, at most `budget` seconds of them.
    """
    for inputs in sets:
        call(inputs)
    if device.type != "cuda":
        return min(_wall_seconds(lambda: call(sets[0])) for _ in range(2))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call(sets[0])
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for inputs in sets:
            call(inputs)
    graph.replay()
    torch.cuda.synchronize()
    once = max(_wall_seconds(lambda: (graph.replay(), torch.cuda.synchronize())), 1e-6)
    times = []
    for _ in range(int(min(max(5, budget / once), 200))):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in "se")
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / len(sets))
    return statistics.median(times)


def _wall_seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def cold_sets(make: Callable[[int], Any], bytes_each: int, device: torch.device) -> list[Any]:
    """`make(seed)` as often as twice the L2 cache takes, 16 times at most."""
    if device.type != "cuda":
        return [make(0)]
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return [make(seed) for seed in range(min(16, 2 + 2 * cache // bytes_each))]


def copy_bandwidth(device: torch.device, size: int = 4 * GIB) -> float:
    """Bytes a second that a copy of `size` bytes moves, reads and writes together."""
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / seconds_a_call(target.copy_, [source], device)


def matrix_rate(dtype: torch.dtype, device: torch.device, size: int = 8192) -> float:
    """Operations a second of a square matrix product, multiplications and additions together."""
    # normal values: zeros would take less power, and run at a higher clock
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in "ab")
    if dtype == torch.float8_e4m3fn:
        one = torch.ones((), device=device)

        def product(_: object) -> torch.Tensor:
            return torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16)

    else:

        def product(_: object) -> torch.Tensor:
            return a @ b.t()

    return 2 * size**3 / seconds_a_call(product, [None], device)
