"""Drafting with an MTP head that selects keys once a round and reuses the selection."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..kernels.checks import check_int
from .autoregressive import AutoRegressiveSpeculator
from .config import SpeculatorConfig
from .draft_model import DraftModel, StepObserver
from .overlap import OverlapProbe
from .runner import GraphRunner
from .sharing import SharingCapability, resolve_sharing
from .step_batch import StepBatch


class MTPSpeculator(AutoRegressiveSpeculator):
    """Toggles `skip_topk` around the draft steps; overrides hooks, and no other control flow.

    Step 0 selects, one row a token. Its rows are then compacted to one a request, and steps
    1..K−1 reuse them. Sharing is on when the draft's config sets
    `index_share_for_mtp_iteration` and the draft has `set_skip_topk` and `compact_topk_indices`
    (see `resolve_sharing`); else every step selects for itself, with the same control flow.

    Args:
        model: the draft.
        config: limits.
        draft_config: object or mapping with `index_share_for_mtp_iteration` (default:
            `model.config`).
        runner: how steps are executed (default: eagerly).
        observer: called after each decode step, outside any graph.
        measure_overlap_every: n, to select afresh as well after the decode steps of every n-th
            round and compare (`overlap`), which changes no draft; None or 0 measures nothing.
        append_new_positions: step s also sees the positions last+1..last+s that the round has
            made itself: they are put in the last K−1 columns of the shared rows, which
            `TopkIndicesBuffer(append_columns=…)` keeps for them. None of the engines does this.
        refresh_every: n, to select afresh at decode steps n, 2n, …, one row a request. Skipping
            steps then still cache their index keys, for that selection to find; the draft needs
            `set_write_skipped_index_k`. None or 0 never does.

    Raises:
        StaleSelectionError: from `propose` and `capture`, when the rows to reuse are not this
            round's, one a request.
        ValueError: for `measure_overlap_every`, `append_new_positions` or `refresh_every` when
            the draft does not share, or lacks what they need.
    """

    def __init__(
        self,
        model: DraftModel,
        config: SpeculatorConfig,
        *,
        draft_config: Any = None,
        runner: GraphRunner | None = None,
        observer: StepObserver | None = None,
        measure_overlap_every: int | None = None,
        append_new_positions: bool = False,
        refresh_every: int | None = None,
    ) -> None:
        self._draft_config = draft_config
        self._append = append_new_positions
        self._refresh = check_int("refresh_every", refresh_every or 0, minimum=0)
        #: Whether the draft shares its selection; set by `load_draft_model`.
        self.share_mtp_topk_indices = False
        super().__init__(model, config, runner=runner, observer=observer)
        #: How much of a fresh selection the shared one holds, by step; None if not measured.
        self.overlap: OverlapProbe | None = None
        if measure_overlap_every is not None and measure_overlap_every != 0:
            self.overlap = OverlapProbe(self, measure_overlap_every)
            self._unmeasured, self._measured = observer, _in_turn(self.overlap, observer)

    def load_draft_model(self, model: DraftModel, draft_config: Any = None) -> None:
        """Drives `model` from now on, and finds out whether it can share.

        Args:
            model: the draft.
            draft_config: in place of the one given to the constructor.
        """
        if draft_config is None:
            draft_config = self._draft_config
        if draft_config is None:
            draft_config = getattr(model, "config", {})
        sharing = resolve_sharing(model, draft_config)
        self._check_options(model, sharing)
        super().load_draft_model(model)
        self.sharing: SharingCapability = sharing
        self.share_mtp_topk_indices = sharing.model is not None
        for buffer in sharing.buffers:
            buffer.track()
        self.runner.watch(sharing.buffers)
        self.steps.extend_selection = self._append_new_positions if self._append else None
        self.refresh_every = self._refresh or None
        set_write = getattr(sharing.model, "set_write_skipped_index_k", None)
        if callable(set_write):
            set_write(bool(self._refresh))

    def graph_state(self) -> Hashable:
        """(skip_topk,): the flag that a graph bakes in."""
        return (self.reusing,)

    def on_prefill_begin(self, num_reqs: int) -> None:
        """Skip off, always: a round that died may have left it on."""
        self._set_skip_topk(False)
        if self.overlap is not None:  # a round without an observer may fuse its steps
            self.observer = self._measured if self.overlap.due else self._unmeasured
        for buffer in self.sharing.buffers:
            buffer.new_generation()

    def on_prefill_end(self, num_reqs: int) -> None:
        """Compacts token rows to request rows; the rest of the request rows become −1."""
        if self.sharing.model is None or self.round_steps <= 1:
            return
        for buffer in self.sharing.buffers:
            buffer.check_compactable()
        self.sharing.model.compact_topk_indices(self.last_token_indices[:num_reqs])
        for buffer in self.sharing.buffers:
            buffer.mark_compacted(self.batches.last_positions, num_reqs)
        self.stats.rows_compacted += num_reqs

    def on_multi_step_decode_begin(self, num_reqs: int) -> None:
        """Skip on, once the rows have proven to be reusable."""
        for buffer in self.sharing.buffers:
            buffer.check_reusable(self.batches.last_positions, num_reqs)
        self._set_skip_topk(True)

    def on_multi_step_decode_end(self, num_reqs: int) -> None:
        """Skip off, whatever happened."""
        self._set_skip_topk(False)

    @contextmanager
    def reselection(self, num_reqs: int) -> Iterator[None]:
        """Skip off for one step, whose rows replace the shared ones."""
        self._set_skip_topk(False)
        for buffer in self.sharing.buffers:
            buffer.forget_appended()  # a fresh selection finds those positions by itself
        yield
        for buffer in self.sharing.buffers:
            buffer.mark_refreshed(num_reqs)
            buffer.check_reusable(self.batches.last_positions, num_reqs)
        self.stats.rows_refreshed += num_reqs
        self._set_skip_topk(True)

    def _check_options(self, model: DraftModel, sharing: SharingCapability) -> None:
        """Raises ValueError unless the draft has what this speculator's options need."""
        needed = max(self.config.num_speculative_steps - 1, 0)
        columns = [buffer.append_columns for buffer in sharing.buffers]
        if self._append and (not columns or min(columns) < needed):
            raise ValueError(
                f"append_new_positions needs shared topk_buffers with append_columns of at least"
                f" {needed}, got {columns}"
            )
        if self._refresh and not callable(
            getattr(sharing.model, "set_write_skipped_index_k", None)
        ):
            raise ValueError(
                f"refresh_every={self._refresh} needs a draft that shares and has"
                f" set_write_skipped_index_k, got {type(model).__name__}"
            )

    def _append_new_positions(self, batch: StepBatch) -> None:
        new = torch.where(batch.slot_mapping >= 0, batch.positions, -1)
        for buffer in self.sharing.buffers:
            buffer.append(new, self.batches.last_positions[: new.shape[0]])

    def _set_skip_topk(self, skip: bool) -> None:
        if self.sharing.model is not None:
            self.sharing.model.set_skip_topk(skip)
            self.reusing = skip


def _in_turn(first: StepObserver, second: StepObserver | None) -> StepObserver:
    if second is None:
        return first

    def both(step: int, batch: StepBatch) -> None:
        first(step, batch)
        second(step, batch)

    return both
