"""A round of drafting on the host, and the time that sharing one selection a round saves.

"stub" rows time `propose` around a draft that computes nothing (step 0 writes one number, as a
sign that it has selected): what the control flow, the batches and the compaction cost, by K and
requests B. Every request has K+1 rows of verification. Graphs hold the steps alone, batches are
built between them, or ("fused") one graph holds all K−1 later steps and their batches. "recorded"
ones run anywhere, to test graphs, and save no time.

"shared" and "fresh" rows time rounds of a draft that is a lightning indexer and nothing else, with
DeepSeek-V3.2's sizes on a paged cache of L tokens a request: one reuses step 0's selection, the
other selects at every step. If their first drafts differ, or other rows were computed than must
be, nothing is timed and the exit code is 1.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import torch

from harness import Bench, parse_arguments
from lightning_indexer.indexer.block_table import BlockTable
from lightning_indexer.speculator.batch import target_batch, with_hidden
from lightning_indexer.speculator.config import SpeculatorConfig
from lightning_indexer.speculator.cuda_graphs import CudaGraphRunner
from lightning_indexer.speculator.draft_model import DraftModel
from lightning_indexer.speculator.mtp import MTPSpeculator
from lightning_indexer.speculator.recorded import RecordedRunner
from lightning_indexer.speculator.runner import EagerRunner, GraphRunner
from lightning_indexer.speculator.step_batch import RequestRows, StepBatch
from speculator_drafts import HIDDEN, PAGE_SIZE, IndexerDraft, StubDraft, num_pages

#: The arguments of `propose`.
Round = tuple[StepBatch, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """Requests of equal context, at the last K+1 tokens of which the target has just been."""

    requests: int
    steps: int
    context: int

    @property
    def rows(self) -> int:
        """Of step 0."""
        return self.requests * (self.steps + 1)

    def config(self, hidden_size: int, bench: Bench, *, fused: bool = False) -> SpeculatorConfig:
        """Limits that this case fills."""
        return SpeculatorConfig(
            num_speculative_steps=self.steps,
            max_num_reqs=self.requests,
            max_num_tokens=self.rows,
            max_model_len=self.context + self.steps,
            hidden_size=hidden_size,
            page_size=PAGE_SIZE,
            prefill_sizes=(self.rows,),
            decode_sizes=(self.requests,),
            fused_steps=(self.steps,) if fused and self.steps > 1 else (),
            dtype=hidden_dtype(bench),
            device=bench.device,
        )

    def round(self, config: SpeculatorConfig) -> Round:
        """What `propose` is given; nothing was rejected."""
        table, g = block_table(config), torch.Generator().manual_seed(0)
        for request in range(self.requests):
            table.allocate(request, config.max_model_len)
        start, tokens = self.context - self.steps - 1, list(range(self.steps + 1))
        rows = [RequestRows(request, start, tokens) for request in range(self.requests)]
        hidden = torch.randn(self.rows, config.hidden_size, generator=g)
        batch = target_batch(rows, table.table, PAGE_SIZE)
        zeros = torch.zeros(self.requests, dtype=torch.int64, device=config.device)
        return with_hidden(batch, hidden.to(config.device, config.dtype)), zeros, zeros


def hidden_dtype(bench: Bench) -> torch.dtype:
    return torch.bfloat16 if bench.device.type == "cuda" else torch.float32


def block_table(config: SpeculatorConfig) -> BlockTable:
    return BlockTable(
        config.max_num_reqs,
        config.max_model_len,
        num_pages=num_pages(config),
        page_size=PAGE_SIZE,
        device=config.device,
    )


def speculator(
    draft: DraftModel, config: SpeculatorConfig, runner: GraphRunner, *, shares: bool = True
) -> MTPSpeculator:
    """Ready to go; the runner's graphs are captured."""
    draft_config = {"index_share_for_mtp_iteration": shares}
    made = MTPSpeculator(draft, config, draft_config=draft_config, runner=runner)
    made.capture()
    return made


def call(made: MTPSpeculator) -> Callable[[Round], torch.Tensor]:
    return lambda x: made.propose(*x)


def time_host(bench: Bench, case: Case, topk: int) -> None:
    """Rows of the stub, one a runner and way to make graphs."""
    ways: list[tuple[str, type[GraphRunner], bool]] = [("eager", EagerRunner, False)]
    ways += [("recorded", RecordedRunner, fused) for fused in (False, True)]
    if bench.device.type == "cuda":
        ways += [("CUDA graphs", CudaGraphRunner, fused) for fused in (False, True)]
    for name, runner, fused in ways:
        config = case.config(256, bench, fused=fused)
        made = speculator(StubDraft(config, topk), config, runner())
        label = f"K={case.steps} B={case.requests}"
        bench.time(label, f"stub, {name}{', fused' * fused}", call(made), [case.round(config)])


def check(case: Case, shared: MTPSpeculator, fresh: MTPSpeculator, inputs: Round) -> None:
    """Raises AssertionError unless both select alike at step 0, and reuse what they should."""
    first = [made.propose(*inputs)[:, 0] for made in (shared, fresh)]
    assert torch.equal(*first), "sharing changes the first draft"
    later = (case.steps - 1) * case.requests
    for made, reused in ((shared, later), (fresh, 0)):
        computed = case.rows + later - reused
        got = made.stats.rows_computed, made.stats.rows_reused
        assert got == (computed, reused), f"rows computed and reused are {got}"


def time_sharing(bench: Bench, case: Case, topk: int) -> str:
    """Rows of the indexer, shared and fresh in turn, and what sharing saves in words."""
    graphs = bench.device.type == "cuda"
    config = case.config(HIDDEN, bench, fused=graphs)
    draft, inputs = IndexerDraft(config, topk), case.round(config)
    shared, fresh = (
        speculator(draft, config, CudaGraphRunner() if graphs else EagerRunner(), shares=shares)
        for shares in (True, False)
    )
    check(case, shared, fresh, inputs)
    label = f"L={case.context} K={case.steps} B={case.requests}"
    calls = {"shared": call(shared), "fresh": call(fresh)}
    ratios = bench.race(label, calls, [inputs], dict.fromkeys(calls))
    return f"{label}: sharing saves {1 - 1 / ratios['fresh']:.0%} of the round"


@dataclass(frozen=True)
class Shapes:
    """What a run goes through."""

    topk: int
    steps: tuple[int, ...]
    stub_requests: tuple[int, ...]
    requests: tuple[int, ...]
    contexts: tuple[int, ...]


QUICK = Shapes(64, (3,), (1, 4), (2,), (512,))
CPU = Shapes(2048, (1, 3, 7), (1, 8, 64), (1, 4), (4096, 16384))
GPU = Shapes(2048, (1, 3, 7), (1, 8, 64), (1, 16, 64), (4096, 16384, 65536))


def main() -> int:
    torch.manual_seed(0)
    bench = Bench("propose", parse_arguments(__doc__))
    shapes = QUICK if bench.quick else GPU if bench.device.type == "cuda" else CPU
    for steps, requests in product(shapes.steps, shapes.stub_requests):
        time_host(bench, Case(requests, steps, 4096), shapes.topk)
    lines = []
    several = [steps for steps in shapes.steps if steps > 1]
    for context, steps, requests in product(shapes.contexts, several, shapes.requests):
        case = Case(requests, steps, context)
        try:
            lines.append(time_sharing(bench, case, shapes.topk))
        except AssertionError as error:
            print(f"{case}: not timed: {error}", file=sys.stderr)
            return 1
    bench.finish()
    print(*lines, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
