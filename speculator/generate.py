"""Draft and verify, for several requests at once, until each has its tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Protocol

import torch

from ..indexer.block_table import BlockTable
from .autoregressive import AutoRegressiveSpeculator
from .batch import RequestRows, StepBatch, target_batch, with_hidden
from .schedule import Scheduled, new_requests, schedule
from .verify import verify_greedy

DEFAULT_BATCHED_TOKENS = 2048

#: Called with a request's index and its newly emitted tokens.
TokenCallback = Callable[[int, list[int]], None]


class TargetModel(Protocol):
    """The model whose greedy text is generated."""

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
        accepted: those it would have chosen itself.
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
    max_num_batched_tokens: int | None = None,
    on_tokens: TokenCallback | None = None,
) -> GenerationResult:
    """Generates greedily; with a speculator the tokens are the same and come in fewer rounds.

    Every round runs the target once over all unfinished requests (a prompt in chunks when it
    exceeds the token budget), verifies the drafts, and lets the speculator draft again.

    Args:
        target: the model.
        prompts: token ids of each request, not empty.
        max_new_tokens: tokens to generate for each.
        block_table: pages of the target's and the draft's caches; a row for each prompt.
        speculator: drafts for the target; None decodes plainly.
        max_num_batched_tokens: most target rows in a round; by default the speculator's
            max_num_tokens, or 2048 without one.
        on_tokens: hears of new tokens as they are verified.

    Returns:
        The tokens and the counters of drafting.

    Raises:
        ValueError: for an empty prompt, one that does not fit max_model_len with its new tokens,
            more prompts than rows of the block table, a budget below one row a request, or a
            speculator whose limits do not hold them all.
    """
    steps = speculator.config.num_speculative_steps if speculator is not None else 0
    requests = new_requests(prompts, max_new_tokens, block_table)
    budget = _row_budget(max_num_batched_tokens, len(requests), block_table, speculator)
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
            accepted, next_tokens = _verify(target, batch, scheduled, steps)
            for entry, count, token in zip(scheduled, accepted, next_tokens, strict=True):
                _advance(entry, count, token, result, on_tokens)
            if speculator is not None:
                _draft(speculator, batch, scheduled, rows, accepted, next_tokens, block_table)
    finally:
        for request in requests:
            block_table.release(request.index)
    result.tokens = [r.tokens[r.prompt_len : r.end] for r in requests]
    return result


def _row_budget(
    asked: int | None,
    num_reqs: int,
    block_table: BlockTable,
    speculator: AutoRegressiveSpeculator | None,
) -> int:
    """Target rows a round may have; raises ValueError where limits do not fit together."""
    limits = speculator.config if speculator is not None else None
    if limits is not None:
        for name, got, need in (
            ("max_num_reqs", limits.max_num_reqs, num_reqs),
            ("max_model_len", limits.max_model_len, block_table.max_model_len),
            ("max_num_tokens", limits.max_num_tokens, asked or 1),
        ):
            if got < need:
                raise ValueError(f"speculator's {name} must be at least {need}, got {got}")
        if limits.page_size != block_table.page_size:
            raise ValueError(
                f"speculator's page_size must be {block_table.page_size}, got {limits.page_size}"
            )
    budget = asked
    if budget is None:
        budget = limits.max_num_tokens if limits is not None else DEFAULT_BATCHED_TOKENS
    rows = limits.num_speculative_steps + 1 if limits is not None else 1
    if budget < num_reqs * rows:
        raise ValueError(
            f"max_num_batched_tokens must be at least {num_reqs * rows} (requests × (drafts + 1)),"
            f" got {budget}"
        )
    return budget


def _verify(
    target: TargetModel, batch: StepBatch, scheduled: Sequence[Scheduled], steps: int
) -> tuple[list[int], list[int]]:
    """Accepted drafts and next token of each request; in mid-prompt 0 and the prompt's next."""
    rows, drafts, first = [], [], 0
    for entry in scheduled:
        last_known = first + entry.num_tokens - 1
        rows.append([min(last_known + j, first + entry.num_rows - 1) for j in range(steps + 1)])
        drafts.append([*entry.drafts, *[-1] * (steps - len(entry.drafts))])
        first += entry.num_rows
    device = batch.hidden.device
    logits = target.compute_logits(batch.hidden[torch.tensor(rows, device=device).flatten()])
    choices = logits.argmax(dim=-1).reshape(len(scheduled), steps + 1)
    accepted, next_tokens = verify_greedy(
        choices,
        torch.tensor(drafts, dtype=torch.int64, device=device).reshape(len(scheduled), steps),
    )
    sampled = next_tokens.tolist()
    for i, entry in enumerate(scheduled):
        if not entry.samples:
            sampled[i] = entry.request.tokens[entry.request.computed + entry.num_tokens]
    return accepted.tolist(), sampled


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
    scheduled: Sequence[Scheduled],
    rows: Sequence[RequestRows],
    accepted: Sequence[int],
    next_tokens: Sequence[int],
    block_table: BlockTable,
) -> None:
    """Lets the speculator draft for every unfinished request; mid-prompt drafts are dropped."""
    keep = [i for i, entry in enumerate(scheduled) if not entry.request.finished]
    if not keep:
        return
    if len(keep) < len(scheduled):
        batch = _keep_requests(batch, rows, keep, block_table)
    device = batch.input_ids.device
    rejected = [len(scheduled[i].drafts) - accepted[i] for i in keep]
    drafts = speculator.propose(
        batch,
        torch.tensor(rejected, dtype=torch.int64, device=device),
        torch.tensor([next_tokens[i] for i in keep], dtype=torch.int64, device=device),
    )
    for i, row in zip(keep, drafts.tolist(), strict=True):
        request = scheduled[i].request
        sampled = request.computed == len(request.tokens) - 1
        room = block_table.max_model_len - len(request.tokens) if sampled else 0
        request.drafts = [token for token in row if token >= 0][:room]


def _keep_requests(
    batch: StepBatch, rows: Sequence[RequestRows], keep: Sequence[int], block_table: BlockTable
) -> StepBatch:
    """The batch of some of the requests alone, with their hidden states."""
    ends = list(accumulate(len(r.token_ids) for r in rows))
    places = [row for i in keep for row in range(ends[i] - len(rows[i].token_ids), ends[i])]
    kept = target_batch([rows[i] for i in keep], block_table.table, block_table.page_size)
    return with_hidden(kept, batch.hidden[torch.tensor(places, device=batch.hidden.device)])
