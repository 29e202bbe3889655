"""One speculator under a schedule, with a toy draft of its own.

A lane knows which faults reach it and what they leave undone, so that its counters, its cache and
its flag can be foretold after every call.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from lightning_indexer.indexer.buffer import SelectionKind
from lightning_indexer.speculator.batch import StepBatch
from lightning_indexer.speculator.config import SpeculatorConfig
from lightning_indexer.speculator.mtp import MTPSpeculator
from lightning_indexer.speculator.recorded import RecordedRunner
from lightning_indexer.speculator.runner import GraphRunner
from lightning_indexer.speculator.stats import SpeculatorStats
from schedules import NOTHING, Fault, Round
from toy import SharingDraft, num_slots, toy_draft


class FaultyDraft(SharingDraft):
    """Its callables do their work, and raise then."""

    broken = ""

    def set_skip_topk(self, skip: bool) -> None:
        super().set_skip_topk(skip)
        if skip and self.broken == "skip":
            raise RuntimeError("set_skip_topk broke")

    def compact_topk_indices(self, rows: torch.Tensor) -> None:
        super().compact_topk_indices(rows)
        if self.broken == "compact":
            raise RuntimeError("compact_topk_indices broke")


class Lane:
    """One speculator under the schedule."""

    def __init__(self, config: SpeculatorConfig, runner: GraphRunner, *, shares: bool) -> None:
        self.config, self.shares = config, shares
        self.flags: list[bool] = []  # seen by the forwards of a call that Python executed
        self.draft = toy_draft(config, FaultyDraft, log=lambda _, flag: self.flags.append(flag))
        self.draft.config = {"index_share_for_mtp_iteration": shares}
        self.speculator = MTPSpeculator(self.draft, config, runner=runner, observer=self._observe)
        self.recorded = isinstance(runner, RecordedRunner)
        self.captured = False
        self.stats = SpeculatorStats()  # as foretold
        self.address = self.draft.buffer.indices.data_ptr()
        self.anchors: list[list[int]] = []
        self.observer_fails_at = 0
        self.replays = 0

    def play(self, round_: Round, fault: Fault | None) -> bool:
        """Runs the round against what must come of it; whether its drafts may be used."""
        done, whole = (
            self._forwards_before(fault, round_.steps),
            not self._fires(fault, round_.steps),
        )
        self._foretell(round_, done, compacted=done > 0 and (whole or fault.place != "compact"))
        self.anchors = round_.anchors
        self.flags.clear()
        before = self.draft.cache.live.clone()
        with self._fault(fault):
            if whole:
                assert self._propose(round_) == round_.drafts
            else:
                with pytest.raises(RuntimeError, match="broke"):
                    self._propose(round_)
        others = torch.ones(num_slots(self.config), dtype=torch.bool)
        others[sorted(round_.slots)] = False
        assert torch.equal(self.draft.cache.live[others], before[others])
        begun = done + (not whole and fault.place == "forward")
        flags = [step > 0 and self.shares for step in range(begun)]
        assert self.flags == ([] if self.captured else flags)
        self.replays += self.captured * begun
        self.check()
        if not whole and (fault.retried or done == 0):
            return self.play(round_, None)
        return whole

    def play_nothing(self, empty: Round) -> None:
        """A round of no requests is no work."""
        self.flags.clear()
        assert self._propose(empty) == []
        assert not self.flags
        self.check()

    def capture(self, fault: Fault | None) -> bool:
        """Captures, or fails to; whether it did. Live caches stay as they are."""
        before = self.draft.cache.live.clone()
        fails = fault is not None and self._capture_fails(fault)
        self.captured = self.recorded and not fails
        with self._fault(fault):
            if fails:
                with pytest.raises(RuntimeError, match="broke"):
                    self.speculator.capture()
            else:
                self.speculator.capture()
        assert torch.equal(self.draft.cache.live, before)
        if self.shares:
            assert self.draft.buffer.state.kind is SelectionKind.EMPTY
        self.check()
        return not fails

    def reload(self) -> None:
        """The same draft again: its graphs are gone, its cache is not."""
        self.speculator.load_draft_model(self.draft)
        self.captured = False

    def check(self) -> None:
        """Holds between any two calls."""
        assert not self.draft.skip_topk
        assert self.speculator.graph_state() == (False,)
        assert self.draft.buffer.indices.data_ptr() == self.address
        assert self.speculator.stats == self.stats

    def _propose(self, round_: Round) -> list[list[int]]:
        drafts = self.speculator.propose(
            round_.target,
            torch.tensor(round_.rejected, dtype=torch.int64),
            torch.tensor(round_.next_tokens, dtype=torch.int64),
            num_speculative_steps=round_.steps,
            caps=None if round_.caps is None else torch.tensor(round_.caps, dtype=torch.int64),
        )
        return drafts.tolist()

    def _observe(self, step: int, batch: StepBatch) -> None:
        assert self.draft.skip_topk == self.shares
        if self.shares:
            rows = self.draft.buffer.indices[: self.config.max_num_reqs].tolist()
            padding = [NOTHING] * (self.config.max_num_reqs - batch.num_reqs)
            assert rows == self.anchors + padding
        if step == self.observer_fails_at:
            raise RuntimeError("the observer broke")

    def _fires(self, fault: Fault | None, steps: int) -> bool:
        if fault is None:
            return False
        if fault.place == "forward":  # which a replay does not run
            return not self.captured and fault.step < max(steps, 1)
        if fault.place == "observer":
            return 1 <= fault.step < steps
        return self.shares and steps > 1

    def _forwards_before(self, fault: Fault | None, steps: int) -> int:
        if not self._fires(fault, steps):
            return max(steps, 1)
        return {"forward": fault.step, "observer": fault.step + 1}.get(fault.place, 1)

    def _capture_fails(self, fault: Fault) -> bool:
        if fault.place == "forward":
            sizes = len(self.config.prefill_sizes)
            decodes = self.config.num_speculative_steps > 1
            return fault.step < sizes + decodes * len(self.config.decode_sizes)
        called = self.shares and self.config.num_speculative_steps > 1
        return called and fault.place != "observer"

    def _foretell(self, round_: Round, done: int, *, compacted: bool) -> None:
        stats, reqs = self.stats, round_.target.num_reqs
        decoded = max(done - 1, 0) * reqs
        shared = self.shares and round_.steps > 1
        self.stats = replace(
            stats,
            rounds=stats.rounds + 1,
            forwards=stats.forwards + done,
            rows_computed=stats.rows_computed
            + (done > 0) * round_.target.num_tokens
            + (not self.shares) * decoded,
            rows_reused=stats.rows_reused + self.shares * decoded,
            rows_compacted=stats.rows_compacted + (shared and compacted) * reqs,
        )

    @contextmanager
    def _fault(self, fault: Fault | None) -> Iterator[None]:
        if fault is not None:
            self.draft.broken = fault.place
            if fault.place == "forward":
                self.draft.fail_at = self.draft.forwards + fault.step
            self.observer_fails_at = fault.step if fault.place == "observer" else 0
        try:
            yield
        finally:
            self.draft.broken, self.draft.fail_at, self.observer_fails_at = "", None, 0
