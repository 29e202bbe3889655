"""`CudaGraphRunner`: its streams and its pool; and speculators on runners with graphs."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch

from fake_cuda import CUDA_RUNNERS, GRAPH_RUNNERS, FakeCuda, graph_runners
from lightning_indexer.indexer.buffer import SelectionKind
from lightning_indexer.speculator.cuda_graphs import CudaGraphRunner
from lightning_indexer.speculator.mtp import MTPSpeculator
from lightning_indexer.speculator.recorded import RecordedRunner
from lightning_indexer.speculator.runner import CaptureError, EagerRunner, GraphStateError
from toy import SharingDraft, simple_drafts, simple_round, toy_block_table, toy_config, toy_draft

LENGTHS = [3, 1, 5]


@pytest.fixture
def cuda(monkeypatch):
    stand_in = FakeCuda()
    stand_in.install(monkeypatch)
    return stand_in


@pytest.fixture(params=GRAPH_RUNNERS)
def kind(request, monkeypatch):
    with graph_runners(request.param, monkeypatch) as runner_class:
        yield runner_class


@pytest.fixture(params=CUDA_RUNNERS)
def cuda_kind(request, monkeypatch):
    with graph_runners(request.param, monkeypatch) as runner_class:
        yield runner_class


def _capture(runner, step, key="step", **options):
    runner.capture(key, step, **({"state": (), "num_rows": 2} | options))


def test_warms_up_and_captures_on_a_side_stream(cuda):
    runner, out, streams = CudaGraphRunner(), torch.zeros(2), []

    def step():
        streams.append(torch.cuda.current_stream())
        out.add_(1)

    _capture(runner, step)
    (side,) = cuda.streams
    assert streams == [side, side]
    assert cuda.current is cuda.default_stream
    assert side.waited_for == [cuda.default_stream]  # its inputs are there,
    assert cuda.default_stream.waited_for == [side]  # and so are its results
    assert out.tolist() == [1, 1]  # of the warm-up


def _die(x):
    raise ValueError("half-way")


def _break(x):
    raise RuntimeError("half-way")


def _read_back(x):
    x.add_(1).item()


def _read_back_and_go_on(x):
    with suppress(RuntimeError):
        _read_back(x)


@pytest.mark.parametrize(
    "fails, in_run, error",
    [
        (_die, 1, ValueError),
        (_die, 2, ValueError),
        (_break, 1, RuntimeError),
        (_break, 2, CaptureError),
        (_read_back, 2, CaptureError),
        (_read_back_and_go_on, 2, CaptureError),
    ],
)
@pytest.mark.parametrize("works_first", [True, False])
def test_failure_gives_the_caller_its_stream_back(cuda, fails, in_run, error, works_first):
    runner, x, runs = CudaGraphRunner(), torch.zeros(1), []

    def step():
        runs.append(1)
        if works_first:
            x.add_(1)
        if len(runs) == in_run:
            fails(x)

    with pytest.raises(error, match=r"half-way|captured") as raised:
        _capture(runner, step)
    assert type(raised.value) is error
    assert cuda.current is cuda.default_stream
    assert cuda.default_stream.waited_for == cuda.streams


def test_what_happens_only_the_first_time_is_not_captured(cuda_kind):
    runner, x, scale = cuda_kind(), torch.ones(2), []

    def step():
        if not scale:
            scale.append(x.sum().item())  # no graph could hold it
        x.mul_(scale[0])

    _capture(runner, step)
    assert x.tolist() == [2, 2]
    runner.run("step", pytest.fail, state=(), num_rows=2)
    assert x.tolist() == [4, 4]


def test_step_without_device_work_is_refused(cuda_kind):
    with pytest.raises(CaptureError, match="empty"):
        _capture(cuda_kind(), lambda: None)


def test_all_graphs_share_one_pool_until_they_are_forgotten(cuda):
    runner, out = CudaGraphRunner(), torch.zeros(2)
    for key in ("a", "b", "a"):  # capturing anew never leaves the pool without a graph
        _capture(runner, lambda: out.add_(1), key)
    assert cuda.pools == {1: 2}
    runner.watch(())
    assert cuda.pools == {1: 0}
    _capture(runner, lambda: out.add_(1))
    with pytest.raises(ValueError, match="half-way"):
        _capture(runner, _raises_half_way)
    assert cuda.pools == {1: 0, 2: 0}
    _capture(runner, lambda: out.add_(1))
    assert cuda.pools == {1: 0, 2: 0, 3: 1}


def test_graph_captured_once_again_keeps_the_pool(cuda):
    runner, out = CudaGraphRunner(), torch.zeros(2)
    for _ in range(3):
        _capture(runner, lambda: out.add_(1))
    assert cuda.pools == {1: 1}


def _raises_half_way():
    raise ValueError("half-way")


def _speculator(runner, steps=4, *, draft=None, **changes):
    config = toy_config(steps, **({"padded": True} | changes))
    draft = toy_draft(config) if draft is None else draft
    return MTPSpeculator(draft, config, runner=runner), toy_block_table(config)


@pytest.mark.parametrize(
    "lengths", [LENGTHS, [1], [2, 4, 1, 5], [12], [1, 1, 1, 1]], ids=lambda x: f"{len(x)} requests"
)
@pytest.mark.parametrize("steps", [0, 1, 2, 4])
def test_drafts_are_those_of_the_eager_runner(kind, steps, lengths):
    drafts = []
    for runner in (EagerRunner(), kind()):
        speculator, table = _speculator(runner, steps)
        speculator.capture()
        forwards = speculator.model.forwards
        for _ in range(2):
            drafts.append(speculator.propose(*simple_round(table, lengths)).cpu())
    assert speculator.model.forwards == forwards  # every padded size was replayed
    assert all(torch.equal(d, drafts[0]) for d in drafts)
    table = toy_block_table(toy_config(steps))
    simple_round(table, lengths)
    assert torch.equal(drafts[0], simple_drafts(table, lengths, steps, shares=True).cpu())


def _fail_and_recover(kind, fail_at) -> bool:
    """Whether forward `fail_at` of a second capture was reached, and raised."""
    speculator, table = _speculator(kind())
    draft = speculator.model
    speculator.capture()
    if fail_at == draft.forwards:
        return False
    draft.forwards, draft.fail_at = 0, fail_at
    with pytest.raises(RuntimeError, match="the draft broke"):
        speculator.capture()
    draft.forwards, draft.fail_at = 0, None
    assert not draft.skip_topk
    assert draft.buffer.state.kind is SelectionKind.EMPTY
    assert speculator.graph_state() == (False,)
    got = speculator.propose(*simple_round(table, LENGTHS))
    assert torch.equal(got, simple_drafts(table, LENGTHS, 4, shares=True).to(got.device))
    assert draft.forwards == 4  # no graph of either capture was left
    speculator.capture()
    assert torch.equal(speculator.propose(*simple_round(table, LENGTHS)), got)
    return True


def test_failed_capture_leaves_an_eager_speculator(kind):
    failures = 0
    while _fail_and_recover(kind, failures):
        failures += 1
    assert failures == (6 if kind is RecordedRunner else 12)  # warmed up, then captured


def test_replay_under_another_flag_is_refused(kind):
    speculator, table = _speculator(kind())
    speculator.capture()

    class Unshared(MTPSpeculator):
        def on_multi_step_decode_begin(self, num_reqs):
            """Forgets to set the flag, which the graphs have baked in."""

    speculator.__class__ = Unshared
    with pytest.raises(GraphStateError, match=r"\(True,\), now is \(False,\)"):
        speculator.propose(*simple_round(table, LENGTHS))


def test_replay_with_another_selection_buffer_is_refused(kind):
    speculator, table = _speculator(kind())
    speculator.capture()
    held = speculator.model.buffer.indices
    speculator.model.buffer.indices = held.clone()
    with pytest.raises(GraphStateError, match="a tensor has moved"):
        speculator.propose(*simple_round(table, LENGTHS))
    speculator.model.buffer.indices = held
    got = speculator.propose(*simple_round(table, LENGTHS))
    assert torch.equal(got, simple_drafts(table, LENGTHS, 4, shares=True).to(got.device))


class _Segmented(SharingDraft):
    """Replays one segment of its forward and runs the other in Python, on any batch size.

    Both segments leave the flag that they went by. `key` of the replayed one has the flag in it,
    or has not.
    """

    def split(self, runner, *, flag_in_key: bool) -> None:
        self.runner, self.flag_in_key = runner, flag_in_key
        self.baked, self.hidden = torch.zeros(1, dtype=torch.bool), torch.zeros(12, 3)
        self.captured, self.flags = set(), []
        runner.watch([self.buffer])  # its write goes unseen by the speculator's runner

    def forward(self, batch):
        rows = batch.num_tokens_padded
        key = (rows, self.skip_topk) if self.flag_in_key else rows

        def segment():
            self.baked.fill_(self.skip_topk)
            self.hidden[:rows] = super(_Segmented, self).forward(batch)

        run = self.runner.run if key in self.captured else self.runner.capture
        self.captured.add(key)
        run(key, segment, state=(self.skip_topk,), num_rows=rows, tensors=[batch.hidden])
        self.flags.append((self.skip_topk, bool(self.baked)))
        return self.hidden[:rows]


def test_replayed_segment_and_the_eager_one_beside_it_go_by_one_flag(kind):
    config = toy_config(4, prefill_sizes=(4, 8, 12), decode_sizes=(4,))
    draft = toy_draft(config, _Segmented)
    draft.split(kind(), flag_in_key=True)
    speculator, table = _speculator(None, draft=draft, **_sizes(config))
    for lengths in (LENGTHS, [2, 1], [1, 2], [4], LENGTHS):  # 4 rows: prefill's and decode's
        draft.flags.clear()
        got = speculator.propose(*simple_round(table, lengths))
        assert torch.equal(got, simple_drafts(table, lengths, 4, shares=True).to(got.device))
        assert draft.flags == [(False, False), (True, True), (True, True), (True, True)]
    assert draft.captured == {(12, False), (4, False), (4, True)}
    assert draft.forwards < 20  # in Python, where each of 5 rounds has 4


def test_segment_of_one_graph_for_both_flags_is_refused(kind):
    config = toy_config(4, prefill_sizes=(4, 8, 12), decode_sizes=(4,))
    draft = toy_draft(config, _Segmented)
    draft.split(kind(), flag_in_key=False)
    speculator, table = _speculator(None, draft=draft, **_sizes(config))
    for _ in range(2):
        with pytest.raises(GraphStateError, match=r"\(False,\), now is \(True,\)"):
            speculator.propose(*simple_round(table, [1, 2]))
        assert not draft.skip_topk
    assert draft.flags == [(False, False)] * 2


def _sizes(config):
    return {"prefill_sizes": config.prefill_sizes, "decode_sizes": config.decode_sizes}


@pytest.mark.parametrize("lengths", [LENGTHS, [2], [2, 1], [1, 1, 1, 1]], ids=str)
@pytest.mark.parametrize("decode_sizes", [(), (1, 2), (4,)], ids=lambda x: f"decode {x}")
@pytest.mark.parametrize("prefill_sizes", [(1,), (2, 4), (12,)], ids=lambda x: f"prefill {x}")
def test_captured_step_and_eager_ones_of_a_round_go_by_one_flag(
    kind, prefill_sizes, decode_sizes, lengths
):
    flags, eager = [], []

    class Spied(kind):
        def run(self, key, step, *, state, **options):
            super().run(key, step, state=state, **options)
            flags.append((key[0], draft.skip_topk, *state))

    config = toy_config(3, prefill_sizes=prefill_sizes, decode_sizes=decode_sizes)
    draft = toy_draft(config, log=lambda _, flag: eager.append(flag))
    speculator, table = _speculator(Spied(), 3, draft=draft, **_sizes(config))
    speculator.capture()
    eager.clear()
    got = speculator.propose(*simple_round(table, lengths))
    assert torch.equal(got, simple_drafts(table, lengths, 3, shares=True).to(got.device))
    assert flags == [("prefill", False, False), *[("decode", True, True)] * 2]
    prefill_is_eager = sum(lengths) > max(prefill_sizes)
    decode_is_eager = len(lengths) > max(decode_sizes, default=0)
    assert eager == [False] * prefill_is_eager + [True, True] * decode_is_eager
