"""Runners with graphs: what a replay computes, marks and refuses, whichever runner it is."""

from __future__ import annotations

import pytest
import torch

from fake_cuda import GRAPH_RUNNERS, graph_runners
from lightning_indexer.indexer.buffer import SelectionKind, SelectionState, TopkIndicesBuffer
from lightning_indexer.speculator.runner import CaptureError, EagerRunner, GraphStateError


@pytest.fixture(params=GRAPH_RUNNERS)
def runner(request, monkeypatch):
    with graph_runners(request.param, monkeypatch) as kind:
        yield kind()


def _capture(step, runner, *, state=(), num_rows=2, key="step", tensors=()):
    runner.capture(key, step, state=state, num_rows=num_rows, tensors=tensors)


def _run(runner, *, state=(), num_rows=2, key="step", tensors=()):
    def unexpected():
        raise AssertionError("a replay runs no Python")

    runner.run(key, unexpected, state=state, num_rows=num_rows, tensors=tensors)


def _runs_eagerly(runner, key="step") -> bool:
    ran = []
    runner.run(key, lambda: ran.append(1), state=("any",), num_rows=99)
    return ran == [1]


def test_replay_computes_anew_from_what_the_inputs_hold_now(runner):
    x, out = torch.arange(6.0).reshape(2, 3), torch.zeros(2)

    def step():
        doubled = x.t()[1:] * 2  # a view, then a fresh tensor
        scratch = torch.empty_like(doubled).copy_(doubled)
        out.copy_(scratch.sum(0))
        out.add_(1)

    _capture(step, runner)
    for _ in range(3):
        x.copy_(torch.rand(2, 3))
        _run(runner)
        assert torch.equal(out, (x.t()[1:] * 2).sum(0) + 1)


def test_values_read_in_python_are_baked_in(runner):
    flag, out = [True], torch.zeros(2)
    _capture(lambda: out.fill_(1.0 if flag[0] else 2.0), runner)
    flag[0] = False
    out.zero_()
    _run(runner)
    assert out.tolist() == [1, 1]


def test_integer_indexing_is_captured(runner):
    x, index, out = torch.arange(5), torch.tensor([3, 1]), torch.zeros(2, dtype=torch.int64)

    def step():
        out.copy_(x[index])
        x[index] = -out

    _capture(step, runner)
    index.copy_(torch.tensor([0, 4]))
    x.copy_(torch.arange(5) + 10)
    _run(runner)
    assert out.tolist() == [10, 14]
    assert x.tolist() == [-10, 11, 12, 13, -14]


def test_ops_of_the_package_are_captured(runner):
    from lightning_indexer.kernels.compact import compact_topk_indices
    from lightning_indexer.kernels.slots import indices_to_slots

    buffer, rows = torch.arange(6, dtype=torch.int32).reshape(3, 2), torch.tensor([2, 2])
    table = torch.tensor([[4, 5]], dtype=torch.int32)
    out = torch.zeros((2, 2), dtype=torch.int32)
    owner = torch.zeros(2, dtype=torch.int32)

    def step():
        compact_topk_indices(buffer, rows)
        out.copy_(indices_to_slots(buffer[:2], table, owner, 4))

    _capture(step, runner)
    buffer.copy_(torch.arange(6).reshape(3, 2))
    rows.copy_(torch.tensor([1, 0]))
    _run(runner)
    assert buffer.tolist() == [[2, 3], [0, 1], [4, 5]]
    assert out.tolist() == [[18, 19], [16, 17]]


@pytest.mark.parametrize(
    "step",
    [
        lambda x: x.sum().item(),
        lambda x: bool(x.any()),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x.masked_select(x > 0),
        lambda x: x.unique(),
        lambda x: x.__setitem__(x > 0, torch.ones(2)),
    ],
    ids=["item", "bool", "nonzero", "mask", "masked_select", "unique", "mask write"],
)
def test_step_that_reads_device_values_is_refused(step, runner):
    x = torch.tensor([1.0, -1.0, 2.0])
    with pytest.raises(CaptureError):
        runner.capture("step", lambda: step(x), state=(), num_rows=3)
    assert _runs_eagerly(runner)


def test_failed_capture_keeps_nothing(runner):
    # half of the graphs beside eager steps would be a state that nobody has tested
    out = torch.zeros(1)

    def step():
        out.add_(1)
        raise RuntimeError("half-way")

    _capture(lambda: out.fill_(1), runner, key="another")
    with pytest.raises(RuntimeError, match="half-way"):
        _capture(step, runner)
    assert _runs_eagerly(runner)
    assert _runs_eagerly(runner, "another")
    _capture(lambda: out.fill_(3), runner)
    out.zero_()
    _run(runner)
    assert out.tolist() == [3]


def test_unknown_key_runs_eagerly(runner):
    out = torch.zeros(1)
    _capture(lambda: out.fill_(1), runner)
    assert _runs_eagerly(runner, "other")


def test_replay_in_another_state_is_refused(runner):
    out = torch.zeros(1)
    _capture(lambda: out.add_(1), runner, state=(True,))
    with pytest.raises(GraphStateError, match=r"captured in state \(True,\), now is \(False,\)"):
        _run(runner, state=(False,))
    assert out.tolist() == [1]


def test_replay_of_more_rows_is_refused(runner):
    out = torch.zeros(4)
    _capture(lambda: out.add_(1), runner, num_rows=4)
    for num_rows in (4, 3, 0):
        _run(runner, num_rows=num_rows)
    before = out.tolist()
    with pytest.raises(GraphStateError, match="captured for 4 rows, now has 5"):
        _run(runner, num_rows=5)
    assert out.tolist() == before


MOVES = {
    "address": lambda x: x.clone(),
    "shape": lambda x: x[:3],
    "strides": lambda x: x.t(),
}


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_replay_with_a_moved_tensor_is_refused(move, runner):
    x, out = torch.ones(4, 4), torch.zeros(4, 4)
    _capture(lambda: out.add_(x), runner, tensors=(x, out))
    _run(runner, tensors=(x, out))
    before = out.tolist()
    with pytest.raises(GraphStateError, match="a tensor has moved since graph step was captured"):
        _run(runner, tensors=(move(x), out))
    assert out.tolist() == before


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_replay_with_a_moved_selection_buffer_is_refused(move, runner):
    read, out = _tracked(4, 4), torch.zeros(4, 4, dtype=torch.int32)
    captured = read.indices  # stays alive, as a graph's memory does
    runner.watch([_tracked(), read])
    _capture(lambda: out.add_(captured), runner)
    read.indices = move(captured)
    before = out.tolist()
    with pytest.raises(GraphStateError, match="a tensor has moved since graph step was captured"):
        _run(runner)
    assert out.tolist() == before
    read.indices = captured
    _run(runner)
    assert out.tolist() != before


def _tracked(rows: int = 6, width: int = 2) -> TopkIndicesBuffer:
    buffer = TopkIndicesBuffer(rows, width)
    buffer.track()
    return buffer


def test_replay_marks_the_buffers_that_the_capture_wrote(runner):
    written, untouched = _tracked(), _tracked()
    runner.watch([written, untouched])
    _capture(lambda: written.rows(4).fill_(1), runner, num_rows=4)
    runner.end_capture()
    assert written.state.kind is SelectionKind.EMPTY
    written.new_generation()
    _run(runner, num_rows=3)
    assert written.state == SelectionState(SelectionKind.PER_TOKEN, 4, written.generation)
    assert untouched.state.kind is SelectionKind.EMPTY


def test_eager_run_marks_the_rows_it_was_given():
    written, untouched = _tracked(), _tracked()
    runner = EagerRunner()
    runner.watch([written, untouched])
    runner.run("step", lambda: written.rows(4).fill_(1), state=(), num_rows=3)
    assert written.state == SelectionState(SelectionKind.PER_TOKEN, 3, written.generation)
    assert untouched.state.kind is SelectionKind.EMPTY


def test_watching_other_buffers_forgets_the_graphs(runner):
    out = torch.zeros(1)
    _capture(lambda: out.fill_(1), runner)
    runner.watch([_tracked()])
    assert _runs_eagerly(runner)


def test_second_capture_replaces_the_first(runner):
    out = torch.zeros(1)
    _capture(lambda: out.fill_(1), runner)
    _capture(lambda: out.fill_(2), runner)
    out.zero_()
    _run(runner)
    assert out.tolist() == [2]
