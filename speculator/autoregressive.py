"""The control flow of autoregressive drafting: one prefill step, then one row per request."""

from __future__ import annotations

from collections.abc import Hashable

import torch

from .batch import DraftBatches, StepBatch
from .config import SpeculatorConfig
from .draft_model import DraftModel, StepObserver
from .draft_sampler import DraftSampler
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
        self._sampler = DraftSampler(config)
        self.load_draft_model(model)

    @property
    def draft_probs(self) -> torch.Tensor | None:
        """[max_num_reqs, K, V] float64: what the last sampling round drew its drafts from.

        Row r is request r's of that round; what belongs to no draft is unspecified. The next
        sampling round overwrites it, at the same address. None without the config's vocab_size.
        """
        return self._sampler.draft_probs

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
        drafts = self._next_ids.new_full((reqs, self.config.num_speculative_steps), -1)
        if target.num_tokens == 0:
            return drafts
        self.stats.rounds += 1
        self._sampler.begin(sampling)
        padded = _padded(target.num_tokens, self.config.prefill_sizes)
        batch = self.batches.prefill(
            target,
            num_rejected,
            next_tokens,
            num_tokens_padded=padded,
            num_reqs_padded=self.config.max_num_reqs if self.config.prefill_sizes else reqs,
            caps=caps,
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
        step and fires no decode hooks. When it fails, no graph is left.
        """
        reqs = self.config.max_num_reqs
        self.round_steps = self.config.num_speculative_steps
        counted, failed = dict(vars(self.stats)), True
        try:
            self.on_prefill_begin(reqs)
            for size in reversed(self.config.prefill_sizes or (reqs,)):
                self._capture("prefill", self.batches.dummy(size, reqs))
            self.on_prefill_end(reqs)
            if self.round_steps > 1:
                try:
                    self.on_multi_step_decode_begin(reqs)
                    for size in reversed(self.config.decode_sizes):
                        self._capture("decode", self.batches.dummy(size, size))
                finally:
                    self.on_multi_step_decode_end(reqs)
            failed = False
        finally:
            self.runner.end_capture(failed=failed)
            vars(self.stats).update(counted)  # dummies are not counted

    def _run(self, phase: str, batch: StepBatch) -> None:
        self.runner.run(
            self._graph_key(phase, batch),
            lambda: self._step(phase, batch),
            state=self.graph_state(),
            num_rows=batch.num_tokens,
            tensors=self._held_tensors(batch),
        )
        self.stats.count_forward(batch.num_tokens, reused=self.reusing)

    def _capture(self, phase: str, batch: StepBatch) -> None:
        for sampling in self._sampler.modes:
            self._sampler.sampling = sampling
            self.runner.capture(
                self._graph_key(phase, batch),
                lambda: self._step(phase, batch),
                state=self.graph_state(),
                num_rows=batch.num_tokens,
                tensors=self._held_tensors(batch),
            )

    def _held_tensors(self, batch: StepBatch) -> tuple[torch.Tensor, ...]:
        """Whose addresses a graph of a step holds."""
        return *batch.tensors(), self._next_ids, self._feedback, *self._sampler.tensors()

    def _graph_key(self, phase: str, batch: StepBatch) -> Hashable:
        return phase, batch.num_tokens_padded, batch.seq_lens.shape[0], self._sampler.sampling

    def _step(self, phase: str, batch: StepBatch) -> None:
        """One forward; leaves a draft token and the feedback state of every request."""
        output = self.model.forward(batch)
        for_logits, feedback = output if isinstance(output, tuple) else (output, output)
        reqs, positions = batch.seq_lens.shape[0], batch.positions
        if phase == "prefill":
            last, positions = self.last_token_indices[:reqs], self.batches.last_positions[:reqs]
            for_logits, feedback = for_logits[last], feedback[last]
        logits = self.model.compute_logits(for_logits)
        self._next_ids[:reqs] = self._sampler.choose(logits, positions)
        self._feedback[:reqs] = feedback

    def _keep_drafts(self, drafts: torch.Tensor, step: int) -> None:
        reqs = drafts.shape[0]
        drafts[:, step] = torch.where(self.batches.drafted(step)[:reqs], self._next_ids[:reqs], -1)
        self._sampler.keep(step, reqs)


def _padded(size: int, sizes: tuple[int, ...]) -> int:
    """The smallest of `sizes` that holds `size`; `size` itself when none does."""
    return next((s for s in sizes if s >= size), size)
