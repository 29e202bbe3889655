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
        rows_reused: rows that reused the selection of step 0.
        rows_compacted: request rows that compaction wrote.
        reusing: whether forwards reuse the selection now (moved by the hooks).
    """

    rounds: int = 0
    forwards: int = 0
    rows_computed: int = 0
    rows_reused: int = 0
    rows_compacted: int = 0
    reusing: bool = False

    def count_forward(self, num_rows: int) -> None:
        """One draft forward over `num_rows` live rows."""
        self.forwards += 1
        if self.reusing:
            self.rows_reused += num_rows
        else:
            self.rows_computed += num_rows
