"""What a step of drafting does, and how steps are run and captured as graphs."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import NamedTuple

import torch

from .batch import DraftBatches, StepBatch
from .config import SpeculatorConfig
from .draft_model import DraftModel
from .draft_sampler import DraftSampler
from .runner import GraphRunner
from .sampling import SamplingParams

#: Runs a step, or captures it: `GraphRunner.run` or `GraphRunner.capture`.
Execute = Callable[..., None]


class GraphKey(NamedTuple):
    """Names a graph; the flag it bakes in is the runner's `state`.

    Attributes:
        phase: "prefill", "decode", or "refresh", a decode step that selects afresh.
        num_rows: rows of a forward, padding included.
        num_reqs: requests, padding included.
        steps: (first, last) decode step of a fused graph, (1, K−1) for a whole round of K; None
            for a graph of one step, which serves them all.
        sampling: whether tokens are drawn.
    """

    phase: str
    num_rows: int
    num_reqs: int
    steps: tuple[int, int] | None
    sampling: bool


class DraftSteps:
    """Executes a speculator's steps through a runner, in tensors of fixed address.

    A round is `begin`, then `prefill`, then `decode` for every later step. Each step leaves a
    token and a feedback state of every request for the next one.

    Args:
        config: limits.
        runner: how steps are executed.

    Attributes:
        model: the draft.
        batches: builds the rows of every step.
        sampler: chooses the tokens.
        drafts: [max_num_reqs, K] int64: what the round has drafted so far, −1 elsewhere.
        extend_selection: called before the forward of each "decode" step, as part of its graph.
    """

    model: DraftModel

    def __init__(self, config: SpeculatorConfig, runner: GraphRunner) -> None:
        self.batches = DraftBatches(
            max_num_reqs=config.max_num_reqs,
            max_num_tokens=config.max_num_tokens,
            max_model_len=config.max_model_len,
            page_size=config.page_size,
            hidden_size=config.hidden_size,
            dtype=config.dtype,
            device=config.device,
        )
        self.sampler = DraftSampler(config)
        self.extend_selection: Callable[[StepBatch], None] | None = None
        reqs, device = config.max_num_reqs, config.device
        most = config.num_speculative_steps
        self.drafts = torch.full((reqs, most), -1, dtype=torch.int64, device=device)
        self._runner = runner
        self._next_ids = torch.zeros(reqs, dtype=torch.int64, device=device)
        self._feedback = torch.zeros((reqs, config.hidden_size), dtype=config.dtype, device=device)

    def begin(self, sampling: SamplingParams | None) -> None:
        """A new round: nothing is drafted yet."""
        self.drafts.fill_(-1)
        self.sampler.begin(sampling)

    def prefill(self, batch: StepBatch, state: Hashable) -> None:
        """Step 0 over the rows of `batch`, which `batches` has built; `state` is the graphs'."""
        self._one(self._runner.run, "prefill", batch, state)

    def decode(
        self, phase: str, step: int, num_reqs: int, num_reqs_padded: int, state: Hashable
    ) -> StepBatch:
        """Step s ≥ 1 of a round over its batch, which is returned; files what it drafts.

        Args:
            phase: "decode" or "refresh".
            step: s.
            num_reqs: live requests.
            num_reqs_padded: rows.
            state: the graphs'.
        """
        batch = self._batch(step, num_reqs, num_reqs_padded)
        self._one(self._runner.run, phase, batch, state)
        self.keep_drafts(step, num_reqs)
        return batch

    def decode_fused(
        self, steps: range, num_reqs: int, num_reqs_padded: int, state: Hashable
    ) -> None:
        """What `decode` does for each of `steps`, as one graph that builds their batches too."""
        self._fused(self._runner.run, steps, num_reqs, num_reqs_padded, state)

    def capture(self, phase: str, num_rows: int, num_reqs: int, state: Hashable) -> None:
        """Captures one step over `num_rows` dummies of `num_reqs` requests."""
        batch = self.batches.dummy(num_rows, num_reqs)
        for _ in self.sampler.each_mode():
            self._one(self._runner.capture, phase, batch, state)

    def capture_fused(self, steps: range, num_reqs: int, state: Hashable) -> None:
        """Captures `steps` over `num_reqs` dummies as one graph."""
        self.batches.dummy(num_reqs, num_reqs)
        for _ in self.sampler.each_mode():
            self._fused(self._runner.capture, steps, num_reqs, num_reqs, state)

    def keep_drafts(self, step: int, num_reqs: int) -> None:
        """Files what step `step` has drafted."""
        drafted = self.batches.drafted(step)[:num_reqs]
        self.drafts[:num_reqs, step] = torch.where(drafted, self._next_ids[:num_reqs], -1)
        self.sampler.keep(step, num_reqs)

    def _one(self, execute: Execute, phase: str, batch: StepBatch, state: Hashable) -> None:
        reqs = batch.seq_lens.shape[0]
        execute(
            GraphKey(phase, batch.num_tokens_padded, reqs, None, self.sampler.sampling),
            lambda: self._forward(phase, batch),
            state=state,
            num_rows=batch.num_tokens,
            tensors=self._tensors(),
        )

    def _fused(
        self, execute: Execute, steps: range, num_reqs: int, padded: int, state: Hashable
    ) -> None:
        def all_steps() -> None:
            # Of the padded size throughout: the number of live requests is another in each replay.
            for step in steps:
                self._forward("decode", self._batch(step, padded, padded))
                self.keep_drafts(step, padded)

        key = GraphKey("decode", padded, padded, (steps[0], steps[-1]), self.sampler.sampling)
        execute(key, all_steps, state=state, num_rows=num_reqs, tensors=self._tensors())

    def _batch(self, step: int, num_reqs: int, num_reqs_padded: int) -> StepBatch:
        return self.batches.decode(
            step,
            self._next_ids,
            self._feedback,
            num_reqs=num_reqs,
            num_reqs_padded=num_reqs_padded,
        )

    def _forward(self, phase: str, batch: StepBatch) -> None:
        """One forward; leaves a draft token and the feedback state of every request."""
        if phase == "decode" and self.extend_selection is not None:
            self.extend_selection(batch)
        output = self.model.forward(batch)
        for_logits, feedback = output if isinstance(output, tuple) else (output, output)
        reqs, positions = batch.seq_lens.shape[0], batch.positions
        if phase == "prefill":
            last = self.batches.last_token_indices[:reqs]
            positions = self.batches.last_positions[:reqs]
            for_logits, feedback = for_logits[last], feedback[last]
        logits = self.model.compute_logits(for_logits)
        self._next_ids[:reqs] = self.sampler.choose(logits, positions)
        self._feedback[:reqs] = feedback

    def _tensors(self) -> tuple[torch.Tensor, ...]:
        """Whose addresses graphs hold."""
        own = (self.drafts, self._next_ids, self._feedback)
        return *self.batches.tensors(), *own, *self.sampler.tensors()
