"""Random schedules of everything that can happen to a speculator, eager and recorded side by side.

Texts must equal plain decoding, drafts those of a plain-Python oracle that knows one request and
no batch; `lanes.Lane` adds what must hold between calls, and at every draft step.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from counting import EXAMPLES
from lanes import Lane
from lightning_indexer.speculator.batch import RequestRows
from lightning_indexer.speculator.recorded import RecordedRunner
from lightning_indexer.speculator.runner import EagerRunner
from lightning_indexer.speculator.verify import verify_greedy
from schedules import Fault, Options, Request, Round, idle
from toy import (
    VOCAB,
    Chance,
    DraftOracle,
    ToyTarget,
    num_slots,
    target_rows,
    toy_block_table,
    toy_config,
)

pytestmark = pytest.mark.once

SCHEDULES = "speculator schedules", "random"
CI = os.environ.get("HYPOTHESIS_PROFILE") in ("ci", "verify")
BUDGET = 20  # target rows of a round
seeds = st.integers(0, 2**32 - 1)
faults = st.builds(
    Fault,
    place=st.sampled_from(["forward", "observer", "compact", "skip", "append", "refresh"]),
    step=st.integers(0, 4),
    retried=st.sampled_from([False, True, False]),
)
plans = st.builds(
    Options,
    shares=st.sampled_from([True, True, True, False]),
    append=st.booleans(),
    refresh_every=st.sampled_from([None, 2, None, 1, 3]),
).map(lambda options: options if options.shares else Options(shares=False))
KINDS = (
    "rounds", "sampled rounds", "abandoned rounds", "empty rounds", "dummies", "acceptances",
    "rejections", "captures", "failed captures", "replays", "fused replays", "refreshed rows",
    "appending rounds",
)  # fmt: skip
seen: Counter[str] = Counter(dict.fromkeys(KINDS, 0))


class Schedule(RuleBasedStateMachine):
    @initialize(
        steps=st.sampled_from([4, 3, 2, 5, 1, 0]),
        max_model_len=st.sampled_from([24, 12, 9]),
        options=plans,
        fused=st.sampled_from([(4,), (2, 5), (), (3,)]),
        samples=st.sampled_from([False, True, False]),
        captured=st.sampled_from([True, False, True]),
        seed=seeds,
    )
    def start(self, steps, max_model_len, options, fused, samples, captured, seed):
        self.config = toy_config(
            steps, max_model_len=max_model_len, max_num_tokens=BUDGET,
            prefill_sizes=(6, BUDGET), decode_sizes=(2, 4), vocab_size=VOCAB if samples else None,
        )  # fmt: skip
        self.options, self.samples = options, samples
        self.table = toy_block_table(self.config)
        self.target = ToyTarget(num_slots(self.config))
        fuses = replace(self.config, fused_steps=tuple(k for k in fused if k <= steps))
        self.lanes = [
            Lane(self.config, EagerRunner(), options),
            Lane(fuses, RecordedRunner(), options),
        ]
        self.requests: list[Request] = []
        for _ in range(1 + seed % 3):
            self.join(seed)
        if captured:
            self.lanes[1].capture(None)

    @property
    def running(self) -> list[Request]:
        return [request for request in self.requests if not request.finished]

    @precondition(lambda self: len(self.requests) < self.config.max_num_reqs)
    @rule(seed=seeds)
    def join(self, seed):
        rng = random.Random(seed)
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 7))]
        row = min({*range(self.config.max_num_reqs)} - {r.row for r in self.requests})
        self.table.allocate(row, self.config.max_model_len)
        pages = self.table.table[row].tolist()
        oracle = DraftOracle(
            pages,
            self.config.page_size,
            self.config.max_model_len,
            self.options.shares,
            refresh_every=self.options.refresh_every,
            append_columns=self.lanes[0].draft.buffer.append_columns,
        )
        self.requests.append(Request(row, prompt, oracle))

    @rule(which=st.integers(0, 3))
    def leave(self, which):
        if self.requests:
            request = self.requests.pop(which % len(self.requests))
            self.table.release(request.row)

    @rule(
        steps=st.lists(st.sampled_from([5, 3, 2, 4, 1, 0]), min_size=1, max_size=5),
        fault=st.none() | faults,
        seed=seeds,
    )
    def rounds(self, steps, fault, seed):
        """One after the other, the fault in the last."""
        rng = random.Random(seed)
        for i, most in enumerate(steps):
            if not self.running:  # the queue has another request
                self.leave(0)
                self.join(rng.random())
            self._random_round(rng, most, fault if i == len(steps) - 1 else None)

    def _random_round(self, rng, steps, fault):
        chosen = rng.sample(self.running, k=rng.randint(1, len(self.running)))
        parts, budget = [], BUDGET - self.config.max_num_reqs
        for request in chosen:
            rows, drafted = request.take(budget, rng.randint(1, 9), rng.choice([5, 5, 5, 1]))
            if rows:
                parts.append((request, rows, drafted))
            budget -= len(rows)
        free = self.config.max_num_reqs - len(parts)
        count = rng.choice([0, 0, rng.randint(0, free)])
        caps = [rng.randint(-1, 5) for _ in range(len(parts) + count)]
        chances = [
            Chance(rng.choice([0, 0.5, 1, 3]), rng.choice([0.5, 0.75, 1]), rng.getrandbits(64))
            for _ in caps
        ]
        caps = rng.choice([None, caps])
        chances = rng.choice([None, chances, chances]) if self.samples else None
        steps = min(steps, self.config.num_speculative_steps)
        self._round(parts, count, steps, fault, caps=caps, chances=chances)

    @rule(count=st.integers(0, 4), steps=st.integers(0, 5), fault=st.none() | faults)
    def idle_round(self, count, steps, fault):
        """Dummies, or nobody at all."""
        self._round([], count, min(steps, self.config.num_speculative_steps), fault)

    @rule(fault=st.none() | faults)
    def capture(self, fault):
        done = [lane.capture(fault) for lane in self.lanes]
        seen["captures" if all(done) else "failed captures"] += 1

    @rule()
    def reload(self):
        for lane in self.lanes:
            lane.reload()

    def teardown(self):
        EXAMPLES[SCHEDULES] += 1
        for lane in getattr(self, "lanes", []):
            seen["replays"] += lane.replays
            seen["fused replays"] += lane.fused_replays
            seen["refreshed rows"] += lane.stats.rows_refreshed

    def _round(self, parts, num_dummies, steps, fault, *, caps=None, chances=None):
        rows = [RequestRows(r.row, r.computed, tokens) for r, tokens, _ in parts]
        live_rows = sum(len(row.token_ids) for row in rows)
        rows += self._dummies(num_dummies)
        batch = idle(target_rows(self.table, rows), len(parts), live_rows)
        round_ = Round(batch, [], [], caps, steps, chances)
        for (request, tokens, drafted), (accepted, next_token) in zip(
            parts, self._verify(batch, parts), strict=True
        ):
            self._add(round_, request, tokens, drafted - accepted, next_token)
            seen["rejections"] += drafted - accepted
            seen["acceptances"] += accepted
        for _ in range(num_dummies):
            columns = self.lanes[0].draft.buffer.append_columns
            round_.add_dummy(self.config.num_speculative_steps, columns)
        if not rows:
            for lane in self.lanes:
                lane.play_nothing(round_)
            seen["empty rounds"] += 1
            return
        usable = [lane.play(round_, fault) for lane in self.lanes]
        if all(usable) and chances is not None:
            self._compare_probabilities(round_)
            seen["sampled rounds"] += 1
        for (request, _, _), drafts in zip(parts, round_.drafts, strict=False):
            sampled = request.computed == len(request.tokens) - 1
            request.drafts = [t for t in drafts if t >= 0] if all(usable) and sampled else []
        seen["rounds"] += 1
        seen["abandoned rounds"] += not all(usable)
        seen["dummies"] += num_dummies
        seen["appending rounds"] += self.options.append and steps > 1

    def _compare_probabilities(self, round_):
        """Lanes drew from the same bits."""
        ours, theirs = (lane.speculator.draft_probs for lane in self.lanes)
        for request, laws in enumerate(round_.laws):
            assert torch.equal(ours[request, : len(laws)], theirs[request, : len(laws)])

    def _dummies(self, count: int) -> list[RequestRows]:
        """One row each, on the pages of live requests, as far as there are any."""
        owners = [request.row for request in self.requests] or [0]
        return [RequestRows(owners[i % len(owners)], 0, [1]) for i in range(count)]

    def _verify(self, batch, parts) -> list[tuple[int, int]]:
        """Accepted drafts and next token of each request; advances none."""
        choices = self.target.compute_logits(self.target.forward(batch)).argmax(1).tolist()
        verified, first = [], 0
        for request, tokens, drafted in parts:
            end = first + len(tokens)
            known = request.computed + len(tokens) - drafted
            prompt = -1 if known == len(request.tokens) else request.tokens[known]
            accepted, next_token = verify_greedy(
                torch.tensor([choices[end - drafted - 1 : end]]),
                torch.tensor([tokens[len(tokens) - drafted :]], dtype=torch.int64),
                prompt_tokens=torch.tensor([prompt]),
            )
            verified.append((int(accepted), int(next_token)))
            first = end
        return verified

    def _add(self, round_, request, tokens, rejected, next_token):
        """Foretells the round for one request, and advances it."""
        start, live = request.computed, len(tokens) - rejected
        last, most = start + live - 1, round_.steps
        if round_.caps is not None:
            most = max(min(most, round_.caps[len(round_.rejected)]), 0)
        chance = None if round_.chances is None else round_.chances[len(round_.rejected)]
        drafts = request.oracle.propose(start, tokens, rejected, next_token, most, chance)
        unused = self.config.num_speculative_steps - most
        round_.drafts.append([*drafts, *[-1] * unused])
        round_.laws.append(request.oracle.laws[: len([t for t in drafts if t >= 0])])
        round_.add_rows(request.oracle)
        end = min(max(start + len(tokens), last + most), self.config.max_model_len)
        round_.slots |= {request.slot(position) for position in range(start, end)}
        round_.rejected.append(rejected)
        round_.next_tokens.append(next_token)
        request.computed += live
        request.tokens[start : start + live] = tokens[:live]
        if request.computed == len(request.tokens):
            request.tokens.append(next_token)
        assert request.tokens == request.text[: len(request.tokens)]


def test_any_schedule_gives_the_texts_of_plain_decoding():
    most = 500 if CI else settings.default.max_examples
    before = EXAMPLES[SCHEDULES]
    run_state_machine_as_test(
        Schedule, settings=settings(max_examples=most, stateful_step_count=12)
    )
    if CI:  # derandomised
        assert EXAMPLES[SCHEDULES] - before >= most
        assert min(seen.values()) >= 50, seen
