"""Public reports of graphs, scratch memory and empty batches gone wrong; each names its source.

Captures are recorded on a CPU; on a GPU the same tests capture CUDA graphs.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import lightning_indexer as li
from lightning_indexer.testing import reference
from virtual_memory import DEVICES

PAGE = 8
#: A row this long is split between programs on a GPU, whose scratch outlives the first of three
#: launches.
LONG = 40_000


def _captured(step: Callable[[], object], device: str) -> Callable[[], None]:
    """A replay of `step`, captured now."""
    if device == "cpu":
        runner = li.RecordedRunner()
        runner.capture("step", step, state=(), num_rows=0)
        return lambda: runner.run("step", pytest.fail, state=(), num_rows=0)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()  # compiles, which a capture forbids
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


@contextmanager
def _dirty_memory() -> Iterator[None]:
    """Until it ends, memory comes filled: with NaN, or the largest integer."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.empty(3).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def _paged(device: str, batch: int = 3, next_n: int = 2, *, pages: int = 4) -> dict:
    """Arguments of a paged selection; request b has pages [pages·b, pages·(b+1))."""
    g = torch.Generator().manual_seed(0)
    tensors = {
        "q": torch.randn(batch, next_n, 2, 8, generator=g),
        "cache": torch.randn(batch * pages, PAGE, 8, generator=g),
        "weights": torch.rand(batch * next_n, 2, generator=g),
        "context_lens": torch.full((batch,), pages * PAGE, dtype=torch.int32),
        "block_table": torch.arange(batch * pages, dtype=torch.int32).view(batch, pages),
    }
    sizes = {"topk": 5, "max_context_len": pages * PAGE, "page_size": PAGE}
    return {name: x.to(device) for name, x in tensors.items()} | sizes


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("next_n, topk", [(2, 5), (1, 1), (4, 40)])
def test_replay_writes_the_callers_output_from_lengths_of_now(
    next_n: int, topk: int, device: str
) -> None:
    # NVIDIA/TensorRT-LLM#16290: the output came from the capture's pool and was gone on replay.
    inputs = _paged(device, next_n=next_n) | {"topk": topk}
    out = torch.full((3 * next_n, topk), 777, dtype=torch.int32, device=device)
    inputs["context_lens"].fill_(1)
    replay = _captured(lambda: li.paged_select_topk(**inputs, out=out), device)
    address = out.data_ptr()
    for lengths in ([32, 9, 20], [0, 32, 3], [1, 1, 1], [32, 32, 32]):
        inputs["context_lens"].copy_(torch.tensor(lengths))
        churn = [torch.full((n, 999), -1, device=device) for n in (1, 30, 300)]
        out.fill_(777)
        replay()
        del churn
        assert out.data_ptr() == address
        assert torch.equal(out, li.paged_select_topk(**inputs))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("captured", [1, 0, 6000])
def test_nothing_accumulates_when_short_captures_replay_on_long_rows(
    captured: int, device: str
) -> None:
    # vllm-project/vllm#41665: captured at length 1, replayed at 40,000, counters never cleared.
    # flashinfer-ai/flashinfer#3615: later replays hung on a barrier that the first had left.
    logits = torch.randn(2, LONG, generator=torch.Generator().manual_seed(0)).to(device)
    starts, ends = torch.zeros((2, 2), dtype=torch.int32, device=device)
    out = torch.empty((2, 9), dtype=torch.int32, device=device)
    ends.fill_(captured)
    replay = _captured(lambda: li.topk_indices(logits, 9, starts, ends, out=out), device)
    for length in [LONG, 1, LONG, 5000] * (25 if device == "cuda" else 1):
        ends.fill_(length)
        replay()
        expected = reference.topk_indices(logits.cpu(), 9, starts.cpu(), ends.cpu())
        assert torch.equal(out.cpu(), expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("length", [100, 5000, LONG])
def test_what_scratch_memory_holds_is_irrelevant(length: int, device: str) -> None:
    # vllm-project/vllm#41444: state that one block initialised, left non-zero for the next call.
    logits = torch.randn(3, length, generator=torch.Generator().manual_seed(0)).to(device)
    expected = reference.topk_indices(logits.cpu(), 9)
    with _dirty_memory():
        for _ in range(2):
            assert torch.equal(li.topk_indices(logits, 9).cpu(), expected)


@pytest.mark.parametrize("device", DEVICES)
def test_what_memory_held_before_the_scores_is_irrelevant(device: str) -> None:
    # vllm-project/vllm#41444, of scores that are held a chunk at a time, and of moved rows.
    inputs = _paged(device)
    inputs["context_lens"].copy_(torch.tensor([32, 0, 9]))
    rows = torch.tensor([5, 2, 2, 0], device=device)

    def run() -> torch.Tensor:
        selected = li.paged_select_topk(**inputs, workspace_bytes=2 * 4 * 32)
        li.compact_topk_indices(selected, rows)
        return selected

    expected = run()
    with _dirty_memory():
        for _ in range(2):
            assert torch.equal(run(), expected)


@pytest.mark.once
def test_no_program_waits_for_another() -> None:
    # flashinfer-ai/flashinfer#3615: a barrier that its leader reset before all had left it.
    # Programs whose atomics are their own, and whose loads may come from a cache, cannot wait.
    calls = [
        node
        for path in (Path(li.__file__).parent / "kernels").glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("tl.")
    ]
    atomics = [ast.unparse(c) for c in calls if ast.unparse(c.func).startswith("tl.atomic_")]
    assert atomics  # else this test looks in the wrong place
    assert all("scope='cta'" in call and "_cas(" not in call for call in atomics)
    loads = [ast.unparse(c) for c in calls if ast.unparse(c.func) == "tl.load"]
    assert loads
    assert not any("volatile=" in call or "'.cv'" in call for call in loads)


@pytest.mark.once
@pytest.mark.parametrize("batch", [32, 33])
@pytest.mark.parametrize("next_n", [1, 2])
def test_batch_without_any_key_selects_nothing(batch: int, next_n: int) -> None:
    # deepseek-ai/DeepGEMM#353: a search over zero lengths gave the batch size, and was used.
    inputs = _paged("cpu", batch, next_n)
    inputs["context_lens"].zero_()
    assert (li.paged_select_topk(**inputs) == -1).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("batch, next_n", [(3, 2), (1, 1), (32, 1)])
def test_what_lies_behind_the_lengths_is_never_used(batch: int, next_n: int, device: str) -> None:
    # deepseek-ai/DeepGEMM#344: idle workers read one length too many.
    inputs = _paged(device, batch, next_n)
    expected = li.paged_select_topk(**inputs)
    for name in ("context_lens", "block_table"):
        x = inputs[name]
        behind = torch.full_like(x, 2**30)
        inputs[name] = torch.cat([x, behind])[: len(x)]
    assert torch.equal(li.paged_select_topk(**inputs), expected)
