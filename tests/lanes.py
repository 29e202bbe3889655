"""One speculator under a schedule, with a toy draft of its own.

A lane knows which faults reach it and what they leave undone, so that its counters, its caches,
its selection and its flag can be foretold after every call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
from schedules import Fault, Options, Round
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
    """One speculator under the schedule; one that fuses steps has no observer."""

    def __init__(self, config: SpeculatorConfig, runner: GraphRunner, options: Options) -> None:
        self.config, self.options = config, options
        self.flags: list[bool] = []  # seen by the forwards of a call that Python executed
        self.draft = toy_draft(
            config,
            FaultyDraft,
            append_columns=options.append * max(config.num_speculative_steps - 1, 0),
            log=lambda _, flag: self.flags.append(flag),
        )
        self.draft.config = {"index_share_for_mtp_iteration": options.shares}
        buffer = self.draft.buffer
        buffer.append = self._breakable("append", buffer.append)
        buffer.mark_refreshed = self._breakable("refresh", buffer.mark_refreshed)
        self.speculator = MTPSpeculator(
            self.draft,
            config,
            runner=runner,
            observer=None if config.fused_steps else self._observe,
            append_new_positions=options.append,
            refresh_every=options.refresh_every,
        )
        self.recorded = isinstance(runner, RecordedRunner)
        self.captured = False
        self.stats = SpeculatorStats()  # as foretold
        self.address = self.draft.buffer.indices.data_ptr()
        self.round: Round
        self.observer_fails_at = 0
        self.replays = self.fused_replays = 0

    def play(self, round_: Round, fault: Fault | None) -> bool:
        """Runs the round against what must come of it; whether its drafts may be used."""
        whole = not self._fires(fault, round_.steps)
        finished = self._finished(None if whole else fault, round_.steps)
        self._foretell(round_, finished, None if whole else fault)
        self.round = round_
        self.flags.clear()
        cache, index_k = self._caches()
        with self._fault(fault, 0 if fault is None else fault.step):
            if whole:
                assert self._propose(round_) == round_.drafts
                self._check_results()
            else:
                with pytest.raises(RuntimeError, match="broke"):
                    self._propose(round_)
        self._check_untouched("cache", cache, round_.slots)
        skips = self.options.shares and self.options.refresh_every is None
        self._check_untouched("index_k", index_k, round_.step_0_slots if skips else round_.slots)
        begun = finished + (not whole and fault.place == "forward")
        assert self.flags == [self._reuses(s) for s in range(0 if self.captured else begun)]
        self.replays += self.captured * finished
        self.fused_replays += self.captured and round_.steps in self.config.fused_steps
        self.check()
        if not whole and (fault.retried or finished == 0):
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
        cache, index_k = self._caches()
        fails = fault is not None and self._capture_fails(fault)
        self.captured = self.recorded and not fails
        with self._fault(fault, self._forwards_of_capture(fault)):
            if fails:
                with pytest.raises(RuntimeError, match="broke"):
                    self.speculator.capture()
            else:
                self.speculator.capture()
        self._check_untouched("cache", cache, set())
        self._check_untouched("index_k", index_k, set())
        if self.options.shares:
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

    def _caches(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.draft.cache.live.clone(), self.draft.index_k.live.clone()

    def _check_untouched(self, name: str, before: torch.Tensor, but: set[int]) -> None:
        others = torch.ones(num_slots(self.config), dtype=torch.bool)
        others[sorted(but)] = False
        assert torch.equal(getattr(self.draft, name).live[others], before[others])

    def _propose(self, round_: Round) -> list[list[int]]:
        drafts = self.speculator.propose(
            round_.target,
            torch.tensor(round_.rejected, dtype=torch.int64),
            torch.tensor(round_.next_tokens, dtype=torch.int64),
            num_speculative_steps=round_.steps,
            caps=None if round_.caps is None else torch.tensor(round_.caps, dtype=torch.int64),
            sampling=round_.sampling,
        )
        return drafts.tolist()

    def _check_results(self) -> None:
        """What a round leaves besides drafts."""
        round_ = self.round
        if self.options.shares and round_.steps > 1:
            self._check_rows(round_.steps - 1)
        if round_.chances is not None:
            for probs, laws in zip(self.speculator.draft_probs, round_.laws, strict=False):
                for found, law in zip(probs.tolist(), laws, strict=False):
                    assert found == pytest.approx(law, rel=0, abs=1e-9)

    def _check_rows(self, step: int) -> None:
        padding = [[-1] * self.draft.buffer.width] * self.config.max_num_reqs
        expected = [*(rows[step] for rows in self.round.rows), *padding]
        most = self.config.max_num_reqs
        assert self.draft.buffer.indices[:most].tolist() == expected[:most]

    def _observe(self, step: int, batch: StepBatch) -> None:
        assert self.draft.skip_topk == self._reuses(step)
        assert batch.num_reqs == self.round.target.num_reqs
        if self.options.shares:
            self._check_rows(step)
        if step == self.observer_fails_at:
            raise RuntimeError("the observer broke")

    def _reuses(self, step: int) -> bool:
        return self.options.shares and step > 0 and not self.options.refreshes(step)

    def _fires(self, fault: Fault | None, steps: int) -> bool:
        if fault is None:
            return False
        decodes = range(1, steps)
        return {
            "forward": not self.captured and fault.step < max(steps, 1),  # a replay runs none
            "observer": not self.config.fused_steps and fault.step in decodes,
            "append": self.options.append and not self.captured and any(map(self._reuses, decodes)),
            "refresh": any(map(self.options.refreshes, decodes)),
        }.get(fault.place, self.options.shares and steps > 1)

    def _finished(self, fault: Fault | None, steps: int) -> int:
        """Forwards that come to their end."""
        if fault is None:
            return max(steps, 1)
        if fault.place in ("forward", "observer"):
            return fault.step + (fault.place == "observer")
        if fault.place == "append":
            return next(step for step in range(1, steps) if self._reuses(step))
        return self.options.refresh_every + 1 if fault.place == "refresh" else 1

    def _foretell(self, round_: Round, finished: int, fault: Fault | None) -> None:
        counted, place = finished, "" if fault is None else fault.place
        if round_.steps in self.config.fused_steps and place in ("forward", "append"):
            while counted > 1 and not self._begins_graph(counted):
                counted -= 1  # a fused graph counts as a whole
        reqs, stats = round_.target.num_reqs, self.stats
        reused = sum(map(self._reuses, range(1, counted)))
        refreshed = sum(map(self.options.refreshes, range(1, counted)))
        refreshed -= place in ("observer", "refresh") and self.options.refreshes(counted - 1)
        compacts = self.options.shares and round_.steps > 1 and counted > 0 and place != "compact"
        self.stats = replace(
            stats,
            rounds=stats.rounds + 1,
            forwards=stats.forwards + counted,
            rows_computed=stats.rows_computed
            + (counted > 0) * round_.target.num_tokens
            + (max(counted - 1, 0) - reused) * reqs,
            rows_reused=stats.rows_reused + reused * reqs,
            rows_compacted=stats.rows_compacted + compacts * reqs,
            rows_refreshed=stats.rows_refreshed + refreshed * reqs,
        )

    def _begins_graph(self, step: int) -> bool:
        return step == 1 or self.options.refreshes(step) or self.options.refreshes(step - 1)

    def _capture_fails(self, fault: Fault) -> bool:
        decodes = self.config.num_speculative_steps > 1
        return {
            "forward": True,
            "observer": False,
            "append": decodes and self.options.append,
            "refresh": decodes and self.options.refresh_every is not None,
        }.get(fault.place, decodes and self.options.shares)

    def _forwards_of_capture(self, fault: Fault | None) -> int:
        """That succeed: some sixths of all, and each is run once for greedy, once for sampling."""
        fused = set()
        for steps in self.config.fused_steps:
            begins = [step for step in range(1, steps) if self._begins_graph(step)]
            fused |= {
                range(first, end)
                for first, end in zip(begins, [*begins[1:], steps], strict=True)
                if not self.options.refreshes(first)
            }
        per_size = 1 + (self.options.refresh_every is not None) + sum(map(len, fused))
        if self.config.num_speculative_steps <= 1:
            per_size = 0
        forwards = len(self.config.prefill_sizes) + len(self.config.decode_sizes) * per_size
        modes = 1 if self.config.vocab_size is None else 2
        return forwards * modes * (0 if fault is None else fault.step) // 6

    def _breakable(self, place: str, method: Callable[..., None]) -> Callable[..., None]:
        def run(*args: object) -> None:
            method(*args)
            if self.draft.broken == place:
                raise RuntimeError(f"{method.__name__} broke")

        return run

    @contextmanager
    def _fault(self, fault: Fault | None, forwards: int) -> Iterator[None]:
        """Faults of forwards let that many pass."""
        if fault is not None:
            self.draft.broken = fault.place
            if fault.place == "forward":
                self.draft.fail_at = self.draft.forwards + forwards
            self.observer_fails_at = fault.step if fault.place == "observer" else 0
        try:
            yield
        finally:
            self.draft.broken, self.draft.fail_at, self.observer_fails_at = "", None, 0
