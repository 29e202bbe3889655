"""Runners with graphs for tests, and a stand-in for `torch.cuda`'s graphs on a CPU.

The stand-in keeps the rules that a runner must mind: a capture executes nothing, happens on a
side stream and is refused what reads values back; ending a broken one raises and leaves the side
stream current; a pool without a live graph cannot be captured into; and replays run no Python.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from lightning_indexer.speculator.cuda_graphs import CudaGraphRunner
from lightning_indexer.speculator.recorded import RecordedRunner, _Recorder, _Recording
from lightning_indexer.speculator.runner import CaptureError, CapturingRunner

#: The stand-in, and the real thing where there is a GPU.
CUDA_RUNNERS = ["cuda", pytest.param("gpu", marks=pytest.mark.gpu)]
GRAPH_RUNNERS = ["recorded", *CUDA_RUNNERS]


class FakeStream:
    def __init__(self, device: Any = None) -> None:
        self.device = device
        self.waited_for: list[FakeStream] = []

    def wait_stream(self, other: FakeStream) -> None:
        self.waited_for.append(other)


class FakeCuda:
    """What stands in for the names of `torch.cuda` that capture graphs, and its state."""

    def __init__(self) -> None:
        self.default_stream = self.current = FakeStream()
        self.streams: list[FakeStream] = []
        self.pools: dict[int, int] = {}  # how many graphs each holds

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "Stream", self._new_stream)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: self.current)
        monkeypatch.setattr(torch.cuda, "stream", self._stream)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", self._new_pool)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: FakeGraph(self))
        monkeypatch.setattr(torch.cuda, "graph", self._graph)

    def _new_stream(self, device: Any = None) -> FakeStream:
        self.streams.append(FakeStream(device))
        return self.streams[-1]

    def _new_pool(self) -> int:
        return len(self.pools) + 1

    @contextmanager
    def _stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def _graph(self, graph: FakeGraph, *, pool: int, stream: FakeStream) -> Iterator[None]:
        assert stream is not self.default_stream
        assert self.pools.get(pool, 1) > 0, "use_count > 0"
        before, self.current = self.current, stream
        recorder = _CapturesOnly(graph.recording.calls)
        try:
            with recorder:
                yield
        finally:
            recorder.undo()
            if recorder.refused:  # `current` stays as it is
                raise RuntimeError("operation failed due to a previous error during capture")
            self.current = before
            if not graph.recording.calls:
                warnings.warn("The CUDA Graph is empty. This usually means …", stacklevel=2)
            self.pools[pool] = self.pools.get(pool, 0) + 1
            graph.pool = pool


class FakeGraph:
    """One graph."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.recording = _Recording()
        self.pool: int | None = None
        self._cuda = cuda

    def replay(self) -> None:
        assert self.pool is not None, "a graph that holds nothing is replayed"
        self.recording.replay()

    def __del__(self) -> None:
        self.reset()

    def reset(self) -> None:
        if self.pool is not None:
            self._cuda.pools[self.pool] -= 1
        self.pool = None
        self.recording.reset()


class _CapturesOnly(_Recorder):
    """Records without lasting effects on tensors."""

    def __init__(self, calls: list[Any]) -> None:
        super().__init__(calls)
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.refused = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for i, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[i] if i < len(args) else kwargs.get(argument.name)
                written = [t for t in tree_leaves(value) if isinstance(t, torch.Tensor)]
                self._before.extend((t, t.clone()) for t in written)
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        except CaptureError:
            self.refused = True
            raise

    def undo(self) -> None:
        for tensor, before in reversed(self._before):
            tensor.copy_(before)


@contextmanager
def graph_runners(kind: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[CapturingRunner]]:
    """The runner class of `kind`; new tensors lie where its graphs run."""
    if kind == "cuda":
        FakeCuda().install(monkeypatch)
    with torch.device("cuda") if kind == "gpu" else nullcontext():
        yield RecordedRunner if kind == "recorded" else CudaGraphRunner
