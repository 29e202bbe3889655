"""topk_indices against torch.topk in the same run.

torch.topk does less: it breaks ties as it likes and returns positions by score. The answer of
ours is compared with a stable sort first: if they differ, nothing is timed and the exit code is 1.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch

from harness import Bench, parse_arguments
from lightning_indexer.kernels.topk import topk_indices


@dataclass(frozen=True)
class Case:
    """Shape and scores: "signed" are normal, "relu" have half of them exactly 0 (ties)."""

    rows: int
    length: int
    k: int
    scores: str = "signed"
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"T={self.rows} L={self.length} k={self.k} {self.scores} {dtype}"

    def logits(self, seed: int, device: torch.device) -> torch.Tensor:
        """[T, L] scores on the device."""
        x = torch.randn(self.rows, self.length, generator=torch.Generator().manual_seed(seed))
        return (x.relu_() if self.scores == "relu" else x).to(self.dtype).to(device)


QUICK = (Case(1, 200, 16), Case(16, 4096, 512), Case(16, 4096, 512, "relu"))
CPU = (
    Case(1, 200, 16),
    Case(1, 65536, 2048),
    Case(512, 8192, 2048),
    Case(512, 8192, 2048, "relu"),
    Case(512, 8192, 2048, dtype=torch.bfloat16),
)
GPU = (
    Case(1, 65536, 2048),
    Case(64, 8192, 2048),
    Case(64, 65536, 2048),
    Case(64, 65536, 2048, "relu"),
    Case(64, 131072, 2048),
    Case(1024, 65536, 2048),
    Case(1024, 65536, 2048, dtype=torch.bfloat16),
    Case(4096, 4096, 512),
)


def is_exact(logits: torch.Tensor, k: int) -> bool:
    """Whether ours is the first k of a stable sort (these scores hold no NaN and no −inf)."""
    best = logits.sort(dim=1, descending=True, stable=True).indices[:, :k]
    return torch.equal(topk_indices(logits, k), best.sort(dim=1).values.to(torch.int32))


def main() -> int:
    bench = Bench("topk_indices", parse_arguments(__doc__))
    cases = QUICK if bench.quick else GPU if bench.device.type == "cuda" else CPU
    for case in cases:
        sets = bench.input_sets(lambda seed, case=case: case.logits(seed, bench.device))
        if not is_exact(sets[0], case.k):
            print(f"{case}: not timed, the selection is wrong", file=sys.stderr)
            return 1
        ours = bench.time(str(case), "ours", lambda x, k=case.k: topk_indices(x, k), sets)
        bench.time(str(case), "torch.topk", lambda x, k=case.k: x.topk(k), sets, against=ours)
    bench.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
