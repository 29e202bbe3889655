"""prepare_index_q and prepare_index_k against the same statements in plain PyTorch.

Projections in bf16, D = 128, half of it rotated, power-of-two scales, as DeepSeek-V3.2 has them;
with the transform and without it. The statements multiply by a ±1 matrix, which adds in another
order: answers are compared first, bytes without the transform and floats with it. If they differ,
nothing is timed and the exit code is 1. What a GPU spends is in `compile-report`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from harness import Bench, parse_arguments
from lightning_indexer.indexer.rope import apply_rope, rope_tables
from lightning_indexer.kernels.prepare_index_k import prepare_index_k
from lightning_indexer.kernels.prepare_index_q import prepare_index_q
from lightning_indexer.kernels.prepare_ragged_index_k import prepare_ragged_index_k

D, ROPE_DIM, PAGE_SIZE, EPS = 128, 64, 64, 1e-6


@dataclass(frozen=True)
class Case:
    """Rows, heads (0: keys), and whether the transform follows."""

    rows: int
    heads: int
    hadamard: bool

    def __str__(self) -> str:
        side = f"q T={self.rows} H={self.heads}" if self.heads else f"k n={self.rows}"
        return f"{side} D={D}{' hadamard' if self.hadamard else ''}"


@dataclass(frozen=True)
class Inputs:
    """Of one call of either op."""

    case: Case
    x: torch.Tensor  # [T, H, D] or [n, D] bf16
    weights: torch.Tensor  # [T, H] bf16
    norm: torch.Tensor  # [2, D] bf16: weight, bias
    positions: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    matrix: torch.Tensor  # [D, D] fp32, orthonormal
    cache: torch.Tensor  # [pages, 64·132] uint8
    slots: torch.Tensor

    @classmethod
    def of(cls, case: Case, seed: int, device: torch.device) -> Inputs:
        """Normal values; tokens of one sequence, in the pages of a shuffled pool."""
        g = torch.Generator().manual_seed(seed)
        rows, heads = case.rows, max(case.heads, 1)
        shape = (rows, heads, D) if case.heads else (rows, D)
        pages = -(-rows // PAGE_SIZE)
        matrix = torch.ones(1, 1)
        while len(matrix) < D:
            matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix)
        tensors = (
            torch.randn(shape, generator=g).bfloat16(),
            torch.randn(rows, heads, generator=g).bfloat16(),
            torch.randn(2, D, generator=g).bfloat16(),
            torch.arange(rows),
            *(t.float() for t in rope_tables(rows, ROPE_DIM, 10000.0)),
            matrix * D**-0.5,
            torch.zeros(pages, PAGE_SIZE * (D + 4), dtype=torch.uint8),
            torch.randperm(pages * PAGE_SIZE, generator=g)[:rows],
        )
        return cls(case, *(t.to(device) for t in tensors))

    def ours(self) -> tuple[torch.Tensor, ...]:
        """The op."""
        options = {"rope_style": "half_split", "hadamard": self.case.hadamard}
        rope = self.positions, self.cos, self.sin
        if self.case.heads:
            return prepare_index_q(self.x, self.weights, *rope, **options, scale_format="ue8m0")
        options |= {"eps": EPS, "scale_format": "ue8m0"}
        prepare_index_k(self.x, *self.norm, *rope, self.cache, self.slots, **options)
        return (self.cache,)

    def floats(self) -> torch.Tensor:
        """The op's rows before quantisation."""
        options = {"rope_style": "half_split", "hadamard": self.case.hadamard}
        options |= {"scale_format": None}
        rope = self.positions, self.cos, self.sin
        if self.case.heads:
            return prepare_index_q(self.x.float(), self.weights, *rope, **options)[0]
        return prepare_ragged_index_k(self.x.float(), *self.norm, *rope, eps=EPS, **options)[0]

    def prepared(self) -> torch.Tensor:
        """The statements, up to quantisation."""
        x, cos, sin = self.x.float(), self.cos[self.positions], self.sin[self.positions]
        if self.case.heads:
            cos, sin = cos[:, None], sin[:, None]
        else:
            x = F.layer_norm(x, (D,), self.norm[0].float(), self.norm[1].float(), EPS)
        x = apply_rope(x, cos, sin, "half_split")
        return x @ self.matrix if self.case.hadamard else x

    def statements(self) -> tuple[torch.Tensor, ...]:
        """The statements."""
        x = self.prepared()
        scale = torch.exp2((x.abs().amax(-1).clamp(min=1e-4) / 448).log2().ceil())
        values = (x / scale[..., None]).to(torch.float8_e4m3fn)
        if self.case.heads:
            factor = D**-0.5 * self.case.heads**-0.5
            return values, self.weights.float() * factor * scale
        page, token = self.slots // PAGE_SIZE, self.slots % PAGE_SIZE
        pages = len(self.cache)
        payload = self.cache[:, : PAGE_SIZE * D].view(pages, PAGE_SIZE, D)
        payload[page, token] = values.view(torch.uint8)
        self.cache[:, PAGE_SIZE * D :].view(torch.float32)[page, token] = scale
        return (self.cache,)

    def agrees(self) -> bool:
        """Whether both give the same: of floats, within 2⁻¹⁹ of the greatest."""
        ours, theirs = self.floats(), self.prepared()
        near = (ours - theirs).abs().amax() <= 2.0**-19 * theirs.abs().amax()
        if self.case.hadamard or not self.case.heads:
            return bool(near)
        answers = zip(self.ours(), self.statements(), strict=True)
        return bool(near) and all(torch.equal(a.float(), b.float()) for a, b in answers)


QUICK = tuple(Case(8, heads, hadamard) for heads in (4, 0) for hadamard in (False, True))
FULL = (
    *(Case(rows, 64, hadamard) for rows in (64, 1024) for hadamard in (False, True)),
    *(Case(rows, 0, hadamard) for rows in (64, 4096) for hadamard in (False, True)),
)


def main() -> int:
    bench = Bench("prepare_index", parse_arguments(__doc__))
    for case in QUICK if bench.quick else FULL:
        sets = bench.input_sets(lambda seed, case=case: Inputs.of(case, seed, bench.device))
        if not sets[0].agrees():
            print(f"{case}: not timed, the answers differ", file=sys.stderr)
            return 1
        ours = bench.time(str(case), "ours", Inputs.ours, sets)
        bench.time(str(case), "PyTorch statements", Inputs.statements, sets, against=ours)
    bench.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
