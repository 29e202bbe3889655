"""Who executes a speculator's steps: at once, or by replaying a captured graph."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ..indexer.buffer import TopkIndicesBuffer

Step = Callable[[], None]


class GraphStateError(RuntimeError):
    """A graph was to be replayed where it would compute something else than its step."""


class CaptureError(RuntimeError):
    """A step did something that no graph can hold, such as reading a value back to the host."""


class GraphRunner(Protocol):
    """Runs steps and keeps the selection buffers' host state in line with what they wrote.

    `key` names a step and its padded size; `state` is the speculator's `graph_state()`, which a
    captured graph has baked in; `num_rows` is how many rows the step runs; `tensors` are those
    that it finds its inputs in and leaves its results in.
    """

    def watch(self, buffers: Sequence[TopkIndicesBuffer]) -> None:
        """From now on marks these buffers when a step has written them; forgets all graphs."""

    def capture(
        self,
        key: Hashable,
        step: Step,
        *,
        state: Hashable,
        num_rows: int,
        tensors: Sequence[torch.Tensor] = (),
    ) -> None:
        """Executes `step` on dummy inputs and, if this runner has graphs, keeps it as one.

        What a step leaves for later must lie in `tensors` or other memory allocated before: what
        it allocates is gone when it ends. When it fails, no graph is left, of this step or any.

        Raises:
            CaptureError: when no graph can hold the step.
        """

    def run(
        self,
        key: Hashable,
        step: Step,
        *,
        state: Hashable,
        num_rows: int,
        tensors: Sequence[torch.Tensor] = (),
    ) -> None:
        """Replays the graph captured under `key`, or executes `step`.

        Raises:
            GraphStateError: when the graph was captured under another `state` or for fewer rows,
                or when a watched buffer or one of `tensors` lies elsewhere than at capture, or
                has another shape. Nothing has run then.
        """

    def end_capture(self, *, failed: bool = False) -> None:
        """Buffers hold dummy rows now, which nobody may reuse; if it failed, no graph is left."""


class EagerRunner:
    """Executes every step at once."""

    def __init__(self) -> None:
        self._buffers: list[TopkIndicesBuffer] = []

    def watch(self, buffers: Sequence[TopkIndicesBuffer]) -> None:
        """See `GraphRunner`."""
        self._buffers = list(buffers)

    def capture(
        self,
        key: Hashable,
        step: Step,
        *,
        state: Hashable,
        num_rows: int,
        tensors: Sequence[torch.Tensor] = (),
    ) -> None:
        """Executes `step` once: a warm-up."""
        self._execute(step, num_rows)

    def run(
        self,
        key: Hashable,
        step: Step,
        *,
        state: Hashable,
        num_rows: int,
        tensors: Sequence[torch.Tensor] = (),
    ) -> None:
        """Executes `step`."""
        self._execute(step, num_rows)

    def end_capture(self, *, failed: bool = False) -> None:
        """See `GraphRunner`."""
        for buffer in self._buffers:
            buffer.clear()

    def _execute(self, step: Step, num_rows: int) -> None:
        before = self._write_counts()
        step()
        _mark(self._written_since(before), num_rows)

    def _write_counts(self) -> list[int]:
        return [buffer.write_count for buffer in self._buffers]

    def _written_since(self, before: list[int]) -> list[TopkIndicesBuffer]:
        pairs = zip(self._buffers, before, strict=True)
        return [buffer for buffer, count in pairs if buffer.write_count != count]


class Recording(Protocol):
    """A step as device work alone; `torch.cuda.CUDAGraph` is one."""

    def replay(self) -> None:
        """Does the work again, on what the tensors hold now."""

    def reset(self) -> None:
        """Lets go of the work and of its memory."""


@dataclass(frozen=True)
class _Graph:
    recording: Recording
    state: Hashable
    num_rows: int
    places: list[tuple[object, ...]]
    written: list[TopkIndicesBuffer]


class CapturingRunner(EagerRunner, ABC):
    """What all runners with graphs share: the checks before a replay, and the marks after it.

    A key without a graph runs eagerly.
    """

    def __init__(self) -> None:
        super().__init__()
        self._graphs: dict[Hashable, _Graph] = {}

    def watch(self, buffers: Sequence[TopkIndicesBuffer]) -> None:
        """See `GraphRunner`."""
        super().watch(buffers)
        self._forget()

    def capture(
        self,
        key: Hashable,
        step: Step,
        *,
        state: Hashable,
        num_rows: int,
        tensors: Sequence[torch.Tensor] = (),
    ) -> None:
        """Keeps `step` as a graph; see `GraphRunner`."""
        try:
            self._warm_up(step)
            before = self._write_counts()
            recording = self._record(step)
        except BaseException:
            self._forget()
            raise
        written = self._written_since(before)
        old = self._graphs.get(key)
        self._graphs[key] = _Graph(recording, state, num_rows, self._places(tensors), written)
        if old is not None:
            old.recording.reset()
        _mark(written, num_rows)

    def run(
        self,
        key: Hashable,
        step: Step,
        *,
        state: Hashable,
        num_rows: int,
        tensors: Sequence[torch.Tensor] = (),
    ) -> None:
        """Replays the graph of `key`; see `GraphRunner`."""
        graph = self._graphs.get(key)
        if graph is None:
            self._execute(step, num_rows)
            return
        self._check(key, graph, state, num_rows, tensors)
        graph.recording.replay()
        _mark(graph.written, graph.num_rows)  # no version counter moves in a replay

    def end_capture(self, *, failed: bool = False) -> None:
        """See `GraphRunner`."""
        super().end_capture(failed=failed)
        if failed:
            self._forget()

    @abstractmethod
    def _record(self, step: Step) -> Recording:
        """`step` as a recording, or CaptureError."""

    def _warm_up(self, step: Step) -> None:
        """Before `_record`: runs what happens only the first time."""

    def _forget(self) -> None:
        for graph in self._graphs.values():
            graph.recording.reset()
        self._graphs.clear()

    def _check(
        self,
        key: Hashable,
        graph: _Graph,
        state: Hashable,
        num_rows: int,
        tensors: Sequence[torch.Tensor],
    ) -> None:
        if graph.state != state:
            raise GraphStateError(
                f"graph {key} was captured in state {graph.state}, now is {state}"
            )
        if num_rows > graph.num_rows:
            raise GraphStateError(
                f"graph {key} was captured for {graph.num_rows} rows, now has {num_rows}"
            )
        places = self._places(tensors)
        if places != graph.places:
            raise GraphStateError(
                f"a tensor has moved since graph {key} was captured: (address, shape, strides) of"
                f" selection buffers and tensors were {graph.places}, now are {places}"
            )

    def _places(self, tensors: Sequence[torch.Tensor]) -> list[tuple[object, ...]]:
        held = [*(buffer.indices for buffer in self._buffers), *tensors]
        return [(t.data_ptr(), tuple(t.shape), t.stride()) for t in held]


def _mark(buffers: Sequence[TopkIndicesBuffer], num_rows: int) -> None:
    for buffer in buffers:
        buffer.mark_written(num_rows)
