"""A round's decode steps as one graph: the drafts of step graphs and of eager steps, or refused."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from counting import RERUNS, counts_examples, tallies
from fake_cuda import GRAPH_RUNNERS, graph_runners
from lightning_indexer.indexer.buffer import SelectionKind
from lightning_indexer.speculator.draft_steps import GraphKey
from lightning_indexer.speculator.mtp import MTPSpeculator
from lightning_indexer.speculator.recorded import RecordedRunner
from lightning_indexer.speculator.runner import GraphStateError
from lightning_indexer.speculator.sampling import SamplingParams
from soft_toy import SoftDraft
from toy import VOCAB, simple_drafts, simple_round, toy_block_table, toy_config, toy_draft

pytestmark = pytest.mark.once

STEPS, FUSED = 5, (2, 5)  # rounds of 3 and 4 take their steps one by one
LENGTHS = [3, 1]


@pytest.fixture(params=GRAPH_RUNNERS)
def kind(request, monkeypatch):
    with graph_runners(request.param, monkeypatch) as runner_class:
        yield runner_class


def _speculator(
    runner=None, *, fused=FUSED, append=False, draft=None, sizes=(2,), vocab=None, **options
):
    """Captured if it has a runner with graphs; 12 prefill rows, and decode rows of `sizes`."""
    config = toy_config(
        STEPS, prefill_sizes=(12,), decode_sizes=sizes, fused_steps=fused, vocab_size=vocab
    )
    kind = {} if vocab is None else {"kind": SoftDraft}
    draft = draft or toy_draft(config, **kind, append_columns=append * (STEPS - 1))
    speculator = MTPSpeculator(draft, config, runner=runner, append_new_positions=append, **options)
    speculator.capture()
    return speculator


def _propose(speculator, lengths=LENGTHS, steps=STEPS, **options):
    round_ = simple_round(toy_block_table(speculator.config), lengths)
    return speculator.propose(*round_, num_speculative_steps=steps, **options)


def _expected(speculator, lengths=LENGTHS, steps=STEPS, **options):
    table = toy_block_table(speculator.config)
    simple_round(table, lengths)
    return simple_drafts(table, lengths, steps, shares=True, **options)


@dataclass(frozen=True)
class Drawn:
    """A round; temperature None drafts greedily."""

    steps: int
    lengths: tuple[int, ...]
    temperature: float | None
    seed: int

    def sampling(self) -> SamplingParams | None:
        if self.temperature is None:
            return None
        seeds = range(self.seed, self.seed + len(self.lengths))
        return SamplingParams.of(seeds, temperature=self.temperature)


drawn = st.builds(
    Drawn,
    steps=st.sampled_from([5, 2, 4, 3, 1, 0]),
    lengths=st.lists(st.integers(1, 3), min_size=1, max_size=4).map(tuple),
    temperature=st.sampled_from([None, 0.0, 0.7, 5.0]),
    seed=st.integers(0, 2**32),
)


@pytest.mark.parametrize("runner", GRAPH_RUNNERS)
@settings(max_examples=50)  # an example runs whole rounds several times
@given(
    rounds=st.lists(drawn, min_size=1, max_size=4),
    append=st.booleans(),
    refresh_every=st.sampled_from([None, 1, 2, 3]),
)
@counts_examples("fused graphs")
@tallies(RERUNS, "fused graphs")
def test_fused_rounds_are_those_of_step_graphs_and_of_eager_steps(
    runner, rounds, append, refresh_every
):
    with torch.device("cuda") if runner == "gpu" else nullcontext():
        eager, *lanes = _lanes(runner, append, refresh_every)
        for drawn in rounds:
            expected = _propose(eager, drawn.lengths, drawn.steps, sampling=drawn.sampling())
            live = expected >= 0
            rows = sum(drawn.lengths) if drawn.steps <= 1 else len(drawn.lengths)
            for lane in lanes:
                got = _propose(lane, drawn.lengths, drawn.steps, sampling=drawn.sampling())
                assert torch.equal(got, expected)
                ours, theirs = (made.draft_probs[: len(live)][live] for made in (lane, eager))
                assert drawn.temperature is None or torch.equal(ours, theirs)
                ours, theirs = (made.model.buffer.indices[:rows] for made in (lane, eager))
                assert torch.equal(ours, theirs)
                assert lane.stats == eager.stats


@cache
def _lanes(runner, append, refresh_every):
    """Eager steps, step graphs and fused ones; rounds leave nothing that a later one depends on."""
    options = {"append": append, "refresh_every": refresh_every, "vocab": VOCAB}
    with pytest.MonkeyPatch.context() as patch, graph_runners(runner, patch) as runner_class:
        eager = _speculator(fused=(), **options)
        return eager, *(
            _speculator(runner_class(), fused=fused, **options) for fused in ((), FUSED)
        )


@pytest.mark.parametrize("lengths", [[3], LENGTHS, [1, 1, 2], [2, 4, 1, 5]], ids=str)
@pytest.mark.parametrize("steps", [2, 3, 5])
def test_fused_drafts_are_the_oracles(kind, steps, lengths):
    speculator = _speculator(kind(), sizes=(1, 2, 3))
    for _ in range(2):
        got = _propose(speculator, lengths, steps)
        assert torch.equal(got[:, :steps].cpu(), _expected(speculator, lengths, steps).cpu())


@pytest.mark.parametrize("vocab", [None, VOCAB])
@pytest.mark.parametrize(
    "refresh_every, segments",
    [(None, [(1, 1), (1, 4)]), (1, []), (2, [(1, 1), (3, 3)]), (3, [(1, 1), (1, 2), (4, 4)])],
)
def test_keys_name_phase_rows_steps_and_sampling(kind, refresh_every, segments, vocab):
    speculator = _speculator(kind(), sizes=(1, 2), refresh_every=refresh_every, vocab=vocab)
    expected = set()
    for sampling in (False, True)[: 1 + (vocab is not None)]:
        expected.add(GraphKey("prefill", 12, 4, None, sampling))
        for size in (1, 2):
            phases = ["decode"] + ["refresh"] * (refresh_every is not None)
            expected |= {GraphKey(phase, size, size, None, sampling) for phase in phases}
            expected |= {GraphKey("decode", size, size, steps, sampling) for steps in segments}
    assert set(speculator.runner._graphs) == expected


class _Spied(RecordedRunner):
    """Keeps the keys of a round's runs, and the flags that runs and forwards went by."""

    def __init__(self):
        super().__init__()
        self.keys, self.flags, self.draft = [], [], None

    def run(self, key, step, *, state, **options):
        self.keys.append((key.phase, key.steps))
        if key in self._graphs:
            assert self._graphs[key].state == state
        before = self.draft.skip_topk
        super().run(key, step, state=state, **options)
        self.flags.append((key.phase, before, self.draft.skip_topk, *state))


def _spied(**options):
    config = toy_config(STEPS)
    eager = []
    draft = toy_draft(config, log=lambda _, flag: eager.append(flag))
    runner = _Spied()
    runner.draft = draft
    speculator = _speculator(runner, draft=draft, **options)
    eager.clear()
    return speculator, eager


@pytest.mark.parametrize(
    "refresh_every, steps, keys",
    [
        (None, 5, [("decode", (1, 4))]),
        (None, 2, [("decode", (1, 1))]),
        (None, 3, [("decode", None)] * 2),
        (None, 1, []),
        (3, 5, [("decode", (1, 2)), ("refresh", None), ("decode", (4, 4))]),
        (1, 5, [("refresh", None)] * 4),
        (9, 5, [("decode", (1, 4))]),
    ],
)
def test_fused_round_is_one_graph_between_refreshes(refresh_every, steps, keys):
    speculator, eager = _spied(refresh_every=refresh_every)
    for _ in range(2):
        speculator.runner.keys.clear()
        _propose(speculator, steps=steps)
        assert speculator.runner.keys == [("prefill", None), *keys]
    assert eager == []  # replays run no Python


def test_rounds_with_an_observer_take_their_steps_one_by_one():
    seen = []
    speculator, _ = _spied(observer=lambda step, batch: seen.append(step))
    got = _propose(speculator)
    assert speculator.runner.keys == [("prefill", None), *[("decode", None)] * 4]
    assert seen == [1, 2, 3, 4]
    assert torch.equal(got, _expected(speculator))


def test_rounds_that_are_not_measured_are_fused():
    speculator, _ = _spied(measure_overlap_every=3)
    for number in range(1, 7):
        speculator.runner.keys.clear()
        assert torch.equal(_propose(speculator), _expected(speculator))
        decodes = [("decode", None)] * 4 if number % 3 == 0 else [("decode", (1, 4))]
        assert speculator.runner.keys == [("prefill", None), *decodes]
    assert speculator.overlap.rows_by_step() == [4] * 4


GRAPHS = {
    "prefill": lambda key: key.phase == "prefill",
    "step": lambda key: key.phase == "decode" and key.steps is None,
    "refresh": lambda key: key.phase == "refresh",
    "fused": lambda key: key.steps is not None,
}


@pytest.mark.parametrize("steps", [4, 5])
@pytest.mark.parametrize(
    "dropped", [d for n in range(5) for d in combinations(GRAPHS, n)], ids=lambda d: "+".join(d)
)
def test_graphs_and_the_eager_steps_between_them_go_by_one_flag(dropped, steps):
    speculator, eager = _spied(refresh_every=2)
    runner = speculator.runner
    for key in [key for key in runner._graphs if any(GRAPHS[name](key) for name in dropped)]:
        del runner._graphs[key]
    got = _propose(speculator, steps=steps)
    assert torch.equal(got[:, :steps], _expected(speculator, steps=steps, refresh_every=2))
    phases = ["prefill", "decode", "refresh", "decode", "refresh"][:steps]
    flags = [phase == "decode" for phase in phases]
    assert runner.flags == [
        (phase, flag, flag, flag) for phase, flag in zip(phases, flags, strict=True)
    ]
    name_of = {"prefill": "prefill", "refresh": "refresh"} | {
        "decode": "fused" if steps in FUSED else "step"
    }
    ran = [flag for phase, flag in zip(phases, flags, strict=True) if name_of[phase] in dropped]
    assert eager == ran


@pytest.mark.parametrize("sizes", [(), (1,), (4,)], ids=lambda sizes: f"decode {sizes}")
def test_rounds_wider_than_every_graph_fuse_their_steps_eagerly(kind, sizes):
    speculator = _speculator(kind(), sizes=sizes, append=True)
    captured = speculator.model.forwards
    got = _propose(speculator, [1, 2, 1])
    assert torch.equal(got.cpu(), _expected(speculator, [1, 2, 1], append_columns=4).cpu())
    assert speculator.model.forwards - captured == (0 if sizes == (4,) else STEPS - 1)


def _world(speculator):
    """All that a step could change."""
    steps, draft = speculator.steps, speculator.model
    held = (draft.cache.keys, draft.index_k.keys, draft.buffer.indices, *steps._tensors())
    return [tensor.clone() for tensor in held]


def _refused(speculator, match, num_reqs=2, state=(True,)):
    before = _world(speculator)
    with pytest.raises(GraphStateError, match=match):
        speculator.steps.decode_fused(range(1, 5), num_reqs, 2, state)
    assert all(map(torch.equal, before, _world(speculator)))


def _in_mid_round(runner, **options):
    """A sampling speculator after step 0 of a round, its flag on; both graphs of (1, 4) exist."""
    speculator = _speculator(runner, vocab=VOCAB, **options)
    _propose(speculator, sampling=SamplingParams.of([1, 2]))
    speculator._set_skip_topk(True)
    return speculator


def test_replay_under_another_flag_is_refused(kind):
    speculator = _in_mid_round(kind())
    _refused(speculator, r"captured in state \(True,\), now is \(False,\)", state=(False,))


def test_replay_for_more_rows_is_refused(kind):
    _refused(_in_mid_round(kind()), "captured for 2 rows, now has 3", num_reqs=3)


def _holders(speculator):
    """Everything of the speculator that has tensors which its steps use."""
    steps = speculator.steps
    return steps, steps.batches, steps.sampler, steps.sampler._params, speculator.model.buffer


def _movable(speculator):
    for number, holder in enumerate(_holders(speculator)):
        names = [name for name, x in vars(holder).items() if isinstance(x, torch.Tensor)]
        yield from ((number, name) for name in names if name not in NOT_IN_GRAPHS)


#: The buffer's anchors are read between steps, and its tail is a part of its rows.
NOT_IN_GRAPHS = ("anchor_positions", "_appended")


def test_replay_with_any_tensor_moved_is_refused(kind):
    speculator = _in_mid_round(kind(), append=True)
    places = list(_movable(speculator))
    some = {"drafts", "_next_ids", "_feedback", "_draft_ends", "draft_probs", "seed", "indices"}
    assert some < {name for _, name in places}
    for number, name in places:
        holder = _holders(speculator)[number]
        held = getattr(holder, name)
        object.__setattr__(holder, name, held.clone())
        _refused(speculator, r"a tensor has moved since graph .*steps=\(1, 4\)")
        object.__setattr__(holder, name, held)
    forwards = speculator.model.forwards
    speculator.steps.decode_fused(range(1, 5), 2, 2, (True,))  # all are back in their places
    assert speculator.model.forwards == forwards


@pytest.mark.parametrize("refresh_every", [None, 2])
def test_capture_that_fails_anywhere_leaves_an_eager_speculator_and_no_graph(kind, refresh_every):
    speculator = _speculator(kind(), refresh_every=refresh_every, append=True)
    draft = speculator.model
    forwards = draft.forwards
    expected = _expected(speculator, refresh_every=refresh_every, append_columns=4).cpu()
    for fail_at in range(forwards):
        draft.forwards, draft.fail_at = 0, fail_at
        with pytest.raises(RuntimeError, match="the draft broke"):
            speculator.capture()
        draft.forwards, draft.fail_at = 0, None
        assert speculator.runner._graphs == {}
        assert not draft.skip_topk
        assert draft.buffer.state.kind is SelectionKind.EMPTY
        assert torch.equal(_propose(speculator).cpu(), expected)
        assert draft.forwards == STEPS
    speculator.capture()
    assert torch.equal(_propose(speculator).cpu(), expected)
    assert draft.forwards == STEPS + forwards


@pytest.mark.parametrize("fused", [(1,), (6,), (3, 2), (2, 2)], ids=str)
def test_bad_round_lengths_are_refused(fused):
    with pytest.raises(ValueError, match=r"fused_steps must ascend within \[2, 5\], got"):
        toy_config(STEPS, fused_steps=fused)
