"""Which tokens of which requests the target runs next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..indexer.block_table import BlockTable
from ..kernels.checks import check_int
from .config import SpeculatorConfig
from .step_batch import RequestRows

DEFAULT_BATCHED_TOKENS = 2048


@dataclass
class Request:
    """A prompt on its way to `end` tokens.

    Attributes:
        index: its row of the block table.
        tokens: prompt and verified new tokens.
        prompt_len: how many of them are the prompt.
        end: length at which it is finished.
        computed: leading tokens that the target has cached.
        drafts: proposed tokens, to be verified next.
        draft_row: the request's row in the round that proposed them.
    """

    index: int
    tokens: list[int]
    prompt_len: int
    end: int
    computed: int = 0
    drafts: list[int] = field(default_factory=list)
    draft_row: int = 0

    @property
    def finished(self) -> bool:
        """Whether it has all its tokens."""
        return len(self.tokens) >= self.end


@dataclass
class Scheduled:
    """A request's part of one round: `num_tokens` known tokens, then its drafts."""

    request: Request
    num_tokens: int
    drafts: list[int]

    @property
    def samples(self) -> bool:
        """Whether the rows reach the last known token, so that a new one can be sampled."""
        return self.request.computed + self.num_tokens == len(self.request.tokens)

    @property
    def num_rows(self) -> int:
        """Rows of the target's batch."""
        return self.num_tokens + len(self.drafts)

    def rows(self) -> RequestRows:
        """The rows themselves."""
        start = self.request.computed
        known = self.request.tokens[start : start + self.num_tokens]
        return RequestRows(self.request.index, start, [*known, *self.drafts])


def new_requests(
    prompts: Sequence[Sequence[int]], max_new_tokens: int, block_table: BlockTable
) -> list[Request]:
    """A request for each prompt; raises ValueError for one that cannot be served."""
    check_int("max_new_tokens", max_new_tokens, minimum=1)
    if len(prompts) > block_table.table.shape[0]:
        raise ValueError(
            f"prompts must be at most {block_table.table.shape[0]}, the rows of the block table,"
            f" got {len(prompts)}"
        )
    for i, prompt in enumerate(prompts):
        longest = block_table.max_model_len - max_new_tokens
        if not 1 <= len(prompt) <= longest:
            raise ValueError(
                f"prompts[{i}] must have 1 to {longest} tokens (max_model_len"
                f" {block_table.max_model_len} less {max_new_tokens} new ones), got {len(prompt)}"
            )
    return [
        Request(i, list(prompt), len(prompt), len(prompt) + max_new_tokens)
        for i, prompt in enumerate(prompts)
    ]


def row_budget(
    asked: int | None,
    num_reqs: int,
    block_table: BlockTable,
    limits: SpeculatorConfig | None,
) -> int:
    """Target rows a round may have, by default what the speculator's limits allow.

    Raises:
        ValueError: where limits do not fit together.
    """
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


def schedule(running: Sequence[Request], budget: int) -> list[Scheduled]:
    """Every request gets its drafts and one token; what is left of the budget goes to prompts."""
    left = budget - sum(1 + len(request.drafts) for request in running)
    scheduled = []
    for request in running:
        extra = min(len(request.tokens) - request.computed - 1, left)
        left -= extra
        scheduled.append(Scheduled(request, 1 + extra, request.drafts))
    return scheduled
