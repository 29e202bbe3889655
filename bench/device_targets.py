"""The four figures that have targets on an H200, with CUDA graphs and inputs that L2 has forgotten.

Scoring is stated as a share of what a copy, and a matrix product of the same dtype, reach on this
very device.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch

from device_step import parse_arguments, write_json
from device_timing import cold_sets, copy_bandwidth, matrix_rate, seconds_a_call
from lightning_indexer.kernels.mqa_logits import mqa_logits
from lightning_indexer.kernels.paged_mqa_logits import paged_mqa_logits
from lightning_indexer.kernels.topk import topk_indices

FP8 = torch.float8_e4m3fn
HEADS, HEAD_DIM, PAGE_SIZE = 64, 128, 64


@dataclass(frozen=True)
class Figure:
    """A measured figure and its target; `at_least` says on which side of it to be."""

    name: str
    measured: float
    target: float
    unit: str
    at_least: bool
    detail: str

    @property
    def met(self) -> bool:
        """Whether the target is met."""
        if self.at_least:
            return self.measured >= self.target
        return self.measured <= self.target


@dataclass(frozen=True)
class Sizes:
    """The shapes of the targets, or tiny ones."""

    length: int = 65_536
    topk: int = 2048
    few_rows: int = 64
    many_rows: int = 4096
    heads: int = HEADS
    copy_bytes: int = 4 * 2**30
    matrix: int = 8192


TINY = Sizes(length=256, topk=16, few_rows=2, many_rows=4, heads=4, copy_bytes=2**20, matrix=64)


def topk_figure(rows: int, sizes: Sizes, target_us: float, device: torch.device) -> Figure:
    def logits(seed: int) -> torch.Tensor:
        g = torch.Generator(device).manual_seed(seed)
        return torch.randn(rows, sizes.length, device=device, generator=g)

    sets = cold_sets(logits, 4 * rows * sizes.length, device)
    seconds = seconds_a_call(lambda x: topk_indices(x, sizes.topk), sets, device)
    rate = 4 * rows * sizes.length / seconds / 1e12
    name = f"topk_indices [{rows}, {sizes.length}] k={sizes.topk}"
    return Figure(name, seconds * 1e6, target_us, "µs", False, f"{rate:.2f} TB/s of scores")


def decode_figure(sizes: Sizes, bandwidth: float, device: torch.device) -> Figure:
    """Keys, scales and scores moved, against what a copy moves in the same time."""
    batch, length = sizes.few_rows, sizes.length
    pages = batch * length // PAGE_SIZE
    page_bytes = PAGE_SIZE * (HEAD_DIM + 4)
    cache = torch.randint(0, 120, (pages, page_bytes), dtype=torch.uint8, device=device)
    cache[:, PAGE_SIZE * HEAD_DIM :].view(torch.float32).fill_(0.01)
    table = torch.randperm(pages, device=device).view(batch, -1).to(torch.int32)
    lens = torch.full((batch,), length, dtype=torch.int32, device=device)
    q = torch.randn(batch, 1, sizes.heads, HEAD_DIM, device=device).to(FP8)
    weights = torch.randn(batch, sizes.heads, device=device)
    out = torch.empty(batch, length, device=device)

    def decode(_: object) -> None:
        paged_mqa_logits(q, cache, weights, lens, table, max_context_len=length, out=out)

    seconds = seconds_a_call(decode, [None], device)
    moved = batch * length * (HEAD_DIM + 4 + 4)
    share = 100 * moved / seconds / bandwidth
    name = f"paged decode B={batch} L={length} fp8, of copy bandwidth"
    return Figure(name, share, 75.0, "%", True, f"{seconds * 1e6:.0f} µs")


def prefill_figure(sizes: Sizes, rate: float, device: torch.device) -> Figure:
    """Operations of q·k, against those of a matrix product in the same time."""
    rows, length = sizes.many_rows, sizes.length
    q = torch.randn(rows, sizes.heads, HEAD_DIM, device=device).to(FP8)
    k = torch.randn(length, HEAD_DIM, device=device).to(FP8)
    weights = torch.randn(rows, sizes.heads, device=device)
    k_scale = torch.rand(length, device=device)
    starts = torch.zeros(rows, dtype=torch.int32, device=device)
    out = torch.empty(rows, length, device=device)

    def prefill(_: object) -> None:
        mqa_logits(q, k, weights, starts, starts + length, k_scale=k_scale, out=out)

    seconds = seconds_a_call(prefill, [None], device)
    share = 100 * 2 * rows * length * sizes.heads * HEAD_DIM / seconds / rate
    name = f"prefill [{rows}, {length}] H={sizes.heads} fp8, of matrix rate"
    return Figure(name, share, 60.0, "%", True, f"{seconds * 1e3:.2f} ms")


def figures(sizes: Sizes, device: torch.device) -> Iterator[Figure]:
    """Measures one after another."""
    yield topk_figure(sizes.few_rows, sizes, 20.0, device)
    yield topk_figure(sizes.many_rows, sizes, 450.0, device)
    bandwidth = copy_bandwidth(device, sizes.copy_bytes)
    print(f"copy: {bandwidth / 1e12:.3f} TB/s")
    yield decode_figure(sizes, bandwidth, device)
    dtype = FP8 if device.type == "cuda" else torch.float32
    rate = matrix_rate(dtype, device, sizes.matrix)
    print(f"matrix product in {dtype}: {rate / 1e12:.3f} T operations/s")
    yield prefill_figure(sizes, rate, device)


def main() -> int:
    arguments = parse_arguments(__doc__)
    measured: list[Figure] = []
    for figure in figures(TINY if arguments.small else Sizes(), arguments.device):
        measured.append(figure)
        print(f"{figure.name}: {figure.measured:.1f} {figure.unit} ({figure.detail})", flush=True)
        rows = [asdict(f) | {"met": None if arguments.small else f.met} for f in measured]
        write_json(arguments.out, "targets", rows)
    return 0 if arguments.small else int(not all(figure.met for figure in measured))


if __name__ == "__main__":
    sys.exit(main())
