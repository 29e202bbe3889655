"""How much of a fresh selection the shared one holds, measured without changing any output."""

from __future__ import annotations

import torch

from .mtp import MTPSpeculator
from .step_batch import StepBatch


class OverlapProbe:
    """A step observer: after each sharing step it lets the draft select afresh, and compares.

        overlap(s) = mean over requests of |shared ∩ fresh at step s| / |fresh at step s|

    The shadow forward writes the keys that the real one wrote, and index keys at slots that the
    next round's step 0 rewrites before anything reads them; the shared rows are put back. Its
    own hidden states are dropped. Costs one forward a step: a probe, not for timed runs.

    Args:
        speculator: must share its selection, and the draft must have `topk_buffers`.
    """

    def __init__(self, speculator: MTPSpeculator) -> None:
        if not speculator.share_mtp_topk_indices or not speculator.sharing.buffers:
            raise ValueError(
                "speculator must share the rows of tracked buffers, got"
                f" share_mtp_topk_indices={speculator.share_mtp_topk_indices} and"
                f" {len(speculator.sharing.buffers)} buffers"
            )
        self._speculator = speculator
        steps = max(speculator.config.num_speculative_steps - 1, 0)
        self._sums = [0.0] * steps
        self._counts = [0] * steps

    def __call__(self, step: int, batch: StepBatch) -> None:
        """Compares the selections of decode step `step`."""
        sharing = self._speculator.sharing
        assert sharing.model is not None, "checked by the constructor"
        kept = [buffer.indices.clone() for buffer in sharing.buffers]
        sharing.model.set_skip_topk(False)
        try:
            self._speculator.model.forward(batch)
            for buffer, shared in zip(sharing.buffers, kept, strict=True):
                self._add(step, shared[: batch.num_reqs], buffer.rows(batch.num_reqs))
        finally:
            sharing.model.set_skip_topk(True)
            for buffer, shared in zip(sharing.buffers, kept, strict=True):
                buffer.indices.copy_(shared)

    def by_step(self) -> list[float]:
        """Mean overlap of steps 1..K−1, 0 for a step that never ran."""
        pairs = zip(self._sums, self._counts, strict=True)
        return [total / count if count else 0.0 for total, count in pairs]

    def _add(self, step: int, shared: torch.Tensor, fresh: torch.Tensor) -> None:
        selected = fresh >= 0
        held = (fresh.unsqueeze(2) == shared.unsqueeze(1)).any(2) & selected
        sizes = selected.sum(1)
        live = sizes > 0  # rows past max_model_len select nothing
        shares = held.sum(1)[live] / sizes[live]
        self._sums[step - 1] += float(shares.sum())
        self._counts[step - 1] += int(live.sum())
