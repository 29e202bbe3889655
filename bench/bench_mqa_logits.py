"""mqa_logits against the one-shot einsum that defines it, in the same run.

The einsum keeps a [T, H, L] tensor. Both answers are compared first: if they differ by more
than fp32 rounding, nothing is timed and the exit code is 1.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch

from harness import Bench, parse_arguments
from lightning_indexer.kernels.mqa_logits import mqa_logits
from lightning_indexer.testing.compare import assert_matches


@dataclass(frozen=True)
class Case:
    """Shapes and dtype; windows are the last rows of a causal square, or everything."""

    rows: int
    length: int
    heads: int
    head_dim: int
    dtype: torch.dtype
    causal: bool

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        sizes = f"T={self.rows} L={self.length} H={self.heads} D={self.head_dim}"
        return f"{sizes} {dtype}{' causal' if self.causal else ''}"

    def inputs(self, seed: int, device: torch.device) -> dict[str, torch.Tensor]:
        """The arguments of one call, by name."""
        g = torch.Generator().manual_seed(seed)
        rows, length = self.rows, self.length
        ends = torch.full((rows,), length, dtype=torch.int32)
        if self.causal:
            ends = (torch.arange(rows) + length - rows + 1).to(torch.int32)
        tensors = {
            "q": torch.randn(rows, self.heads, self.head_dim, generator=g).to(self.dtype),
            "k": torch.randn(length, self.head_dim, generator=g).to(self.dtype),
            "weights": torch.randn(rows, self.heads, generator=g),
            "row_starts": torch.zeros(rows, dtype=torch.int32),
            "row_ends": ends,
            "k_scale": torch.rand(length, generator=g),
        }
        return {name: x.to(device) for name, x in tensors.items()}


FP8, BF16, FP32 = torch.float8_e4m3fn, torch.bfloat16, torch.float32
QUICK = (
    Case(1, 200, 4, 32, FP32, False),
    Case(32, 1024, 64, 128, FP32, True),
    Case(32, 1024, 64, 128, FP8, True),
)
CPU = (
    Case(1, 200, 4, 32, FP32, False),
    Case(1, 8192, 64, 128, FP8, False),
    Case(512, 8192, 64, 128, FP32, False),
    Case(512, 8192, 64, 128, BF16, False),
    Case(2048, 2048, 64, 128, FP8, True),
)
GPU = (
    Case(1, 65536, 64, 128, FP8, False),
    Case(64, 65536, 64, 128, FP8, False),
    Case(1024, 8192, 64, 128, FP8, False),
    Case(1024, 8192, 64, 128, BF16, False),
    Case(1024, 8192, 32, 128, FP8, False),
    Case(4096, 4096, 64, 128, FP8, True),
)


def einsum(inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """The definition, in fp32 and one piece."""
    dots = torch.einsum("thd,ld->thl", inputs["q"].float(), inputs["k"].float())
    scores = torch.einsum("thl,th->tl", dots.relu_(), inputs["weights"]) * inputs["k_scale"]
    positions = torch.arange(inputs["k"].shape[0], device=scores.device)
    unseen = positions < inputs["row_starts"][:, None]
    unseen |= positions >= inputs["row_ends"][:, None]
    return scores.masked_fill_(unseen, float("-inf"))


def check(inputs: dict[str, torch.Tensor]) -> None:
    """Raises AssertionError unless both answers agree within what fp32 sums may lose."""
    q, weights = inputs["q"], inputs["weights"]
    everything = {
        "q": q.float().abs(),
        "k": inputs["k"].float().abs(),
        "weights": weights.abs(),
        "row_starts": torch.zeros_like(inputs["row_starts"]),
        "row_ends": torch.full_like(inputs["row_ends"], inputs["k"].shape[0]),
    }
    magnitude = einsum(inputs | everything)
    # fp8 tensor cores align products before adding them and keep some 13 bits of each
    native_fp8 = q.is_cuda and q.dtype == FP8
    unit = 2.0**-13 if native_fp8 else 2.0**-24
    terms = q.shape[2] + q.shape[1] + 3
    bound = 2 * unit * (1 if native_fp8 else terms) * magnitude
    assert_matches(mqa_logits(**inputs).cpu(), einsum(inputs).double().cpu(), bound.cpu())


def main() -> int:
    arguments = parse_arguments(__doc__)
    bench = Bench("mqa_logits", arguments)
    cases = QUICK if bench.quick else GPU if bench.device.type == "cuda" else CPU
    for case in cases:
        sets = bench.input_sets(lambda seed, case=case: case.inputs(seed, bench.device))
        try:
            check(sets[0])
        except AssertionError as error:
            print(f"{case}: not timed, the answers differ: {error}", file=sys.stderr)
            return 1
        ours = bench.time(str(case), "ours", lambda x: mqa_logits(**x), sets)
        bench.time(str(case), "einsum", einsum, sets, against=ours)
    bench.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
