"""`RecordedRunner`: a graph's semantics on a CPU."""

from __future__ import annotations

import pytest
import torch

from lightning_indexer.indexer.buffer import SelectionKind, SelectionState, TopkIndicesBuffer
from lightning_indexer.speculator.recorded import CaptureError, RecordedRunner
from lightning_indexer.speculator.runner import EagerRunner, GraphStateError


def _capture(step, runner=None, *, state=(), num_rows=2, key="step"):
    runner = runner or RecordedRunner()
    runner.capture(key, step, state=state, num_rows=num_rows)
    return runner


def _run(runner, *, state=(), num_rows=2, key="step"):
    def unexpected():
        raise AssertionError("a replay runs no Python")

    runner.run(key, unexpected, state=state, num_rows=num_rows)


def test_replay_computes_anew_from_what_the_inputs_hold_now():
    x, out = torch.arange(6.0).reshape(2, 3), torch.zeros(2)

    def step():
        doubled = x.t()[1:] * 2  # a view, then a fresh tensor
        scratch = torch.empty_like(doubled).copy_(doubled)
        out.copy_(scratch.sum(0))
        out.add_(1)

    runner = _capture(step)
    for _ in range(3):
        x.copy_(torch.rand(2, 3))
        _run(runner)
        assert torch.equal(out, (x.t()[1:] * 2).sum(0) + 1)


def test_values_read_in_python_are_baked_in():
    flag, out = [True], torch.zeros(2)
    runner = _capture(lambda: out.fill_(1.0 if flag[0] else 2.0))
    flag[0] = False
    out.zero_()
    _run(runner)
    assert out.tolist() == [1, 1]


def test_integer_indexing_is_captured():
    x, index, out = torch.arange(5), torch.tensor([3, 1]), torch.zeros(2, dtype=torch.int64)

    def step():
        out.copy_(x[index])
        x[index] = -out

    runner = _capture(step)
    index.copy_(torch.tensor([0, 4]))
    x.copy_(torch.arange(5) + 10)
    _run(runner)
    assert out.tolist() == [10, 14]
    assert x.tolist() == [-10, 11, 12, 13, -14]


def test_ops_of_the_package_are_captured():
    from lightning_indexer.kernels.compact import compact_topk_indices
    from lightning_indexer.kernels.slots import indices_to_slots

    buffer, rows = torch.arange(6, dtype=torch.int32).reshape(3, 2), torch.tensor([2, 2])
    table = torch.tensor([[4, 5]], dtype=torch.int32)
    out = torch.zeros((2, 2), dtype=torch.int32)
    owner = torch.zeros(2, dtype=torch.int32)

    def step():
        compact_topk_indices(buffer, rows)
        out.copy_(indices_to_slots(buffer[:2], table, owner, 4))

    runner = _capture(step)
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
def test_step_that_reads_device_values_is_refused(step):
    x = torch.tensor([1.0, -1.0, 2.0])
    runner = RecordedRunner()
    with pytest.raises(CaptureError):
        runner.capture("step", lambda: step(x), state=(), num_rows=3)
    ran = []
    runner.run("step", lambda: ran.append(1), state=(), num_rows=3)
    assert ran == [1]  # the graph was not kept: the step runs eagerly


def test_failed_capture_is_not_kept():
    out = torch.zeros(1)

    def step():
        out.add_(1)
        raise RuntimeError("half-way")

    runner = RecordedRunner()
    with pytest.raises(RuntimeError, match="half-way"):
        runner.capture("step", step, state=(), num_rows=1)
    runner.run("step", lambda: out.fill_(7), state=(), num_rows=1)
    assert out.tolist() == [7]


def test_unknown_key_runs_eagerly():
    out = torch.zeros(1)
    runner = _capture(lambda: out.fill_(1))
    runner.run("other", lambda: out.fill_(2), state=("any",), num_rows=1)
    assert out.tolist() == [2]


def test_replay_in_another_state_is_refused():
    out = torch.zeros(1)
    runner = _capture(lambda: out.add_(1), state=(True,))
    with pytest.raises(GraphStateError, match=r"captured in state \(True,\), now is \(False,\)"):
        _run(runner, state=(False,))
    assert out.tolist() == [1]


def _tracked() -> TopkIndicesBuffer:
    buffer = TopkIndicesBuffer(6, 2)
    buffer.track()
    return buffer


def test_replay_marks_the_buffers_that_the_capture_wrote():
    written, untouched = _tracked(), _tracked()
    runner = RecordedRunner()
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


def test_watching_other_buffers_forgets_the_graphs():
    out = torch.zeros(1)
    runner = _capture(lambda: out.fill_(1))
    runner.watch([_tracked()])
    runner.run("step", lambda: out.fill_(2), state=(), num_rows=1)
    assert out.tolist() == [2]


def test_second_capture_replaces_the_first():
    out = torch.zeros(1)
    runner = _capture(lambda: out.fill_(1))
    _capture(lambda: out.fill_(2), runner)
    out.zero_()
    _run(runner)
    assert out.tolist() == [2]
