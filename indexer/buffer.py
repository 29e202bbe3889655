"""The shared selection: one int32 tensor at a fixed address, and what the host knows of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch

from ..kernels.checks import check_int, content_checks


class StaleSelectionError(RuntimeError):
    """A draft step was about to reuse rows that are not this round's, one per request."""


class SelectionKind(Enum):
    """What the rows of a buffer stand for."""

    UNTRACKED = "untracked"  # a foreign runner drives the model; nothing is known
    EMPTY = "empty"
    PER_TOKEN = "per token"
    PER_REQUEST = "per request"


@dataclass(frozen=True)
class SelectionState:
    """A kind, how many rows it covers, and the generation (round) that wrote them."""

    kind: SelectionKind
    num_rows: int = 0
    generation: int = 0


class TopkIndicesBuffer:
    """The [M, W] int32 rows that indexer layers write and skipping steps read.

    The tensor is allocated once and keeps its address for life, so that captured graphs may hold
    it. Its state lives on the host and is moved by the speculator's hooks and graph runners,
    never by a model's forward: a replayed graph runs no Python. Until a speculator calls
    `track`, the state is UNTRACKED and nothing is ever refused.

    Args:
        max_rows: M, at least the larger of max_num_tokens and max_num_reqs.
        width: W, at least index_topk + append_columns.
        append_columns: columns at the end of a row that no indexer writes: a speculator puts
            there positions made after the selection (K − 1 of them).
        device: where the rows live.

    A buffer belongs to one stream.
    """

    def __init__(
        self,
        max_rows: int,
        width: int,
        *,
        append_columns: int = 0,
        device: torch.device | str | None = None,
    ) -> None:
        check_int("max_rows", max_rows, minimum=1)
        self.append_columns = check_int("append_columns", append_columns, minimum=0)
        check_int("width", width, minimum=1 + append_columns)
        # An inference tensor has no version counter, and cannot be written outside of the mode.
        with torch.inference_mode(False):
            self.indices = torch.full((max_rows, width), -1, dtype=torch.int32, device=device)
            #: [M] int64: position of the token that each request's row was selected for.
            self.anchor_positions = torch.full((max_rows,), -1, dtype=torch.int64, device=device)
        # A view with a version counter of its own: appending is no selection
        self._appended = self.indices.data[:, width - append_columns :]
        self.generation = 0
        self.state = SelectionState(SelectionKind.UNTRACKED)

    @property
    def max_rows(self) -> int:
        """M, the number of rows."""
        return self.indices.shape[0]

    @property
    def width(self) -> int:
        """W, the number of columns."""
        return self.indices.shape[1]

    @property
    def write_count(self) -> int:
        """A number that moves whenever an op writes the rows (not under a CUDA graph's replay)."""
        return self.indices._version

    def rows(self, num_rows: int) -> torch.Tensor:
        """A view of the first `num_rows` rows.

        Raises:
            ValueError: when the buffer has fewer.
        """
        if num_rows > self.max_rows:
            raise ValueError(f"num_rows must be at most {self.max_rows}, got {num_rows}")
        return self.indices[:num_rows]

    def track(self) -> None:
        """Starts keeping state; called by a speculator that drives the owning model."""
        self.state = SelectionState(SelectionKind.EMPTY, generation=self.generation)

    def new_generation(self) -> None:
        """A new round begins: what the rows hold now is old."""
        self.generation += 1
        self.forget_appended()

    def append(self, positions: torch.Tensor, last_positions: torch.Tensor) -> None:
        """Puts `positions` into the appended columns of the first rows; device work alone.

        A position that is n after the row's last one goes to column n − 1 of them.

        Args:
            positions: [n] int64: of the rows' new tokens, −1 to append nothing.
            last_positions: [n] int64: what the rows' selections were made for.
        """
        column = (positions - last_positions - 1).clamp(0, self.append_columns - 1)
        rows = self._appended[: positions.shape[0]]
        held = rows.gather(1, column.unsqueeze(1))
        new = positions.unsqueeze(1).to(torch.int32)
        rows.scatter_(1, column.unsqueeze(1), torch.where(new >= 0, new, held))

    def forget_appended(self) -> None:
        """Empties the appended columns."""
        self._appended.fill_(-1)

    def clear(self) -> None:
        """Forgets the selection (after a capture, whose rows are dummies)."""
        if self._tracked:
            self.state = SelectionState(SelectionKind.EMPTY, generation=self.generation)

    def mark_written(self, num_rows: int) -> None:
        """A forward has written `num_rows` rows, one per token."""
        if self._tracked:
            self.state = SelectionState(SelectionKind.PER_TOKEN, num_rows, self.generation)

    def check_compactable(self) -> None:
        """Raises StaleSelectionError when this round's rows were compacted already."""
        current = self.state.generation == self.generation
        if self.state.kind is SelectionKind.PER_REQUEST and current:
            raise StaleSelectionError(
                f"rows of generation {self.generation} were compacted already; a second"
                " compaction would take row ids for token rows that are gone"
            )

    def mark_compacted(self, anchor_positions: torch.Tensor, num_reqs: int) -> None:
        """Rows [0, num_reqs) now stand for requests, the others of [0, n) become −1.

        Rows that no forward of this round wrote keep their state, and stay unusable.

        Args:
            anchor_positions: [n] int: position of each request's last token, n ≥ num_reqs.
            num_reqs: live requests.
        """
        most = anchor_positions.shape[0]
        self.indices[num_reqs:most].fill_(-1)
        self.anchor_positions[:most] = anchor_positions
        self._mark_per_request(num_reqs)

    def mark_refreshed(self, num_reqs: int) -> None:
        """A decode step has selected afresh: the rows it wrote stand for requests already."""
        self._mark_per_request(num_reqs)

    def check_reusable(self, anchor_positions: torch.Tensor, num_reqs: int) -> None:
        """Raises StaleSelectionError unless rows [0, num_reqs) are this round's, per request.

        With LIGHTNING_INDEXER_CHECK=1 also unless each was selected for the position that its
        request now goes on from.

        Args:
            anchor_positions: [≥ num_reqs] int: those positions.
            num_reqs: live requests.
        """
        state = self.state
        if state.kind is SelectionKind.UNTRACKED:
            return
        if state.kind is not SelectionKind.PER_REQUEST:
            raise StaleSelectionError(
                f"the selection is {state.kind.value}, not per request: step 0 must write it and"
                " compaction must follow before a step reuses it"
            )
        if state.generation != self.generation:
            raise StaleSelectionError(
                f"the selection is of generation {state.generation}, now is {self.generation}"
            )
        if num_reqs > state.num_rows:
            raise StaleSelectionError(
                f"{num_reqs} requests want to reuse a selection of {state.num_rows}"
            )
        if content_checks(self.indices):
            ours, theirs = self.anchor_positions[:num_reqs], anchor_positions[:num_reqs]
            if not torch.equal(ours, theirs):
                raise StaleSelectionError(
                    f"rows were selected for positions {ours.tolist()}, requests go on from"
                    f" {theirs.tolist()}"
                )

    def _mark_per_request(self, num_reqs: int) -> None:
        fresh = self.state.generation == self.generation
        if self.state.kind is SelectionKind.PER_TOKEN and fresh:
            self.state = SelectionState(SelectionKind.PER_REQUEST, num_reqs, self.generation)

    @property
    def _tracked(self) -> bool:
        return self.state.kind is not SelectionKind.UNTRACKED
