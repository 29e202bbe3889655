"""Toy target and draft models in exact integer arithmetic, and a plain-Python oracle of a draft.

Every hidden state hashes all that its row was given: token, position, slot, length, hidden state,
the keys it sees and the selection row it reads. A wrong row, request, position or length, or a
stale one, changes the tokens. Forwards hold no Python that depends on values, so graphs may
record them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import ceil, exp
from typing import Any

import torch

from lightning_indexer.indexer.block_table import BlockTable
from lightning_indexer.indexer.buffer import TopkIndicesBuffer
from lightning_indexer.kernels.compact import compact_topk_indices
from lightning_indexer.speculator.batch import RequestRows, StepBatch, target_batch, with_hidden
from lightning_indexer.speculator.config import SpeculatorConfig

PRIME = 10007  # exact in fp32, and squares of small multiples are exact in int64
HIDDEN = 3
VOCAB = 3  # few tokens, so that drafts are often right by chance
WIDTH = 5


def mix(*values: Any) -> Any:
    """A hash below PRIME of integers, or elementwise of int64 tensors."""
    mixed = 0
    for value in values:
        mixed = (mixed * 37 + value + 1) ** 2 % PRIME
    return mixed


def expand(seed: Any) -> list[Any]:
    """HIDDEN components of a hidden state."""
    return [mix(seed, i) for i in range(HIDDEN)]


def columns(hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return hidden.to(torch.int64).unbind(1)


def one_hot_logits(hidden: torch.Tensor) -> torch.Tensor:
    token = mix(*columns(hidden)) % VOCAB
    return (token.unsqueeze(1) == torch.arange(VOCAB)).to(torch.float32)


class ToyCache:
    """One integer key a slot; slot −1 wraps around to a spare last entry that nobody reads."""

    def __init__(self, num_slots: int) -> None:
        self.keys = torch.zeros(num_slots + 1, dtype=torch.int64)

    @property
    def live(self) -> torch.Tensor:
        return self.keys[:-1]

    def write(self, slots: torch.Tensor, keys: torch.Tensor) -> None:
        self.keys[slots] = keys

    def context(self, batch: StepBatch) -> torch.Tensor:
        """A hash of the keys that each row sees, [Tp]."""
        offsets = torch.arange(batch.max_context_len)
        request = batch.row_to_request.clamp_min(0).to(torch.int64)
        pages = batch.block_table.to(torch.int64)[request][:, offsets // batch.page_size]
        keys = self.keys[(pages * batch.page_size + offsets % batch.page_size).clamp_min(0)]
        seen = offsets < batch.context_lens().unsqueeze(1)
        return torch.where(seen, mix(offsets, keys), 0).sum(1) % PRIME


class ToyTarget:
    """Next token = a hash of every token before it, read back from a paged cache."""

    def __init__(self, num_slots: int) -> None:
        self.cache = ToyCache(num_slots)
        self.rows = 0  # that it has run

    def forward(self, batch: StepBatch) -> torch.Tensor:
        self.rows += batch.num_tokens
        self.cache.write(batch.slot_mapping, batch.input_ids)
        hidden = torch.stack(expand(self.cache.context(batch)), dim=1)
        return hidden.to(torch.float32)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return one_hot_logits(hidden)


def plain_decoding(prompt: Sequence[int], count: int) -> list[int]:
    """What ToyTarget continues `prompt` with, in plain Python."""
    tokens = list(prompt)
    for _ in range(count):
        context = sum(mix(i, token) for i, token in enumerate(tokens)) % PRIME
        tokens.append(mix(*expand(context)) % VOCAB)
    return tokens[len(prompt) :]


class PlainDraft:
    """Selects at every step; has no callables to share with.

    A row's selection is (first page of its request, position, token, length, a hash of the index
    keys that it sees): a signature.

    Args:
        num_slots: slots of its cache.
        max_rows: M of its selection buffer.
        pair: whether forward returns the feedback states apart.
        append_columns: columns of the buffer that come after a signature.
        log: hears of every forward that Python executes.
        fail_at: the forward, counted from 0, that raises.
    """

    def __init__(
        self,
        num_slots: int,
        max_rows: int,
        *,
        pair: bool = False,
        append_columns: int = 0,
        log: Callable[[str, bool], None] | None = None,
        fail_at: int | None = None,
    ) -> None:
        self.config = {"index_share_for_mtp_iteration": True}
        self.cache, self.index_k = ToyCache(num_slots), ToyCache(num_slots)
        self.buffer = TopkIndicesBuffer(
            max_rows, WIDTH + append_columns, append_columns=append_columns
        )
        self.topk_buffers = [self.buffer]
        self.skip_topk = False
        self.writes_skipped_index_k = False
        self.pair, self.log, self.fail_at = pair, log, fail_at
        self.forwards = 0

    def forward(self, batch: StepBatch) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        self.forwards += 1
        if self.log is not None:
            self.log("forward", self.skip_topk)
        if self.fail_at is not None and self.forwards > self.fail_at:
            raise RuntimeError("the draft broke")
        inputs = (batch.input_ids, batch.positions, *columns(batch.hidden))
        self.cache.write(batch.slot_mapping, mix(*inputs))
        lens = batch.context_lens().to(torch.int64)
        if not self.skip_topk or self.writes_skipped_index_k:
            self.index_k.write(batch.slot_mapping, mix(*inputs[::-1]))
        rows = self.buffer.rows(batch.num_tokens_padded)
        if not self.skip_topk:
            request = batch.row_to_request.clamp_min(0).to(torch.int64)
            first_page = batch.block_table[request, 0].to(torch.int64)
            signature = torch.stack(
                [first_page, *inputs[1::-1], lens, self.index_k.context(batch)], dim=1
            )
            live = batch.slot_mapping.unsqueeze(1) >= 0
            rows[:, :WIDTH].copy_(torch.where(live, signature, -1))
        selection = rows.to(torch.int64).unbind(1)
        context = self.cache.context(batch)
        seed = mix(*inputs, batch.slot_mapping, lens, context, *selection)
        hidden = torch.stack(expand(seed), dim=1).to(batch.hidden.dtype)
        return (hidden, (hidden + 1) % PRIME) if self.pair else hidden

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return one_hot_logits(hidden)


class SharingDraft(PlainDraft):
    """Has all callables: skipping steps read the buffer's rows and leave them alone."""

    def set_skip_topk(self, skip: bool) -> None:
        self.skip_topk = skip

    def set_write_skipped_index_k(self, write: bool) -> None:
        self.writes_skipped_index_k = write

    def compact_topk_indices(self, rows: torch.Tensor) -> None:
        compact_topk_indices(self.buffer.indices, rows)


@dataclass(frozen=True)
class Chance:
    """How a request samples: the formulas of `sampling.py`, of values that fp32 holds exactly."""

    temperature: float
    top_p: float
    seed: int

    def law(self, logits: Sequence[float]) -> list[float]:
        """The probability of every token."""
        best = max(logits)
        if self.temperature <= 0:
            return [float(token == logits.index(best)) for token in range(len(logits))]
        weights = [int(2**40 * exp((x - best) / self.temperature)) for x in logits]
        total = sum(weights)
        need = max(ceil(self.top_p * total), 1) if self.top_p < 1 else total
        before = 0
        for token in sorted(range(len(weights)), key=lambda token: -weights[token]):
            before, weights[token] = before + weights[token], weights[token] * (before < need)
        return [weight / sum(weights) for weight in weights]

    def draw(self, law: Sequence[float], place: int) -> int:
        """The token drafted for `place` of the sequence."""
        share, running = self._uniform(place), 0.0
        for token, probability in enumerate(law):
            running += probability
            if running > share:
                return token
        return max(token for token, probability in enumerate(law) if probability)

    def _uniform(self, place: int) -> float:
        mixed = 0
        for number in (self.seed, 0, place):  # 0 is the purpose: a draft
            mixed = split_mix(mixed + (number + 1) * 0x9E3779B97F4A7C15)
        return ((mixed >> 12) + 0.5) / 2**52


def split_mix(z: int) -> int:
    """SplitMix64's output function."""
    z %= 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return z ^ z >> 31


@dataclass
class DraftOracle:
    """What a draft proposes for one request, in plain Python and without any batch.

    Args:
        pages: of the request.
        page_size: tokens of each.
        max_model_len: positions it may have.
        shares: whether later steps reuse step 0's selection,
        refresh_every: but for multiples of this,
        append_columns: and append the positions made since in as many columns; 0 appends none.
        pair: as the draft's.

    Attributes:
        rows: the request's selection after each step of the last round.
        laws: what each draft of the last round was drawn from.
    """

    pages: list[int]
    page_size: int
    max_model_len: int
    shares: bool
    pair: bool = False
    refresh_every: int | None = None
    append_columns: int = 0
    keys: dict[int, int] = field(default_factory=dict)
    index_keys: dict[int, int] = field(default_factory=dict)
    rows: list[list[int]] = field(default_factory=list)
    laws: list[list[float]] = field(default_factory=list)

    def propose(
        self,
        start: int,
        tokens: Sequence[int],
        rejected: int,
        next_token: int,
        steps: int,
        chance: Chance | None = None,
    ) -> list[int]:
        """Drafts after `tokens`, run by the target from position `start`."""
        live = len(tokens) - rejected
        ids = [*tokens[1:live], next_token]
        self.laws = []
        for offset, token in enumerate(ids):
            position = start + offset
            states = expand(mix(tokens[offset], position))  # target_hidden's
            self._write(token, position, states, selects=True)
        last = start + live - 1
        selection = self._signature(ids[-1], last)
        self.rows = [list(selection)]
        output = self._forward(ids[-1], last, states, selection)
        drafts = [self._choose(output, last, chance)]
        for step in range(1, steps):
            position = last + step
            if position >= self.max_model_len:
                drafts.extend([-1] * (steps - step))
                break
            states = [(x + 1) % PRIME for x in output] if self.pair else output
            selects = not self.shares or self.refreshes(step)
            self._write(drafts[-1], position, states, selects=selects)
            if selects:
                selection = self._signature(drafts[-1], position)
            elif self.append_columns:
                selection[WIDTH + step - 1] = position
            self.rows.append(list(selection))
            output = self._forward(drafts[-1], position, states, selection)
            drafts.append(self._choose(output, position, chance))
        return drafts[:steps]

    def refreshes(self, step: int) -> bool:
        """Whether step s ≥ 1 selects afresh amid others that reuse."""
        return self.shares and self.refresh_every is not None and step % self.refresh_every == 0

    def _choose(self, output: list[int], position: int, chance: Chance | None) -> int:
        best = mix(*output) % VOCAB
        if chance is None:
            return best
        self.laws.append(chance.law([float(token == best) for token in range(VOCAB)]))
        return chance.draw(self.laws[-1], position + 2)

    def _write(self, token: int, position: int, states: list[int], *, selects: bool) -> None:
        self.keys[position] = mix(token, position, *states)
        if selects or self.refresh_every is not None:
            self.index_keys[position] = mix(*states[::-1], position, token)

    def _signature(self, token: int, position: int) -> list[int]:
        index_context = sum(mix(p, self.index_keys[p]) for p in range(position + 1)) % PRIME
        nothing = [-1] * self.append_columns
        return [self.pages[0], position, token, position + 1, index_context, *nothing]

    def _forward(
        self, token: int, position: int, states: list[int], selection: list[int]
    ) -> list[int]:
        page, offset = divmod(position, self.page_size)
        slot = self.pages[page] * self.page_size + offset
        context = sum(mix(p, self.keys[p]) for p in range(position + 1)) % PRIME
        return expand(mix(token, position, *states, slot, position + 1, context, *selection))


def target_hidden(batch: StepBatch) -> StepBatch:
    """`batch` with hidden states as a target might give them: a hash of token and position."""
    states = torch.stack(expand(mix(batch.input_ids, batch.positions)), dim=1)
    return with_hidden(batch, states.to(torch.float32))


def target_rows(table: BlockTable, rows: Sequence[RequestRows]) -> StepBatch:
    """The batch that a target has just run over `rows`."""
    return target_hidden(target_batch(rows, table.table, table.page_size))


def toy_config(steps: int, *, padded: bool = False, **changes: Any) -> SpeculatorConfig:
    """Limits for up to 4 requests, 12 rows and pages of 4."""
    limits: dict[str, Any] = {
        "num_speculative_steps": steps,
        "max_num_reqs": 4,
        "max_num_tokens": 12,
        "max_model_len": 24,
        "hidden_size": HIDDEN,
        "page_size": 4,
        "prefill_sizes": (3, 8, 12) if padded else (),
        "decode_sizes": (1, 2, 4) if padded else (),
    }
    return SpeculatorConfig(**(limits | changes))


def toy_block_table(config: SpeculatorConfig) -> BlockTable:
    """Pages for every request at full length."""
    pages = -(-config.max_model_len // config.page_size)
    return BlockTable(
        config.max_num_reqs,
        config.max_model_len,
        num_pages=pages * config.max_num_reqs,
        page_size=config.page_size,
    )


def num_slots(config: SpeculatorConfig) -> int:
    """Slots of a cache that `toy_block_table` addresses."""
    return -(-config.max_model_len // config.page_size) * config.max_num_reqs * config.page_size


def toy_draft(
    config: SpeculatorConfig, kind: type[PlainDraft] = SharingDraft, **options: Any
) -> Any:
    """A draft that fits `config`."""
    return kind(num_slots(config), max(config.max_num_tokens, config.max_num_reqs), **options)


def simple_round(
    table: BlockTable, lengths: Sequence[int]
) -> tuple[StepBatch, torch.Tensor, torch.Tensor]:
    """Target batch, num_rejected and next_tokens: request r has run a prompt of lengths[r]."""
    rows = []
    for request, length in enumerate(lengths):
        table.allocate(request, table.max_model_len)
        rows.append(RequestRows(request, 0, [(request + i) % VOCAB for i in range(length)]))
    zeros = torch.zeros(len(lengths), dtype=torch.int64)
    return target_rows(table, rows), zeros, zeros + 1


def simple_drafts(
    table: BlockTable, lengths: Sequence[int], steps: int, *, shares: bool, **options: Any
) -> torch.Tensor:
    """What a draft must propose after `simple_round`, by the oracle with these options."""
    drafts = []
    for request, length in enumerate(lengths):
        oracle = DraftOracle(
            table.table[request].tolist(),
            table.page_size,
            table.max_model_len,
            shares,
            **options,
        )
        tokens = [(request + i) % VOCAB for i in range(length)]
        drafts.append(oracle.propose(0, tokens, 0, 1, steps))
    return torch.tensor(drafts, dtype=torch.int64).reshape(len(lengths), steps)
