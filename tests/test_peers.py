"""The peers' harness says what the kit finds, and docs/peers.md says what the harness found."""

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from lightning_indexer.testing import (
    CompactContract,
    SparseAttentionContract,
    TopkContract,
    check_compact,
    check_sparse_attention,
)
from lightning_indexer.testing.conformance import properties, run_property
from lightning_indexer.testing.contracts import KernelContract
from lightning_indexer.testing.report import Failure
from peers import __main__ as command
from peers import torch_selection
from peers.families import PEERS
from peers.interpreter import repaired_interpreter
from peers.judge import judge
from peers.peer import Peer, Probe
from peers.table import BEGIN, END, markdown, write
from right_kernels import NEG_INF, paged_mqa_logits, sparse_attention

once = pytest.mark.once
pytestmark = pytest.mark.usefixtures("uncounted")

DOCS = Path(__file__).parents[1] / "docs" / "peers.md"


def tables() -> list[list[list[str]]]:
    """Rows of cells of the two tables in docs/peers.md, without their heads."""
    between = DOCS.read_text().split(BEGIN)[1].split(END)[0]
    found = []
    for table in re.findall(r"(?:^\|.*\n)+", between, re.MULTILINE):
        lines = table.splitlines()[2:]
        found.append([re.split(r"(?<!\\) \| ", line.strip("| ")) for line in lines])
    return found


@once
def test_docs_have_a_row_for_every_peer_and_every_probe() -> None:
    own, probes = tables()
    assert [row[:2] for row in own] == [[f"`{p.name}`", p.promises] for p in PEERS]
    assert all(row[4].endswith("properties hold") for row in own)
    asked = [[f"`{p.name}`", probe.promise] for p in PEERS for probe in p.probes]
    assert [row[:2] for row in probes] == asked


@once
def test_peers_of_three_projects_have_names_of_their_own() -> None:
    assert len({p.name for p in PEERS}) == len(PEERS)
    assert {p.package for p in PEERS} == {"torch", "transformers", "vllm"}
    assert any(p.triton for p in PEERS)


@once
@pytest.mark.parametrize("peer", torch_selection.PEERS, ids=lambda p: p.name)
def test_pytorch_is_judged_as_the_docs_say(peer: Peer) -> None:
    rows = {row[1]: row[2] for row in tables()[1] if row[0] == f"`{peer.name}`"}
    found = judge(peer, 6)
    assert found.own.holds, found.own
    for verdict in found.probes:
        assert verdict.holds == rows[verdict.promise].startswith("held"), verdict
        assert verdict.holds == (not verdict.case)


def last_of_equals(logits: torch.Tensor, k: int) -> torch.Tensor:
    """A peer with a fault: one score too few is looked at."""
    return torch.topk(logits[:, :-1], min(k, logits.shape[1] - 1), dim=1).indices


def wrong_peer() -> Peer:
    contract = dataclasses.replace(torch_selection.UNSTABLE, empty_sizes=False)
    stricter = dataclasses.replace(contract, tie_rule="smaller position")
    probe = Probe("a | b", stricter, ("all equal", "of normal"))
    return Peer("wrong", "torch", "here", "all", "topk", lambda: last_of_equals, contract, (probe,))


@once
def test_a_peer_that_breaks_its_promise_is_reported_with_its_smallest_case() -> None:
    found = judge(wrong_peer(), 10)
    assert not found.own.holds and "selects the best of normal scores" in found.own.failed
    assert "TopkCase(rows=1, length=1, k=1," in found.own.case
    assert found.own.reason.startswith("shape [1, 0], expected [1, 1]")
    assert found.row()["own"]["reason"] == found.own.reason
    text = markdown([found], "head")
    assert "properties fail; selects the best of " in text
    assert "| a \\| b |" in text


@once
def test_a_probe_about_nothing_is_an_error() -> None:
    peer = wrong_peer()
    probe = dataclasses.replace(peer.probes[0], about=("no such words",))
    with pytest.raises(ValueError, match="no property of topk is about"):
        judge(dataclasses.replace(peer, probes=(probe,)), 2)


@once
def test_tables_go_between_the_markers_and_nothing_else_changes(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    write(path, "new \\1\n")
    assert path.read_text() == f"before\n{BEGIN}\nnew \\1\n{END}\nafter\n"
    write(tmp_path / "other.md", "new\n")
    assert (tmp_path / "other.md").read_text() == "new\n"


@once
def test_what_is_not_installed_is_not_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    missing = dataclasses.replace(wrong_peer(), package="no-such-distribution")
    kernel = dataclasses.replace(wrong_peer(), name="kernel", triton=True)
    monkeypatch.setattr(command, "PEERS", (missing, kernel))
    monkeypatch.setattr(command, "INTERPRET", False)
    monkeypatch.setattr("sys.argv", ["peers"])
    assert command.main() == 2
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "wrong: not run, no-such-distribution is not installed"
    assert said[1] == "kernel: not run, it needs TRITON_INTERPRET=1"
    monkeypatch.setattr("sys.argv", ["peers", "--only", "torch.bottomk"])
    with pytest.raises(SystemExit, match=r"no such peer: torch\.bottomk"):
        command.main()


@once
def test_a_broken_promise_is_exit_code_1(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(command, "PEERS", (wrong_peer(),))
    monkeypatch.setattr(
        "sys.argv", ["peers", "--examples", "2", "--json", str(tmp_path / "found.json")]
    )
    assert command.main() == 1
    assert '"peer": "wrong"' in (tmp_path / "found.json").read_text()


# What the kit learned from the peers.


def tried(op: str, fn: Callable, contract: KernelContract, name: str) -> Failure | None:
    """How one property fares in 25 cases."""
    (prop,) = (p for p in properties(op, fn, contract) if p.name == name)
    return run_property(prop, 25).failure


@once
def test_k_past_length_is_drawn_only_where_it_is_promised() -> None:
    past: list[int] = []

    def select(logits, k, row_starts, row_ends):
        past.append(k - logits.shape[1])
        return torch_selection.masked_topk(logits, k, row_starts, row_ends)

    weak = torch_selection.WINDOWED
    tried("topk", select, weak, "selects the best of normal scores")
    assert len(past) > 20 and max(past) <= 0
    strict = dataclasses.replace(weak, k_past_length=True)
    tried("topk", select, strict, "selects the best of normal scores")
    assert max(past) > 0 and TopkContract().k_past_length


def dense_attention(q, kv, indices, scale, v_dim):
    """Every slot takes part, those that are not listed with weight 0."""
    scores = torch.einsum("thd,sd->ths", q.double(), kv.double()) * scale
    listed = torch.zeros(len(q), len(kv), dtype=torch.bool).scatter(1, indices.long(), True)
    weights = torch.softmax(scores.masked_fill(~listed[:, None], NEG_INF), dim=2)
    return torch.einsum("ths,sd->thd", weights, kv[:, :v_dim].double()).to(q.dtype)


@once
def test_unlisted_slots_are_special_unless_a_contract_says_otherwise() -> None:
    weak = SparseAttentionContract(
        caches=("floats",),
        lse=False,
        empty_rows=False,
        repeats=False,
        unlisted="finite",
        empty_sizes=False,
    )
    # Only with each index a slot does the scatter not raise: none is −1 where none may be.
    check_sparse_attention(dense_attention, weak, examples=30).raise_if_failed()
    strict = dataclasses.replace(weak, unlisted="special")
    name = "attends to the listed slots with normal scores"
    failure = tried("sparse_attention", dense_attention, strict, name)
    assert failure and "NaN differs" in failure.reason
    assert tried("sparse_attention", sparse_attention, strict, name) is None
    with pytest.raises(ValueError, match="unlisted must be out of"):
        SparseAttentionContract(unlisted="anything")


@once
@pytest.mark.parametrize("share, accepted", [(2.0**-20, True), (2.0**-3, False)])
def test_bits_may_depend_on_the_width_where_a_contract_says_so(
    share: float, accepted: bool
) -> None:
    def unsteady(q, kv, indices, scale, v_dim):
        odd = indices.shape[1] % 2
        return sparse_attention(q, kv, indices, scale, v_dim) * (1 + share * odd)

    weak = SparseAttentionContract(
        caches=("floats",), dtypes=(torch.float32,), lse=False, batch_invariant=False
    )
    strict = dataclasses.replace(weak, batch_invariant=True)
    name = "absent indices appended change nothing"
    assert (tried("sparse_attention", unsteady, weak, name) is None) == accepted
    assert tried("sparse_attention", unsteady, strict, name)


def attention_over_bytes(q, kv, indices, scale, v_dim, *, shift=0):
    """Rows of 656 bytes widened, then the attention of other hands; no lse."""
    raw = kv.contiguous()
    values = raw[:, :512].contiguous().view(torch.float8_e4m3fn).float().unflatten(1, (4, 128))
    scales = raw[:, 512:528].contiguous().view(torch.float32).roll(shift, 1)
    rope = raw[:, 528:].contiguous().view(torch.bfloat16).float()
    rows = torch.cat([(values * scales[..., None]).flatten(1), rope], dim=1)
    return sparse_attention(q.float(), rows, indices, scale, v_dim).to(q.dtype)


@once
def test_rows_of_656_bytes_are_judged() -> None:
    promised = SparseAttentionContract(
        caches=("656 bytes",),
        lse=False,
        batch_invariant=False,
        heads=(1, 3),
        max_rows=2,
        max_slots=5,
        empty_sizes=False,
    )
    check_sparse_attention(attention_over_bytes, promised, examples=8).raise_if_failed()

    def next_scale(*inputs):
        return attention_over_bytes(*inputs, shift=1)

    name = "attends to 656-byte rows with normal scores"
    assert "cache='656 bytes'" in str(tried("sparse_attention", next_scale, promised, name))
    with pytest.raises(ValueError, match=r"caches must be \('floats',\) without fp16 and bf16"):
        SparseAttentionContract(dtypes=(torch.float32,))


def compact_each(buffers: list[torch.Tensor], rows: torch.Tensor) -> None:
    for buffer in buffers:
        buffer[: len(rows)] = buffer[rows.long()]


@once
def test_a_buffer_that_is_listed_twice_is_the_same_buffer() -> None:
    weak = CompactContract(num_rows=False, repeats=False, orders=("random", "reversed"))
    check_compact(compact_each, weak).raise_if_failed()
    strict = dataclasses.replace(weak, repeats=True)
    (outcome,) = check_compact(compact_each, strict).failures
    assert "a buffer listed twice, and once" in outcome.failure.reason


@once
def test_scores_that_nothing_is_said_of_are_not_compared() -> None:
    calls = iter(range(10**9))

    def careless(q, cache, weights, context_lens, block_table, **sizes):
        got = paged_mqa_logits(q, cache, weights, context_lens, block_table, **sizes)
        return got.masked_fill(got == NEG_INF, float(next(calls)))

    promised = paged_mqa_logits.lightning_indexer_contract
    weak = dataclasses.replace(promised, outside="anything")
    strict = dataclasses.replace(promised, outside="-inf")
    op, double = "paged_mqa_logits", "weights doubled double the scores"
    for name in (
        "scores normal operands by the formula",
        double,
        "the same call gives the same answer",
    ):
        assert tried(op, careless, weak, name) is None
        assert tried(op, careless, strict, name)


# Triton's interpreter.


@triton.jit
def _products_kernel(a_ptr, b_ptr, out_ptr, sums_ptr, N: tl.constexpr):
    offs = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    a, b = tl.load(a_ptr + offs), tl.load(b_ptr + offs)
    tl.store(out_ptr + offs, tl.dot(a, b))
    tl.store(sums_ptr + offs, a.to(tl.float32) * 1.001)


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_interpreter_is_repaired_and_left_as_it_was(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(16, 16, generator=generator).to(dtype) for _ in range(2))
    out, sums = torch.empty(16, 16), torch.empty(16, 16, dtype=dtype)
    with repaired_interpreter():
        _products_kernel[(1,)](a, b, out, sums, N=16)
    assert torch.allclose(out, a.float() @ b.float(), rtol=1e-6, atol=1e-6)
    assert torch.equal(sums.float(), (a.float() * 1.001).to(dtype).float())
    from triton.runtime.interpreter import InterpreterBuilder

    assert InterpreterBuilder.create_dot.__module__ == "triton.runtime.interpreter"
