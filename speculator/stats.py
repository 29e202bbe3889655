"""Counters of a speculator, kept on the host."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class SpeculatorStats:
    """What the draft did since the counters were made; padding rows are never counted.

    Attributes:
        rounds: calls of `propose` with a live request.
        forwards: draft forwards.
        rows_computed: rows whose selection the draft's indexer computed.
        rows_reused: rows that reused the selection of an earlier step.
        rows_compacted: request rows that compaction wrote.
        rows_refreshed: of the computed rows, those of decode steps amid steps that reuse.
    """

    rounds: int = 0
    forwards: int = 0
    rows_computed: int = 0
    rows_reused: int = 0
    rows_compacted: int = 0
    rows_refreshed: int = 0

    def count_forward(self, num_rows: int, *, reused: bool) -> None:
        """One draft forward over `num_rows` live rows, whose selection was `reused` or computed."""
        self.forwards += 1
        if reused:
            self.rows_reused += num_rows
        else:
            self.rows_computed += num_rows
