"""Draft and verify, for several requests at once, until each has its tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Protocol

import torch

from ..indexer.block_table import BlockTable
from .autoregressive import AutoRegressiveSpeculator
from .batch import target_batch, with_hidden
from .rejection import rejection_sample
from .sampling import SamplingParams
from .schedule import Scheduled, new_requests, row_budget, schedule
from .step_batch import RequestRows, StepBatch
from .verify import verify_greedy

#: Called with a request's index and its newly emitted tokens.
TokenCallback = Callable[[int, list[int]], None]


class TargetModel(Protocol):
    """The model whose text is generated."""

    def forward(self, batch: StepBatch) -> torch.Tensor:
        """Hidden states [T, hidden_size] of the rows, whose keys it has cached."""

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [n, vocab] of hidden states [n, hidden_size]."""


@dataclass
class GenerationResult:
    """What was generated, and how drafting did.

    Attributes:
        tokens: new tokens of each prompt, max_new_tokens long.
        rounds: verification rounds, counted once a request: without a speculator, one a token
            after the first.
        drafted: draft tokens that the target verified.
        accepted: those that it let stand.
        drafted_by_position: drafted, by place in the draft.
        accepted_by_position: accepted, by place in the draft.
    """

    tokens: list[list[int]]
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    drafted_by_position: list[int] = field(default_factory=list)
    accepted_by_position: list[int] = field(default_factory=list)

    def acceptance_by_position(self) -> list[float]:
        """Share of accepted drafts by place, 0 where none was drafted."""
        pairs = zip(self.accepted_by_position, self.drafted_by_position, strict=True)
        return [accepted / drafted if drafted else 0.0 for accepted, drafted in pairs]


@torch.no_grad()
def generate(
    target: TargetModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    block_table: BlockTable,
    speculator: AutoRegressiveSpeculator | None = None,
    sampling: SamplingParams | None = None,
    max_num_batched_tokens: int | None = None,
    on_tokens: TokenCallback | None = None,
) -> GenerationResult:
    """Generates; a speculator lets the tokens come in fewer rounds.

    Greedily, the tokens are the same with a speculator and without. With `sampling` they have the
    same distribution, and come again for the same seeds. (With a speculator they are other tokens
    than without: acceptance uses random numbers that plain sampling has no need of.)

    Every round runs the target once over all unfinished requests (a prompt in chunks when it
    exceeds the token budget), verifies the drafts, and lets the speculator draft again.

    Args:
        target: the model.
        prompts: token ids of each request, not empty.
        max_new_tokens: tokens to generate for each.
        block_table: pages of the target's and the draft's caches; a row for each prompt.
        speculator: drafts for the target; None decodes plainly. It samples too if its config has
            a vocab_size, and else drafts greedily.
        sampling: how each prompt samples; None is greedy.
        max_num_batched_tokens: most target rows in a round; by default the speculator's
            max_num_tokens, or 2048 without one.
        on_tokens: hears of new tokens as they are verified.

    Returns:
        The tokens and the counters of drafting.

    Raises:
        ValueError: for an empty prompt, one that does not fit max_model_len with its new tokens,
            more prompts than rows of the block table, a budget below one row a request, a
            speculator whose limits do not hold them all, or sampling for another number of prompts.
    """
    steps = speculator.config.num_speculative_steps if speculator is not None else 0
    requests = new_requests(prompts, max_new_tokens, block_table)
    limits = speculator.config if speculator is not None else None
    budget = row_budget(max_num_batched_tokens, len(requests), block_table, limits)
    if sampling is not None and sampling.num_reqs != len(requests):
        raise ValueError(f"sampling must have {len(requests)} rows, got {sampling.num_reqs}")
    result = GenerationResult(
        [[] for _ in requests], drafted_by_position=[0] * steps, accepted_by_position=[0] * steps
    )
    try:
        while running := [request for request in requests if not request.finished]:
            scheduled = schedule(running, budget)
            for entry in scheduled:  # room for the rows and for the drafts that follow them
                length = entry.request.computed + entry.num_rows + steps
                length = min(length, block_table.max_model_len)
                block_table.allocate(entry.request.index, length)
            rows = [entry.rows() for entry in scheduled]
            batch = target_batch(rows, block_table.table, block_table.page_size)
            batch = with_hidden(batch, target.forward(batch))
            accepted, next_tokens = _verify(target, batch, scheduled, steps, speculator, sampling)
            for entry, count, token in zip(scheduled, accepted, next_tokens, strict=True):
                _advance(entry, count, token, result, on_tokens)
            if speculator is not None:
                verified = list(zip(scheduled, rows, accepted, next_tokens, strict=True))
                _draft(speculator, batch, verified, block_table, sampling)
    finally:
        for request in requests:
            block_table.release(request.index)
    result.tokens = [r.tokens[r.prompt_len : r.end] for r in requests]
    return result


def _verify(
    target: TargetModel,
    batch: StepBatch,
    scheduled: Sequence[Scheduled],
    steps: int,
    speculator: AutoRegressiveSpeculator | None,
    sampling: SamplingParams | None,
) -> tuple[list[int], list[int]]:
    """Accepted drafts and next token of each request; in mid-prompt 0 and the prompt's next."""
    rows, drafts, prompt, places, first = [], [], [], [], 0
    for entry in scheduled:
        last_known = first + entry.num_tokens - 1
        rows.append([min(last_known + j, first + entry.num_rows - 1) for j in range(steps + 1)])
        drafts.append([*entry.drafts, *[-1] * (steps - len(entry.drafts))])
        places.append(entry.request.computed + entry.num_tokens)
        prompt.append(-1 if entry.samples else entry.request.tokens[places[-1]])
        first += entry.num_rows
    device = batch.hidden.device

    logits = target.compute_logits(batch.hidden[_int64(rows, device).flatten()])
    logits = logits.reshape(len(scheduled), steps + 1, -1)
    draft_tokens = _int64(drafts, device).reshape(len(scheduled), steps)
    prompt_tokens = _int64(prompt, device)
    if sampling is None:
        accepted, next_tokens = verify_greedy(
            logits.argmax(dim=-1), draft_tokens, prompt_tokens=prompt_tokens
        )
    else:
        q = speculator.draft_probs if speculator is not None else None
        if q is not None:
            q = q[_int64([entry.request.draft_row for entry in scheduled], device)]
        accepted, next_tokens = rejection_sample(
            logits,
            draft_tokens,
            q,
            sampling.rows(_int64([entry.request.index for entry in scheduled], device)),
            _int64(places, device),
            prompt_tokens=prompt_tokens,
        )
    return accepted.tolist(), next_tokens.tolist()


def _advance(
    entry: Scheduled,
    accepted: int,
    next_token: int,
    result: GenerationResult,
    on_tokens: TokenCallback | None,
) -> None:
    """Books what the target has verified."""
    request = entry.request
    if not entry.samples:
        request.computed += entry.num_tokens
        return
    if request.computed >= request.prompt_len:  # the prompt's own round verifies nothing
        result.rounds += 1
    for position in range(len(entry.drafts)):
        result.drafted_by_position[position] += 1
        result.accepted_by_position[position] += position < accepted
    result.drafted += len(entry.drafts)
    result.accepted += accepted
    request.computed = len(request.tokens) + accepted
    emitted = [*entry.drafts[:accepted], next_token][: request.end - len(request.tokens)]
    request.tokens.extend(emitted)
    if on_tokens is not None:
        on_tokens(request.index, emitted)


def _draft(
    speculator: AutoRegressiveSpeculator,
    batch: StepBatch,
    verified: Sequence[tuple[Scheduled, RequestRows, int, int]],
    block_table: BlockTable,
    sampling: SamplingParams | None,
) -> None:
    """Lets the speculator draft for every unfinished request, not past what can be verified."""
    kept = [i for i, (entry, *_) in enumerate(verified) if not entry.request.finished]
    if not kept:
        return
    if len(kept) < len(verified):
        batch = _keep_requests(batch, [rows for _, rows, *_ in verified], kept, block_table)
    entries, _, accepted, next_tokens = zip(*(verified[i] for i in kept), strict=True)
    requests = [entry.request for entry in entries]
    device = batch.input_ids.device

    rooms = []
    for request in requests:
        sampled = request.computed == len(request.tokens) - 1  # not in mid-prompt
        rooms.append(block_table.max_model_len - len(request.tokens) if sampled else 0)
    options: dict[str, Any] = {}
    steps = speculator.config.num_speculative_steps
    if min(rooms) < steps:
        options = {"num_speculative_steps": min(max(rooms), steps), "caps": _int64(rooms, device)}
    if sampling is not None and speculator.draft_probs is not None:
        options["sampling"] = sampling.rows(_int64([request.index for request in requests], device))
    rejected = [len(e.drafts) - count for e, count in zip(entries, accepted, strict=True)]
    drafts = speculator.propose(
        batch, _int64(rejected, device), _int64(next_tokens, device), **options
    ).tolist()
    for row, request in enumerate(requests):
        request.drafts = [token for token in drafts[row] if token >= 0]
        request.draft_row = row


def _keep_requests(
    batch: StepBatch, rows: Sequence[RequestRows], keep: Sequence[int], block_table: BlockTable
) -> StepBatch:
    """The batch of some of the requests alone, with their hidden states."""
    ends = list(accumulate(len(r.token_ids) for r in rows))
    places = [row for i in keep for row in range(ends[i] - len(rows[i].token_ids), ends[i])]
    kept = target_batch([rows[i] for i in keep], block_table.table, block_table.page_size)
    return with_hidden(kept, batch.hidden[torch.tensor(places, device=batch.hidden.device)])


def _int64(values: Sequence[int] | Sequence[list[int]], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)
