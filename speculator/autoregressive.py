"""The control flow of autoregressive drafting: one prefill step, then one row per request."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager, nullcontext

import torch

from .batch import StepBatch
from .config import SpeculatorConfig
from .draft_model import DraftModel, StepObserver
from .draft_steps import DraftSteps
from .round_checks import check_round
from .runner import EagerRunner, GraphRunner
from .sampling import SamplingParams
from .stats import SpeculatorStats


class AutoRegressiveSpeculator:
    """Drafts K tokens a round for every request, greedily or by sampling.

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
        #: Decode steps that are multiples of it select afresh amid others that reuse.
        self.refresh_every: int | None = None
        #: K of the round in progress.
        self.round_steps = config.num_speculative_steps
        self.steps = DraftSteps(config, self.runner)
        self.batches = self.steps.batches
        self.load_draft_model(model)

    @property
    def draft_probs(self) -> torch.Tensor | None:
        """[max_num_reqs, K, V] float64: what the last sampling round drew its drafts from.

        Row r is request r's of that round; what belongs to no draft is unspecified. The next
        sampling round overwrites it, at the same address. None without the config's vocab_size.
        """
        return self.steps.sampler.draft_probs

    @property
    def last_token_indices(self) -> torch.Tensor:
        """[max_num_reqs] int64: row of each request's last unrejected token; padding is 0."""
        return self.batches.last_token_indices

    def load_draft_model(self, model: DraftModel) -> None:
        """Drives `model` from now on."""
        self.model = self.steps.model = model
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

    def reselection(self, num_reqs: int) -> AbstractContextManager[None]:
        """Around a decode step that selects afresh, every `refresh_every` steps."""
        return nullcontext()

    @torch.no_grad()
    def propose(
        self,
        target: StepBatch,
        num_rejected: torch.Tensor,
        next_tokens: torch.Tensor,
        *,
        num_speculative_steps: int | None = None,
        caps: torch.Tensor | None = None,
        sampling: SamplingParams | None = None,
    ) -> torch.Tensor:
        """Drafts the tokens that follow each request's `next_tokens`.

        Args:
            target: the batch that the target just ran, `hidden` being its output.
            num_rejected: [num_reqs] int: rows at each request's end that were rejected; at least
                one row of every request is not.
            next_tokens: [num_reqs] int: the token sampled after the last unrejected row, or the
                prompt's next one in chunked prefill.
            num_speculative_steps: this round's K, at most the configured one (the default).
            caps: [num_reqs] int: most tokens to draft for each request this round, none for 0 or
                less; a request past its cap writes no cache and sees no key.
            sampling: drafts are drawn at these temperatures, and `draft_probs` holds what from;
                None drafts greedily, as temperature 0 does.

        Returns:
            [num_reqs, configured K] int64, −1 where nothing was drafted: past this round's K,
            past the request's cap or max_model_len, and for dummy requests.

        Raises:
            ValueError: when the batch exceeds the configured limits, or for sampling without the
                config's vocab_size.
        """
        steps = check_round(
            self.config,
            target,
            num_rejected,
            next_tokens,
            steps=num_speculative_steps,
            caps=caps,
            sampling=sampling,
        )
        self.round_steps = steps
        reqs = target.num_reqs
        self.steps.begin(sampling)
        if target.num_tokens > 0:
            self.stats.rounds += 1
            padded = bool(self.config.prefill_sizes)
            batch = self.batches.prefill(
                target,
                num_rejected,
                next_tokens,
                num_tokens_padded=_padded(target.num_tokens, self.config.prefill_sizes),
                num_reqs_padded=self.config.max_num_reqs if padded else reqs,
                caps=caps,
            )
            self._round(batch, reqs)
        return self.steps.drafts[:reqs].clone()

    def _round(self, batch: StepBatch, reqs: int) -> None:
        """Step 0 over `batch`, then the later steps, between the hooks."""
        self.on_prefill_begin(reqs)
        self.steps.prefill(batch, self.graph_state())
        self.stats.count_forward(batch.num_tokens, reused=self.reusing)
        self.on_prefill_end(reqs)
        if self.round_steps > 0:
            self.steps.keep_drafts(0, reqs)
        if self.round_steps <= 1:
            return
        try:
            self.on_multi_step_decode_begin(reqs)
            for steps, refresh in self._segments(self.round_steps):
                with self.reselection(reqs) if refresh else nullcontext():
                    self._decode(steps, reqs, refresh)
        finally:
            self.on_multi_step_decode_end(reqs)

    def _decode(self, steps: range, reqs: int, refresh: bool) -> None:
        """Consecutive decode steps under one value of the flag."""
        padded, state = _padded(reqs, self.config.decode_sizes), self.graph_state()
        fused = self.round_steps in self.config.fused_steps and self.observer is None
        if fused and not refresh:
            self.steps.decode_fused(steps, reqs, padded, state)
            for _ in steps:
                self.stats.count_forward(reqs, reused=self.reusing)
            return
        phase = "refresh" if refresh else "decode"
        for step in steps:
            batch = self.steps.decode(phase, step, reqs, padded, state)
            self.stats.count_forward(reqs, reused=self.reusing)
            if self.observer is not None:
                self.observer(step, batch)

    def _segments(self, num_steps: int) -> Iterator[tuple[range, bool]]:
        """Decode steps of a round of K = num_steps: what lies between refreshes, and those."""
        first, every = 1, self.refresh_every or num_steps
        for refresh in range(every, num_steps, every):
            if first < refresh:
                yield range(first, refresh), False
            yield range(refresh, refresh + 1), True
            first = refresh + 1
        if first < num_steps:
            yield range(first, num_steps), False

    @torch.no_grad()
    def capture(self) -> None:
        """Captures every padded size on dummy batches, firing the same hooks as `propose`.

        No live cache is touched: every slot is −1. A configured K of 1 or less captures no decode
        step and fires no decode hooks. When it fails, no graph is left.
        """
        reqs = self.config.max_num_reqs
        self.round_steps = self.config.num_speculative_steps
        counted, failed = dict(vars(self.stats)), True
        try:
            self.on_prefill_begin(reqs)
            for size in reversed(self.config.prefill_sizes or (reqs,)):
                self.steps.capture("prefill", size, reqs, self.graph_state())
            self.on_prefill_end(reqs)
            if self.round_steps > 1:
                try:
                    self.on_multi_step_decode_begin(reqs)
                    for size in reversed(self.config.decode_sizes):
                        self._capture_decode(size)
                finally:
                    self.on_multi_step_decode_end(reqs)
            failed = False
        finally:
            self.runner.end_capture(failed=failed)
            vars(self.stats).update(counted)  # dummies are not counted

    def _capture_decode(self, size: int) -> None:
        """Captures every graph of decode steps over `size` rows."""
        self.steps.capture("decode", size, size, self.graph_state())
        if self.refresh_every is not None:
            with self.reselection(size):
                self.steps.capture("refresh", size, size, self.graph_state())
        rounds = [self._segments(num_steps) for num_steps in self.config.fused_steps]
        for steps in {steps for round_ in rounds for steps, refresh in round_ if not refresh}:
            self.steps.capture_fused(steps, size, self.graph_state())


def _padded(size: int, sizes: tuple[int, ...]) -> int:
    """The smallest of `sizes` that holds `size`; `size` itself when none does."""
    return next((s for s in sizes if s >= size), size)
