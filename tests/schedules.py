"""Rounds of a schedule with the answers to them, by plain Python that knows one request."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from lightning_indexer.speculator.batch import StepBatch
from lightning_indexer.speculator.sampling import SamplingParams
from toy import WIDTH, Chance, DraftOracle, plain_decoding


@dataclass(frozen=True)
class Options:
    """What a draft of a schedule does beyond plain sharing.

    Attributes:
        shares: whether it shares at all; else none of the following.
        append: whether new positions are appended.
        refresh_every: as the speculator's.
    """

    shares: bool
    append: bool = False
    refresh_every: int | None = None

    def refreshes(self, step: int) -> bool:
        """Whether decode step `step` selects afresh amid others that reuse."""
        return self.refresh_every is not None and step > 0 and step % self.refresh_every == 0


@dataclass(frozen=True)
class Fault:
    """An exception in one round or capture.

    Attributes:
        place: "forward" and "observer" raise at `step`; "compact", "skip", "append" and
            "refresh" when called for the first time.
        step: draft step; or of a capture, how many sixths of its forwards succeed.
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
    chances: list[Chance] | None = None
    drafts: list[list[int]] = field(default_factory=list)  # returned
    laws: list[list[list[float]]] = field(default_factory=list)  # that they are drawn from
    rows: list[list[list[int]]] = field(default_factory=list)  # selection after each step
    slots: set[int] = field(default_factory=set)  # of the draft's cache that may be written

    @property
    def sampling(self) -> SamplingParams | None:
        if self.chances is None:
            return None
        return SamplingParams.of(
            [chance.seed for chance in self.chances],
            temperature=[chance.temperature for chance in self.chances],
            top_p=[chance.top_p for chance in self.chances],
        )

    @property
    def step_0_slots(self) -> set[int]:
        return {slot for slot in self.target.slot_mapping.tolist() if slot >= 0}

    def add_rows(self, oracle: DraftOracle) -> None:
        """The oracle's; a request that drafts no more keeps its row until a refresh takes it."""
        rows = list(oracle.rows)
        for step in range(len(rows), self.steps):
            rows.append([-1] * len(rows[0]) if oracle.refreshes(step) else rows[-1])
        self.rows.append(rows)

    def add_dummy(self, most: int, append_columns: int) -> None:
        """A request that selects nothing and drafts nothing."""
        self.rejected.append(0)
        self.next_tokens.append(0)
        self.drafts.append([-1] * most)
        self.laws.append([])
        self.rows.append([[-1] * (WIDTH + append_columns)] * max(self.steps, 1))


def idle(batch: StepBatch, first_dummy: int, live_rows: int) -> StepBatch:
    """`batch` with requests from `first_dummy` on as dummies: no slots, no lengths."""
    slots, lens = batch.slot_mapping.clone(), batch.seq_lens.clone()
    slots[live_rows:], lens[first_dummy:] = -1, 0
    return replace(batch, slot_mapping=slots, seq_lens=lens)
