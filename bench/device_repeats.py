"""What must not change an answer: running again, other rows beside it, and a captured graph."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from device_inputs import (
    BF16,
    FP8,
    FP32,
    Inputs,
    moved,
    paged_inputs,
    ragged_inputs,
    score_rows,
)
from device_step import Check, parse_arguments, run_checks
from lightning_indexer.kernels.compact import compact_topk_indices
from lightning_indexer.kernels.mqa_logits import mqa_logits
from lightning_indexer.kernels.paged_mqa_logits import paged_mqa_logits
from lightning_indexer.kernels.read_index_k import read_index_k
from lightning_indexer.kernels.select_topk import paged_select_topk, select_topk
from lightning_indexer.kernels.slots import indices_to_slots
from lightning_indexer.kernels.topk import topk_indices
from lightning_indexer.kernels.write_index_k import write_index_k

RUNS = 20


@dataclass(frozen=True)
class Call:
    """One op: its inputs, and a function of them that leaves them as they are.

    `batched` names the arguments with an entry for every row (or request) of the result.
    """

    name: str
    inputs: Inputs
    run: Callable[[Inputs], torch.Tensor]
    batched: tuple[str, ...] = ()

    def one_row(self, row: int) -> Inputs:
        """The inputs of that row alone."""
        return self.inputs | {name: self.inputs[name][row : row + 1] for name in self.batched}


def run_compact(x: Inputs) -> torch.Tensor:
    buffers = [x["buffer"].clone(), x["other"].clone()]
    compact_topk_indices(buffers, x["rows"])
    return torch.cat(buffers, dim=1)


def run_write(x: Inputs) -> torch.Tensor:
    cache = x["cache"].clone()
    write_index_k(cache, x["k"], x["slots"])
    return cache


def run_read(x: Inputs) -> torch.Tensor:
    lens = x["block_table"].shape[1] * 64
    total = x["block_table"].shape[0] * lens
    context_lens = torch.full_like(x["block_table"][:, 0], lens)
    values, _ = read_index_k(x["cache"], x["block_table"], context_lens, total=total)
    return values


def calls(device: torch.device, small: bool) -> Iterator[Call]:
    """Every op; small ones take the interpreter a second each."""
    heads, head_dim = (3, 32) if small else (64, 128)
    rows, length = (4, 60) if small else (64, 3000)
    ragged = ("q", "weights", "row_starts", "row_ends")
    for dtypes in ("fp8", "bf16", "fp32"):
        inputs = moved(ragged_inputs(dtypes, rows, length, heads, head_dim, ties=small), device)
        yield Call(f"mqa_logits {dtypes}", inputs, lambda x: mqa_logits(**x), ragged)
    yield Call("select_topk", inputs, lambda x: select_topk(**x, topk=length // 5), ragged)
    sizes = (3, 2, length, heads, head_dim)
    paged = ("q", "context_lens", "block_table")
    for q_dtype, cache_dtype in ((FP8, FP8), (BF16, FP8), (BF16, BF16)):
        inputs = moved(paged_inputs(q_dtype, cache_dtype, "own lengths", *sizes), device)
        name = f"paged_mqa_logits {q_dtype} {cache_dtype}".replace("torch.", "")
        yield Call(name, inputs, lambda x: paged_mqa_logits(**x))
    inputs = moved(paged_inputs(BF16, FP8, "own lengths", 3, 1, *sizes[2:]), device)
    select = partial(_paged_select, topk=length // 5)
    yield Call("paged_select_topk", inputs, select, (*paged, "weights"))
    for shape in ((2, 300),) if small else ((64, 3000), (300, 9000), (3, 70_000)):
        logits = score_rows(*shape, "relu").to(device)
        inputs = {"logits": logits}
        run = partial(_topk, k=20 if small else 2048)
        yield Call(f"topk_indices {list(shape)}", inputs, run, ("logits",))
    yield from _layout_calls(device)


def _paged_select(x: Inputs, topk: int) -> torch.Tensor:
    return paged_select_topk(**x, topk=topk)


def _topk(x: Inputs, k: int) -> torch.Tensor:
    return topk_indices(x["logits"], k)


def _layout_calls(device: torch.device) -> Iterator[Call]:
    g = torch.Generator().manual_seed(0)

    def draw(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, high, shape, dtype=torch.int32, generator=g)

    table = torch.randperm(6, generator=g).view(3, 2).to(torch.int32)
    cache = torch.zeros(6, 64, 1, 132, dtype=torch.uint8)
    buffers = {"buffer": draw(99, 9, 40), "other": draw(99, 9, 7), "rows": draw(9, 4)}
    lookup = {"indices": draw(128, 3, 40), "block_table": table, "row_to_request": draw(3, 3)}
    keys = torch.randn(70, 128, generator=g)
    write = {"cache": cache, "k": keys, "slots": torch.randperm(384, generator=g)[:70]}
    written = run_write(write)
    for name, inputs, run, batched in (
        ("compact_topk_indices", buffers, run_compact, ()),
        (
            "indices_to_slots",
            lookup,
            lambda x: indices_to_slots(**x, page_size=64),
            ("indices", "row_to_request"),
        ),
        ("write_index_k", write, run_write, ()),
        ("read_index_k", {"cache": written, "block_table": table}, run_read, ()),
    ):
        yield Call(name, moved(inputs, device), run, batched)


def bits(x: torch.Tensor) -> torch.Tensor:
    """Compared as integers, so that NaN equals itself."""
    return x.view(torch.uint8) if x.dtype == FP8 else x.view(torch.int32) if x.dtype == FP32 else x


def check_runs(call: Call, runs: int) -> None:
    first = bits(call.run(call.inputs)).clone()
    for _ in range(runs):
        assert torch.equal(bits(call.run(call.inputs)), first), "another run, another answer"


def check_alone(call: Call) -> None:
    together = bits(call.run(call.inputs))
    for row in {0, len(together) // 2, len(together) - 1}:
        alone = bits(call.run(call.one_row(row)))
        assert torch.equal(alone[0], together[row]), f"row {row} alone differs"


def check_graph(call: Call) -> None:
    """Captures a call on buffers of zeros; a replay must see what is copied there later."""
    static = {
        name: torch.zeros_like(x) if isinstance(x, torch.Tensor) else x
        for name, x in call.inputs.items()
    }
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call.run(static)  # compiles, which a capture forbids
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call.run(static)
    for name, x in call.inputs.items():
        if isinstance(x, torch.Tensor):
            static[name].copy_(x)
    expected = bits(call.run(call.inputs))
    for _ in range(2):
        graph.replay()
        assert torch.equal(bits(out), expected), "the replay differs from the eager call"


def checks(device: torch.device, small: bool) -> Iterator[Check]:
    for call in calls(device, small):
        yield f"{call.name}, run again", partial(check_runs, call, 2 if small else RUNS)
        if call.batched:
            yield f"{call.name}, a row alone", partial(check_alone, call)
        if device.type == "cuda":  # a CPU has no graphs to capture
            yield f"{call.name}, captured", partial(check_graph, call)


def main() -> int:
    arguments = parse_arguments(__doc__)
    return run_checks(checks(arguments.device, arguments.small), arguments.out, "repeats")


if __name__ == "__main__":
    sys.exit(main())
