"""Rounds of a schedule with the answers to them, by plain Python that knows one request."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from lightning_indexer.speculator.batch import StepBatch
from toy import WIDTH, DraftOracle, plain_decoding

NOTHING = [-1] * WIDTH  # a selection row of nobody


@dataclass(frozen=True)
class Fault:
    """An exception in one round or capture.

    Attributes:
        place: "forward" and "observer" raise at `step`; "compact" and "skip" when called.
        step: draft step, or how many forwards of a capture succeed.
        retried: whether the engine gives the same round again, or goes on without drafts.
    """

    place: str
    step: int
    retried: bool


@dataclass
class Request:
    """A sequence on its way to max_model_len, and what a draft does for it."""

    row: int  # of the block table
    prompt: list[int]
    oracle: DraftOracle
    tokens: list[int] = field(init=False)
    text: list[int] = field(init=False)
    computed: int = 0
    drafts: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)
        rest = plain_decoding(self.prompt, self.oracle.max_model_len + 1 - len(self.prompt))
        self.text = self.prompt + rest

    @property
    def finished(self) -> bool:
        return len(self.tokens) >= self.oracle.max_model_len  # a bonus token may lie past it

    def slot(self, position: int) -> int:
        size = self.oracle.page_size
        return self.oracle.pages[position // size] * size + position % size

    def take(self, budget: int, chunk: int, kept: int) -> tuple[list[int], int]:
        """Rows for the target: at most `chunk` known tokens, then at most `kept` drafts if it got
        to the last known one; how many of the rows are drafts."""
        known = self.tokens[self.computed :][: min(budget, chunk)]
        if self.computed + len(known) < len(self.tokens):
            return known, 0
        room = self.oracle.max_model_len - len(self.tokens)
        drafts = self.drafts[: min(budget - len(known), kept, room)]
        return known + drafts, len(drafts)


@dataclass
class Round:
    """Arguments of `propose`, and what must come of them."""

    target: StepBatch
    rejected: list[int]
    next_tokens: list[int]
    caps: list[int] | None
    steps: int
    drafts: list[list[int]] = field(default_factory=list)  # returned
    anchors: list[list[int]] = field(default_factory=list)  # selection rows that steps reuse
    slots: set[int] = field(default_factory=set)  # of the draft's cache that may be written


def idle(batch: StepBatch, first_dummy: int, live_rows: int) -> StepBatch:
    """`batch` with requests from `first_dummy` on as dummies: no slots, no lengths."""
    slots, lens = batch.slot_mapping.clone(), batch.seq_lens.clone()
    slots[live_rows:], lens[first_dummy:] = -1, 0
    return replace(batch, slot_mapping=slots, seq_lens=lens)
