"""compact_topk_indices against the naive copy: clone the buffer, then index it.

The row ids are those of the lifecycle, the last token of every request.
Both answers are compared first: if they differ, nothing is timed and the exit code is 1.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch

from harness import Bench, parse_arguments
from lightning_indexer.kernels.compact import compact_topk_indices


@dataclass(frozen=True)
class Case:
    """Requests, and the shape and number of the buffers compacted together."""

    requests: int
    height: int
    width: int = 2048
    buffers: int = 1

    def __str__(self) -> str:
        return f"n={self.requests} M={self.height} W={self.width} buffers={self.buffers}"

    def inputs(self, seed: int, device: torch.device) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Buffers, and as row ids the last token of every request."""
        generator = torch.Generator().manual_seed(seed)
        shape = (self.height, self.width)
        buffers = [
            torch.randint(0, 65536, shape, dtype=torch.int32, generator=generator).to(device)
            for _ in range(self.buffers)
        ]
        tokens = self.height // self.requests
        rows = torch.arange(1, self.requests + 1, dtype=torch.int32) * tokens - 1
        return buffers, rows.to(device)


QUICK = (Case(4, 32, 256), Case(4, 32, 256, buffers=3))
FULL = (
    Case(1, 4),
    Case(8, 64),
    Case(64, 512),
    Case(64, 512, buffers=3),
    Case(512, 8192),
    Case(2048, 8192),
)


def naive(buffers: list[torch.Tensor], rows: torch.Tensor) -> None:
    """The safe two-step copy, buffer by buffer; it trusts every row id."""
    for buffer in buffers:
        buffer[: rows.shape[0]] = buffer.clone()[rows]


def agrees(buffers: list[torch.Tensor], rows: torch.Tensor) -> bool:
    """Whether both leave the same in copies of the buffers."""
    ours, theirs = ([b.clone() for b in buffers] for _ in range(2))
    compact_topk_indices(ours, rows)
    naive(theirs, rows)
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def main() -> int:
    bench = Bench("compact_topk_indices", parse_arguments(__doc__))
    for case in QUICK if bench.quick else FULL:
        sets = bench.input_sets(lambda seed, case=case: case.inputs(seed, bench.device))
        if not agrees(*sets[0]):
            print(f"{case}: not timed, the answers differ", file=sys.stderr)
            return 1
        ours = bench.time(str(case), "ours", lambda x: compact_topk_indices(*x), sets)
        bench.time(str(case), "clone and index", lambda x: naive(*x), sets, against=ours)
    bench.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
