"""sparse_mla_attention against plain PyTorch, in turn, with the memory each takes.

"gather" copies every row's keys, [T, W, Dqk], and multiplies them in one batch. "mask" scores all
keys and masks those not selected, as models do that have no sparse kernel: [T, Hq, L]. Answers are
compared first: if they differ by more than rounding, nothing is timed and the exit code is 1.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch

from harness import Bench, parse_arguments
from lightning_indexer.kernels.sparse_mla_attention import sparse_mla_attention
from lightning_indexer.testing.compare import assert_matches
from peak_memory import peak_bytes

DIM, V_DIM = 576, 512
SCALE = DIM**-0.5


@dataclass(frozen=True)
class Inputs:
    """Of one call."""

    q: torch.Tensor  # [T, Hq, 576]
    kv: torch.Tensor  # [L, 576]
    indices: torch.Tensor  # [T, W] int32, distinct and ascending


@dataclass(frozen=True)
class Case:
    """Shapes and dtype; every row selects W distinct keys of L."""

    rows: int
    length: int
    heads: int
    width: int
    dtype: torch.dtype

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"T={self.rows} L={self.length} Hq={self.heads} k={self.width} {dtype}"

    def inputs(self, seed: int, device: torch.device) -> Inputs:
        """Normal queries and keys."""
        g = torch.Generator().manual_seed(seed)
        scores = torch.rand(self.rows, self.length, generator=g)
        indices = scores.topk(self.width).indices.sort(1).values.to(torch.int32)
        return Inputs(
            torch.randn(self.rows, self.heads, DIM, generator=g).to(self.dtype).to(device),
            torch.randn(self.length, DIM, generator=g).to(self.dtype).to(device),
            indices.to(device),
        )


BF16, FP32 = torch.bfloat16, torch.float32
QUICK = tuple(Case(16, 1024, 16, 256, dtype) for dtype in (FP32, BF16))
CPU = (
    Case(1, 8192, 16, 2048, FP32),
    Case(512, 8192, 16, 2048, FP32),
    Case(512, 8192, 16, 2048, BF16),
)
GPU = (
    Case(1, 65536, 128, 2048, BF16),
    Case(64, 65536, 16, 2048, BF16),
    Case(64, 65536, 128, 2048, BF16),
    Case(512, 8192, 128, 2048, BF16),
)


def ours(x: Inputs) -> torch.Tensor:
    return sparse_mla_attention(x.q, x.kv, x.indices, SCALE, V_DIM)[0]


def gather(x: Inputs) -> torch.Tensor:
    keys = x.kv[x.indices.long()]
    weights = torch.softmax(torch.einsum("thd,twd->thw", x.q, keys).float() * SCALE, -1)
    return torch.einsum("thw,twd->thd", weights.to(x.q.dtype), keys[..., :V_DIM])


def mask(x: Inputs) -> torch.Tensor:
    hidden = torch.full((x.q.shape[0], x.kv.shape[0]), float("-inf"), device=x.q.device)
    hidden.scatter_(1, x.indices.long(), 0.0)
    scores = torch.einsum("thd,ld->thl", x.q, x.kv).float() * SCALE + hidden[:, None]
    return torch.einsum("thl,ld->thd", torch.softmax(scores, -1).to(x.q.dtype), x.kv[:, :V_DIM])


def check(x: Inputs) -> None:
    """Raises AssertionError unless ours is the gather's answer, as right as the dtype allows."""
    expected = gather(Inputs(x.q.double(), x.kv.double(), x.indices)).cpu()
    # weights and results rounded to the dtype once each; scores and sums are fp32
    unit = torch.finfo(x.q.dtype).eps if x.q.dtype != FP32 else 2.0**-14
    assert_matches(ours(x).cpu(), expected, 4 * unit * float(expected.abs().max()))


def main() -> int:
    bench = Bench("sparse_mla_attention", parse_arguments(__doc__))
    calls = {"ours": ours, "gather": gather, "mask": mask}
    cases = QUICK if bench.quick else GPU if bench.device.type == "cuda" else CPU
    for case in cases:
        sets = bench.input_sets(lambda seed, case=case: case.inputs(seed, bench.device))
        try:
            check(Inputs(sets[0].q[:8], sets[0].kv, sets[0].indices[:8]))
        except AssertionError as error:
            print(f"{case}: not timed: {error}", file=sys.stderr)
            return 1
        peaks = {name: peak_bytes(call, case.inputs, bench.device) for name, call in calls.items()}
        bench.race(str(case), calls, sets, peaks)
    bench.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
