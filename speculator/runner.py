"""Who executes a speculator's steps: at once, or by replaying a captured graph."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Protocol

from ..indexer.buffer import TopkIndicesBuffer

Step = Callable[[], None]


class GraphStateError(RuntimeError):
    """A graph was to be replayed in another state than it was captured in."""


class GraphRunner(Protocol):
    """Runs steps and keeps the selection buffers' host state in line with what they wrote.

    `key` names a step and its padded size; `state` is the speculator's `graph_state()`, which a
    captured graph has baked in; `num_rows` is how many rows the step runs.
    """

    def watch(self, buffers: Sequence[TopkIndicesBuffer]) -> None:
        """From now on marks these buffers when a step has written them; forgets all graphs."""

    def capture(self, key: Hashable, step: Step, *, state: Hashable, num_rows: int) -> None:
        """Executes `step` on dummy inputs and, if this runner has graphs, keeps it as one."""

    def run(self, key: Hashable, step: Step, *, state: Hashable, num_rows: int) -> None:
        """Replays the graph captured under `key`, or executes `step`.

        Raises:
            GraphStateError: when the graph was captured under another `state`.
        """

    def end_capture(self) -> None:
        """Capturing is over, well or badly: buffers hold dummy rows, which nobody may reuse."""


class EagerRunner:
    """Executes every step at once."""

    def __init__(self) -> None:
        self._buffers: list[TopkIndicesBuffer] = []

    def watch(self, buffers: Sequence[TopkIndicesBuffer]) -> None:
        """See `GraphRunner`."""
        self._buffers = list(buffers)

    def capture(self, key: Hashable, step: Step, *, state: Hashable, num_rows: int) -> None:
        """Executes `step` once: a warm-up."""
        self.run(key, step, state=state, num_rows=num_rows)

    def run(self, key: Hashable, step: Step, *, state: Hashable, num_rows: int) -> None:
        """Executes `step`."""
        for buffer in self._observe(step):
            buffer.mark_written(num_rows)

    def end_capture(self) -> None:
        """See `GraphRunner`."""
        for buffer in self._buffers:
            buffer.clear()

    def _observe(self, step: Step) -> list[TopkIndicesBuffer]:
        """Executes `step` and returns the buffers that it wrote."""
        before = [buffer.write_count for buffer in self._buffers]
        step()
        return [
            buffer
            for buffer, count in zip(self._buffers, before, strict=True)
            if buffer.write_count != count
        ]
