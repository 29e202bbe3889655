"""select_topk against the statements people run today, in turn, with the memory each takes.

"transformers" are the statements of its DeepSeek-V3.2 indexer: cast to fp32, matmul, scale, relu,
weighted sum, mask, topk. "einsum" is the same sum in one shot and torch.topk. Both keep [T, H, L]
tensors and leave the order of ties open. Ours is compared with a stable sort of the scores, and
those with the einsum's, first: if they differ, nothing is timed and the exit code is 1.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from harness import Bench, parse_arguments
from lightning_indexer.kernels.mqa_logits import mqa_logits
from lightning_indexer.kernels.select_topk import select_topk
from lightning_indexer.testing.compare import assert_matches
from peak_memory import peak_bytes

NEG_INF = float("-inf")


@dataclass(frozen=True)
class Inputs:
    """Of one call; the weights hold no factor D^-0.5."""

    q: torch.Tensor  # [T, H, D]
    k: torch.Tensor  # [L, D]
    weights: torch.Tensor  # [T, H] fp32
    ends: torch.Tensor  # [T] int32, the starts are 0
    topk: int


@dataclass(frozen=True)
class Case:
    """Shapes and dtype; windows are the last rows of a causal square, or everything."""

    rows: int
    length: int
    heads: int
    head_dim: int
    topk: int
    dtype: torch.dtype
    causal: bool

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        sizes = f"T={self.rows} L={self.length} H={self.heads} D={self.head_dim} k={self.topk}"
        return f"{sizes} {dtype} {'causal' if self.causal else 'full'}"

    def inputs(self, seed: int, device: torch.device) -> Inputs:
        """Normal queries, keys and weights."""
        g = torch.Generator().manual_seed(seed)
        rows, length = self.rows, self.length
        first = length - rows + 1 if self.causal else length
        ends = torch.arange(first, first + rows).clamp(max=length).to(torch.int32)
        return Inputs(
            torch.randn(rows, self.heads, self.head_dim, generator=g).to(self.dtype).to(device),
            torch.randn(length, self.head_dim, generator=g).to(self.dtype).to(device),
            torch.randn(rows, self.heads, generator=g).to(device),
            ends.to(device),
            self.topk,
        )


BF16, FP32 = torch.bfloat16, torch.float32
QUICK = tuple(Case(32, 1024, 64, 128, 256, dtype, True) for dtype in (FP32, BF16))
CPU = tuple(
    Case(512, 8192, 64, 128, 2048, dtype, causal)
    for causal in (False, True)
    for dtype in (FP32, BF16)
)
GPU = tuple(Case(1024, 16384, 64, 128, 2048, BF16, causal) for causal in (False, True))


def ours(x: Inputs) -> torch.Tensor:
    weights = x.weights * x.q.shape[2] ** -0.5
    return select_topk(x.q, x.k, weights, torch.zeros_like(x.ends), x.ends, x.topk)


def transformers(x: Inputs) -> torch.Tensor:
    rows, heads, head_dim = x.q.shape
    q, k = x.q.flatten(0, 1), x.k
    scores = torch.matmul(q.float(), k.transpose(-1, -2).float()) * head_dim**-0.5
    scores = F.relu(scores).view(rows, heads, k.shape[0])
    index_scores = torch.matmul(x.weights.unsqueeze(-2), scores).squeeze(-2)
    index_scores = index_scores.masked_fill(unseen(x), NEG_INF)
    return index_scores.topk(x.topk, dim=-1).indices.to(torch.int32)


def einsum(x: Inputs) -> torch.Tensor:
    return einsum_scores(x).topk(x.topk).indices


def einsum_scores(x: Inputs) -> torch.Tensor:
    dots = torch.einsum("thd,ld->thl", x.q.float(), x.k.float()).relu_()
    weights = x.weights * x.q.shape[2] ** -0.5
    return torch.einsum("thl,th->tl", dots, weights).masked_fill_(unseen(x), NEG_INF)


def unseen(x: Inputs) -> torch.Tensor:
    return torch.arange(x.k.shape[0], device=x.k.device) >= x.ends[:, None]


def check(x: Inputs) -> None:
    """Raises AssertionError unless our selection is exact, on scores as right as fp32 sums are."""
    weights = x.weights * x.q.shape[2] ** -0.5
    logits = mqa_logits(x.q, x.k, weights, torch.zeros_like(x.ends), x.ends)
    best = logits.sort(dim=1, descending=True, stable=True).indices[:, : x.topk]
    assert torch.equal(ours(x), best.sort(dim=1).values.to(torch.int32)), "the selection is wrong"
    magnitude = einsum_scores(
        Inputs(x.q.float().abs(), x.k.float().abs(), x.weights.abs(), x.ends, x.topk)
    )
    terms = x.q.shape[1] + x.q.shape[2] + 3
    bound = 2 * 2.0**-24 * terms * magnitude.cpu().clamp(min=0)
    assert_matches(logits.cpu(), einsum_scores(x).double().cpu(), bound)


def verdict(case: Case, other: str, ratio: float, peaks: dict[str, int | None]) -> str:
    own, others = peaks["ours"], peaks[other]
    memory = "not measured" if not own or not others else f"1/{others / own:.1f}"
    return f"{case}: {ratio:.2f} times faster than {other}, peak memory {memory} of its"


def main() -> int:
    bench = Bench("select_topk", parse_arguments(__doc__))
    calls = {"ours": ours, "transformers": transformers, "einsum": einsum}
    cases = QUICK if bench.quick else GPU if bench.device.type == "cuda" else CPU
    lines = []
    for case in cases:
        sets = bench.input_sets(lambda seed, case=case: case.inputs(seed, bench.device))
        try:
            check(sets[0])
        except AssertionError as error:
            print(f"{case}: not timed: {error}", file=sys.stderr)
            return 1
        peaks = {name: peak_bytes(call, case.inputs, bench.device) for name, call in calls.items()}
        ratios = bench.race(str(case), calls, sets, peaks)
        lines += [verdict(case, name, ratio, peaks) for name, ratio in ratios.items()]
    bench.finish()
    print(*lines, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
