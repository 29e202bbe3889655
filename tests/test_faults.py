"""The fault table: a round and a capture are broken at each of their 8 steps, and recover.

The steps are those of "One round" in docs/sharing.md. Every place of the table fails once before
it has done its work, by an error, and once after, by an interrupt. Recovered means: the flag is
off; nothing of what died can be reused; the buffer lies where it lay; the rounds and the capture
that follow are those of a speculator that nothing happened to.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import count
from operator import attrgetter

import pytest
import torch

from counting import DONE, FAULTS, RIGHT, tally
from lightning_indexer.indexer.buffer import SelectionKind, StaleSelectionError
from lightning_indexer.speculator.mtp import MTPSpeculator
from lightning_indexer.speculator.recorded import RecordedRunner
from lightning_indexer.speculator.sampling import SamplingParams
from soft_toy import SoftDraft
from toy import VOCAB, SharingDraft, simple_round, toy_block_table, toy_config, toy_draft

pytestmark = pytest.mark.once

STEPS = 4
LENGTHS = ([3, 1, 5], [2, 4])  # prompts of the rounds that follow; the first is also what dies
SIZES = {"prefill_sizes": (8, 12), "decode_sizes": (2, 4)}


@dataclass(frozen=True)
class Setting:
    """What kind of speculator it happens to."""

    recorded: bool
    shares: bool
    sampling: bool
    plan: str = "plain"

    def __str__(self) -> str:
        words = "recorded" if self.recorded else "eager", "shared" if self.shares else "fresh"
        return "-".join([*words, "sampling" if self.sampling else "greedy", self.plan])


@dataclass(frozen=True)
class Place:
    """Something that may fail in a step.

    `propose` and `capture` say which of its calls in a round, and in a capture, is the step's;
    None where it is not called. A path that starts with "graph" is the middle of a replay.
    `refreshes` is whether step 7 is selecting afresh then; None where it changes.
    """

    step: int
    path: str
    propose: int | None = None
    capture: int | None = None
    refreshes: bool | None = False

    def __str__(self) -> str:
        return f"{self.step}-{self.path}".replace(" ", "-")

    def call(self, phase: str, setting: Setting) -> int | None:
        """The call that fails in this setting; None where the place is not reached."""
        sharing = self.path.startswith("model.") and self.path not in FORWARD
        if sharing and not setting.shares:
            return None
        replayed = phase == "propose" and setting.recorded
        if replayed and (
            self.path in IN_GRAPHS or (setting.plan == "fused" and self.path in IN_FUSED_GRAPHS)
        ):
            return None
        if self.path.startswith("graph") and not replayed:
            return None
        call = getattr(self, phase)
        # a capture runs each size greedily and, if it can sample, once again
        twice = (
            phase == "capture" and setting.sampling and self.path in (*FORWARD, "runner.capture")
        )
        return 2 * call if twice and call is not None else call


FORWARD = ("model.forward", "model.compute_logits")
IN_GRAPHS = (*FORWARD, "model.buffer.append")
IN_FUSED_GRAPHS = ("batches.decode", "steps.keep_drafts")

# by SIZES, calls 0 and 1 of a capture are step 0, 2 and more are later steps
TABLE = (
    Place(1, "batches.prefill", propose=0),
    Place(1, "batches.dummy", capture=0),
    Place(2, "on_prefill_begin", 0, 0),
    Place(2, "model.set_skip_topk", 0, 0),
    Place(2, "model.buffer.new_generation", 0, 0),
    Place(3, "runner.run", propose=0),
    Place(3, "runner.capture", capture=1),
    Place(3, "model.forward", 0, 1),
    Place(3, "model.compute_logits", 0, 1),
    Place(3, "graph prefill", propose=0),
    Place(4, "on_prefill_end", 0, 0),
    Place(4, "model.compact_topk_indices", 0, 0),
    Place(4, "model.buffer.mark_compacted", 0, 0),
    Place(5, "on_prefill_end", 0, 0),  # and with K = 1, what fails after it fails at the return
    Place(5, "batches.drafted", propose=0),
    Place(6, "on_multi_step_decode_begin", 0, 0),
    Place(6, "model.buffer.check_reusable", 0, 0),
    Place(6, "model.set_skip_topk", 1, 1),
    Place(7, "runner.run", propose=1),
    Place(7, "runner.capture", capture=2),
    Place(7, "model.forward", 1, 2),
    Place(8, "on_multi_step_decode_end", 0, 0),
)
# what else there is in a round of four decode steps, or three and one that refreshes in between
PLANS = {
    "plain": (
        Place(7, "batches.decode", propose=1),
        Place(7, "batches.dummy", capture=3),
        Place(7, "model.forward", 3, 3),
        Place(7, "model.compute_logits", 2, 3),
        Place(7, "graph decode", propose=1),
        Place(7, "observer", propose=2),
        Place(8, "model.set_skip_topk", 2, 2),
    ),
    "refresh": (
        Place(7, "batches.decode", propose=1, refreshes=True),
        Place(7, "batches.decode", propose=2),
        Place(7, "batches.dummy", capture=3, refreshes=True),
        Place(7, "reselection", 0, 0),
        Place(7, "model.set_skip_topk", 2, 2, refreshes=None),
        Place(7, "model.buffer.forget_appended", 1, 1, refreshes=True),
        Place(7, "runner.run", propose=2, refreshes=True),
        Place(7, "runner.capture", capture=3, refreshes=True),
        Place(7, "model.forward", 2, 3, refreshes=True),
        Place(7, "model.compute_logits", 2, 3, refreshes=True),
        Place(7, "graph refresh", propose=0, refreshes=True),
        Place(7, "observer", propose=1, refreshes=True),
        Place(7, "model.buffer.mark_refreshed", 0, 0, refreshes=True),
        Place(7, "model.buffer.check_reusable", 1, 1, refreshes=True),
        Place(7, "model.set_skip_topk", 3, 3, refreshes=None),
        Place(7, "model.buffer.append", 0, 0),
        Place(7, "model.buffer.append", 1, 1),
        Place(7, "model.forward", 3, 4),
        Place(7, "graph decode", propose=1),
        Place(8, "model.set_skip_topk", 4, 6),
    ),
    "fused": (
        Place(7, "batches.decode", 1, 1),
        Place(7, "batches.dummy", capture=3),
        Place(7, "steps.keep_drafts", 2, 1),
        Place(7, "runner.capture", capture=3),
        Place(7, "model.buffer.append", 1, 2),
        Place(7, "model.forward", 3, 4),
        Place(7, "model.compute_logits", 2, 5),
        Place(7, "graph decode", propose=0),
        Place(8, "model.set_skip_topk", 2, 2),
    ),
}
SETTINGS = [
    Setting(recorded, *kind)
    for recorded in (False, True)
    for kind in (
        (True, False),
        (False, False),
        (True, True),
        (True, False, "refresh"),
        (True, False, "fused"),
    )
]
CASES = [
    pytest.param(phase, place, setting, late, id=f"{phase}-{place}-{setting}-{when}")
    for phase in ("propose", "capture")
    for setting in SETTINGS
    for place in (*TABLE, *PLANS[setting.plan])
    if place.call(phase, setting) is not None
    for late, when in ((False, "before"), (True, "after"))
    if late or not (setting.recorded and setting.sampling)  # these take longest
    if late or setting.plan == "plain" or place not in TABLE  # and in these nothing else is new
]


@pytest.fixture(scope="module", autouse=True)
def every_fault_is_recovered_from():
    yield
    assert all(DONE[key] == RIGHT[key] for key in DONE if key[0] == FAULTS)


def _speculator(setting: Setting, steps: int) -> MTPSpeculator:
    fused, refined = setting.plan == "fused", setting.plan != "plain"
    config = toy_config(
        steps,
        vocab_size=VOCAB if setting.sampling else None,
        fused_steps=(steps,) if fused and steps > 1 else (),
        **SIZES,
    )
    kind = SoftDraft if setting.sampling else SharingDraft
    speculator = MTPSpeculator(
        toy_draft(config, kind, append_columns=refined * (steps - 1)),
        config,
        draft_config={"index_share_for_mtp_iteration": setting.shares},
        runner=RecordedRunner() if setting.recorded else None,
        observer=None if fused else lambda *_: None,
        append_new_positions=refined,
        refresh_every=2 if setting.plan == "refresh" else None,
    )
    if setting.recorded:
        speculator.capture()
    return speculator


def _round(speculator: MTPSpeculator, lengths: list[int], steps: int | None = None) -> torch.Tensor:
    params = SamplingParams.of(range(len(lengths)), temperature=2.0)
    sampling = params if speculator.config.vocab_size else None
    target = simple_round(toy_block_table(speculator.config), lengths)
    return speculator.propose(*target, num_speculative_steps=steps, sampling=sampling)


def _rounds(speculator: MTPSpeculator) -> tuple[list[list[list[int]]], dict[str, int]]:
    """The drafts of both rounds, and what they counted."""
    before = dict(vars(speculator.stats))
    drafts = [_round(speculator, lengths).tolist() for lengths in LENGTHS]
    return drafts, {name: n - before[name] for name, n in vars(speculator.stats).items()}


@cache
def _undisturbed(setting: Setting, steps: int) -> tuple[list[list[list[int]]], dict[str, int]]:
    return _rounds(_speculator(setting, steps))


class _Fault:
    """Wraps calls; one of them raises, before or after it has done its work."""

    def __init__(self, call: int, late: bool, where: str, speculator: MTPSpeculator) -> None:
        self.call, self.late, self.where, self.speculator = call, late, where, speculator
        self.error = KeyboardInterrupt if late else RuntimeError
        self.calls = count()
        self.flag: bool | None = None  # when it was raised

    def __call__(self, original):
        def run(*args, **kwargs):
            if next(self.calls) != self.call:
                return original(*args, **kwargs)
            if self.late:
                original(*args, **kwargs)
            tally(FAULTS, self.where, right=0)
            self.flag = self.speculator.model.skip_topk
            raise self.error("injected")

        return run

    def install(self, path: str, patch: pytest.MonkeyPatch) -> None:
        if path.startswith("graph"):
            for key, graph in self.speculator.runner._graphs.items():
                if key[0] == path.split()[1]:
                    call = graph.recording.calls[len(graph.recording.calls) // 2]
                    patch.setattr(call, "replay", self(call.replay))
            return
        owner, _, name = path.rpartition(".")
        holder = attrgetter(owner)(self.speculator) if owner else self.speculator
        patch.setattr(holder, name, self(getattr(holder, name)))


@pytest.mark.parametrize("phase, place, setting, late", CASES)
def test_fault_is_recovered_from(phase, place, setting, late, monkeypatch):
    short = 1 if place.step == 5 else STEPS
    steps = short if phase == "capture" else STEPS
    speculator, where = _speculator(setting, steps), f"step {place.step} of {phase}"
    address, counted = speculator.model.buffer.indices.data_ptr(), dict(vars(speculator.stats))
    fault = _Fault(place.call(phase, setting), late, where, speculator)
    with monkeypatch.context() as patch, pytest.raises(fault.error, match="injected"):
        fault.install(place.path, patch)
        speculator.capture() if phase == "capture" else _round(speculator, LENGTHS[0], short)
    # so the fault was in the right step; but in steps 6 and 8 the flag changes
    if place.step not in (6, 8) and place.refreshes is not None:
        assert fault.flag == (setting.shares and place.step == 7 and not place.refreshes)
    # step 8 alone takes the flag off: when it has not begun to, the next round's step 2 does it
    assert speculator.model.skip_topk == (setting.shares and place.step == 8 and not late)
    assert phase == "propose" or vars(speculator.stats) == counted
    if setting.shares:
        _assert_nothing_is_left(speculator, emptied=phase == "capture")
    forwards = speculator.model.forwards
    assert _rounds(speculator) == _undisturbed(setting, steps)
    if setting.recorded:  # graphs outlive a round, and none is left of a capture
        assert (speculator.model.forwards == forwards) == (phase == "propose")
    _assert_captures(speculator, _undisturbed(setting, steps))
    assert speculator.model.buffer.indices.data_ptr() == address
    tally(FAULTS, where, done=0, right=1)


def _assert_nothing_is_left(speculator: MTPSpeculator, *, emptied: bool) -> None:
    """A round that selects nothing is refused, whatever the dead one selected."""
    assert not emptied or speculator.model.buffer.state.kind is SelectionKind.EMPTY
    speculator.on_prefill_begin(1)
    with pytest.raises(StaleSelectionError):
        speculator.on_multi_step_decode_begin(1)
    assert not speculator.model.skip_topk
    assert speculator.graph_state() == (False,)


def _assert_captures(speculator: MTPSpeculator, expected: object) -> None:
    speculator.capture()
    if speculator.share_mtp_topk_indices:
        assert speculator.model.buffer.state.kind is SelectionKind.EMPTY
    assert not speculator.model.skip_topk
    forwards = speculator.model.forwards
    assert _rounds(speculator) == expected
    assert isinstance(speculator.runner, RecordedRunner) == (speculator.model.forwards == forwards)


@pytest.mark.parametrize("phase", ["propose", "capture"])
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_table_breaks_every_step(phase, setting):
    places = (*TABLE, *PLANS[setting.plan])
    broken = {place.step for place in places if place.call(phase, setting) is not None}
    assert broken == set(range(1, 9))
