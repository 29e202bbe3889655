"""The control flow of autoregressive drafting: one prefill step, then one row per request."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Protocol

import torch

from ..kernels.checks import check_int, check_tensor
from .batch import DraftBatches, StepBatch
from .config import SpeculatorConfig
from .runner import EagerRunner, GraphRunner
from .stats import SpeculatorStats

#: Called after decode step s ≥ 1 with the step and its batch; must not change any output.
StepObserver = Callable[[int, StepBatch], None]


class DraftModel(Protocol):
    """What a speculator drives."""

    def forward(self, batch: StepBatch) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Hidden states [Tp, hidden_size] of the batch's rows.

        Or a pair: the states that `compute_logits` takes, and those fed to the next step.
        """

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [n, vocab] of hidden states [n, hidden_size]."""


class AutoRegressiveSpeculator:
    """Drafts K tokens a round for every request, greedily.

    Owns the whole control flow. A subclass overrides the four hooks, and `graph_state`, and
    nothing else; every hook gets the real number of requests, however batches are padded.

    Args:
        model: the draft.
        config: limits.
        runner: how steps are executed (default: eagerly).
        observer: called after each decode step, outside any graph.

    Source: the hooks are those of vLLM's `AutoRegressiveSpeculator` (PR #47352).
    """

    def __init__(
        self,
        model: DraftModel,
        config: SpeculatorConfig,
        *,
        runner: GraphRunner | None = None,
        observer: StepObserver | None = None,
    ) -> None:
        self.config = config
        self.runner: GraphRunner = runner if runner is not None else EagerRunner()
        self.observer = observer
        self.stats = SpeculatorStats()
        #: Whether forwards reuse the selection now; moved by the hooks.
        self.reusing = False
        #: K of the round in progress.
        self.round_steps = config.num_speculative_steps
        self.batches = DraftBatches(
            max_num_reqs=config.max_num_reqs,
            max_num_tokens=config.max_num_tokens,
            max_model_len=config.max_model_len,
            page_size=config.page_size,
            hidden_size=config.hidden_size,
            dtype=config.dtype,
            device=config.device,
        )
        self._next_ids = torch.zeros(config.max_num_reqs, dtype=torch.int64, device=config.device)
        self._feedback = torch.zeros(
            (config.max_num_reqs, config.hidden_size), dtype=config.dtype, device=config.device
        )
        self.load_draft_model(model)

    @property
    def last_token_indices(self) -> torch.Tensor:
        """[max_num_reqs] int64: row of each request's last unrejected token; padding is 0."""
        return self.batches.last_token_indices

    def load_draft_model(self, model: DraftModel) -> None:
        """Drives `model` from now on."""
        self.model = model
        self.runner.watch(())  # also forgets the graphs of the model before

    def on_prefill_begin(self, num_reqs: int) -> None:
        """Before step 0."""

    def on_prefill_end(self, num_reqs: int) -> None:
        """After step 0, outside any graph."""

    def on_multi_step_decode_begin(self, num_reqs: int) -> None:
        """Before steps 1..K−1; not fired when K ≤ 1."""

    def on_multi_step_decode_end(self, num_reqs: int) -> None:
        """After them, also when one of them, or the begin hook, has raised."""

    def graph_state(self) -> Hashable:
        """What a captured graph bakes in besides shapes; a replay under another value raises."""
        return ()

    @torch.no_grad()
    def propose(
        self,
        target: StepBatch,
        num_rejected: torch.Tensor,
        next_tokens: torch.Tensor,
        *,
        num_speculative_steps: int | None = None,
    ) -> torch.Tensor:
        """Drafts the tokens that follow each request's `next_tokens`.

        Args:
            target: the batch that the target just ran, `hidden` being its output.
            num_rejected: [num_reqs] int: rows at each request's end that were rejected; at least
                one row of every request is not.
            next_tokens: [num_reqs] int: the token sampled after the last unrejected row, or the
                prompt's next one in chunked prefill.
            num_speculative_steps: this round's K, at most the configured one (the default).

        Returns:
            [num_reqs, configured K] int64, −1 where nothing was drafted: past this round's K,
            past max_model_len, and for dummy requests.

        Raises:
            ValueError: when the batch exceeds the configured limits.
        """
        steps = self._check_round(target, num_rejected, next_tokens, num_speculative_steps)
        self.round_steps = steps
        reqs = target.num_reqs
        drafts = self._next_ids.new_full((reqs, self.config.num_speculative_steps), -1)
        if target.num_tokens == 0:
            return drafts
        self.stats.rounds += 1
        padded = _padded(target.num_tokens, self.config.prefill_sizes)
        batch = self.batches.prefill(
            target,
            num_rejected,
            next_tokens,
            num_tokens_padded=padded,
            num_reqs_padded=self.config.max_num_reqs if self.config.prefill_sizes else reqs,
        )
        self.on_prefill_begin(reqs)
        self._run("prefill", batch)
        self.on_prefill_end(reqs)
        if steps > 0:
            self._keep_drafts(drafts, 0)
        if steps <= 1:
            return drafts
        try:
            self.on_multi_step_decode_begin(reqs)
            for step in range(1, steps):
                batch = self.batches.decode(
                    step,
                    self._next_ids,
                    self._feedback,
                    num_reqs=reqs,
                    num_reqs_padded=_padded(reqs, self.config.decode_sizes),
                )
                self._run("decode", batch)
                self._keep_drafts(drafts, step)
                if self.observer is not None:
                    self.observer(step, batch)
        finally:
            self.on_multi_step_decode_end(reqs)
        return drafts

    @torch.no_grad()
    def capture(self) -> None:
        """Captures every padded size on dummy batches, firing the same hooks as `propose`.

        No live cache is touched: every slot is −1. A configured K of 1 or less captures no decode
        step and fires no decode hooks.
        """
        reqs = self.config.max_num_reqs
        self.round_steps = self.config.num_speculative_steps
        counted = dict(vars(self.stats))
        try:
            self.on_prefill_begin(reqs)
            for size in reversed(self.config.prefill_sizes or (reqs,)):
                self._capture("prefill", self.batches.dummy(size, reqs))
            self.on_prefill_end(reqs)
            if self.round_steps <= 1:
                return
            try:
                self.on_multi_step_decode_begin(reqs)
                for size in reversed(self.config.decode_sizes):
                    self._capture("decode", self.batches.dummy(size, size))
            finally:
                self.on_multi_step_decode_end(reqs)
        finally:
            self.runner.end_capture()
            vars(self.stats).update(counted)  # dummies are not counted

    def _run(self, phase: str, batch: StepBatch) -> None:
        self.runner.run(
            _graph_key(phase, batch),
            lambda: self._step(phase, batch),
            state=self.graph_state(),
            num_rows=batch.num_tokens,
        )
        self.stats.count_forward(batch.num_tokens, reused=self.reusing)

    def _capture(self, phase: str, batch: StepBatch) -> None:
        self.runner.capture(
            _graph_key(phase, batch),
            lambda: self._step(phase, batch),
            state=self.graph_state(),
            num_rows=batch.num_tokens,
        )

    def _step(self, phase: str, batch: StepBatch) -> None:
        """One forward; leaves a draft token and the feedback state of every request."""
        output = self.model.forward(batch)
        for_logits, feedback = output if isinstance(output, tuple) else (output, output)
        reqs = batch.seq_lens.shape[0]
        if phase == "prefill":
            last = self.last_token_indices[:reqs]
            for_logits, feedback = for_logits[last], feedback[last]
        self._next_ids[:reqs] = self.model.compute_logits(for_logits).argmax(dim=-1)
        self._feedback[:reqs] = feedback

    def _keep_drafts(self, drafts: torch.Tensor, step: int) -> None:
        reqs = drafts.shape[0]
        drafts[:, step] = torch.where(self.batches.drafted(step)[:reqs], self._next_ids[:reqs], -1)

    def _check_round(
        self,
        target: StepBatch,
        num_rejected: torch.Tensor,
        next_tokens: torch.Tensor,
        steps: int | None,
    ) -> int:
        config = self.config
        most = config.num_speculative_steps
        steps = most if steps is None else check_int("num_speculative_steps", steps, minimum=0)
        for name, got, limit in (
            ("num_speculative_steps", steps, most),
            ("target.num_reqs", target.num_reqs, config.max_num_reqs),
            ("target.num_tokens", target.num_tokens, config.max_num_tokens),
        ):
            if got > limit:
                raise ValueError(f"{name} must be at most {limit}, got {got}")
        if target.page_size != config.page_size:
            raise ValueError(f"target.page_size must be {config.page_size}, got {target.page_size}")
        check_tensor(
            "target.hidden", target.hidden, shape=(target.num_tokens_padded, config.hidden_size)
        )
        check_tensor("num_rejected", num_rejected, shape=(target.num_reqs,))
        check_tensor("next_tokens", next_tokens, shape=(target.num_reqs,))
        return steps


def _graph_key(phase: str, batch: StepBatch) -> Hashable:
    return phase, batch.num_tokens_padded, batch.seq_lens.shape[0]


def _padded(size: int, sizes: tuple[int, ...]) -> int:
    """The smallest of `sizes` that holds `size`; `size` itself when none does."""
    return next((s for s in sizes if s >= size), size)
