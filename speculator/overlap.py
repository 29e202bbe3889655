"""How much of a fresh selection the shared one holds, measured without changing any output."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..kernels.checks import check_int
from .step_batch import StepBatch

if TYPE_CHECKING:  # which makes a probe itself
    from .mtp import MTPSpeculator


class OverlapProbe:
    """A step observer: after a sharing step it lets the draft select afresh, and compares.

        overlap(s) = mean over requests of |shared ∩ fresh at step s| / |fresh at step s|

    A shadow forward selects; then the shared rows are put back and the sharing step runs once
    more, because a draft of several layers has written keys that its selection shaped. Index keys
    stay at slots that the next round's step 0 rewrites before anything reads them. Both outputs
    are dropped, and `stats` counts neither. Costs two eager forwards a measured step, and no host
    synchronisation before `by_step`.

    Args:
        speculator: must share its selection, and the draft must have `topk_buffers`.
        every: measure each round whose number, `stats.rounds`, is a multiple of this.
    """

    def __init__(self, speculator: MTPSpeculator, every: int = 1) -> None:
        if not speculator.share_mtp_topk_indices or not speculator.sharing.buffers:
            raise ValueError(
                "speculator must share the rows of tracked buffers, got"
                f" share_mtp_topk_indices={speculator.share_mtp_topk_indices} and"
                f" {len(speculator.sharing.buffers)} buffers"
            )
        self.every = check_int("every", every, minimum=1)
        self._speculator = speculator
        steps = max(speculator.config.num_speculative_steps - 1, 0)
        device = speculator.sharing.buffers[0].indices.device
        self._sums = torch.zeros(steps, dtype=torch.float64, device=device)
        self._counts = torch.zeros(steps, dtype=torch.int64, device=device)

    @property
    def due(self) -> bool:
        """Whether the round that the speculator has begun is measured."""
        return self._speculator.stats.rounds % self.every == 0

    def __call__(self, step: int, batch: StepBatch) -> None:
        """Compares the selections of decode step `step`, if it shares and its round is due."""
        speculator = self._speculator
        if not speculator.reusing or not self.due:
            return
        sharing = speculator.sharing
        assert sharing.model is not None, "a step reuses rows only if they can be shared"
        kept = [buffer.indices.clone() for buffer in sharing.buffers]
        sharing.model.set_skip_topk(False)
        for buffer in sharing.buffers:
            buffer.forget_appended()
        try:
            speculator.model.forward(batch)
            for buffer, shared in zip(sharing.buffers, kept, strict=True):
                self._add(step, shared[: batch.num_reqs], buffer.rows(batch.num_reqs))
        finally:
            sharing.model.set_skip_topk(True)
            for buffer, shared in zip(sharing.buffers, kept, strict=True):
                buffer.indices.copy_(shared)
        speculator.model.forward(batch)

    def by_step(self) -> list[float]:
        """Mean overlap of steps 1..K−1, 0 for a step that was never measured."""
        return (self._sums / self._counts.clamp_min(1)).tolist()

    def rows_by_step(self) -> list[int]:
        """Rows that the means of steps 1..K−1 are over; a row that selects nothing is not one."""
        return self._counts.tolist()

    def _add(self, step: int, shared: torch.Tensor, fresh: torch.Tensor) -> None:
        """Takes in selections [R, W], both −1 where a row selects fewer keys."""
        ascending = shared.sort(dim=1).values
        at = torch.searchsorted(ascending, fresh.contiguous()).clamp_max(shared.shape[1] - 1)
        selected = fresh >= 0
        held = (ascending.gather(1, at) == fresh) & selected
        sizes = selected.sum(1)
        self._sums[step - 1] += (held.sum(1).double() / sizes.clamp_min(1)).sum()
        self._counts[step - 1] += (sizes > 0).sum()  # rows past max_model_len select nothing
