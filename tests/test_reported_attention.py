"""Public reports of sparse attention gone wrong, as inputs of our own; each names its source."""

import inspect
import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import lightning_indexer as li
from attention_cases import assert_is_attention
from counting import counts_examples
from lightning_indexer.kernels.backend import INTERPRET
from lightning_indexer.kernels.sparse_mla_attention import sparse_mla_attention
from lightning_indexer.tinylm import window
from lightning_indexer.tinylm.model import random_model
from scoring import share

STALE = 2_147_480_000  # how another library's tests spell "no token"
#: The example that several reports share: weights e, 1, e.
Q, KV = torch.tensor([[[1.0, 0.0]]]), torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])


@dataclass(frozen=True)
class Case:
    """Queries [rows, heads, dim] over `slots` vectors, and `width` distinct slots a row."""

    rows: int
    heads: int
    dim: int
    v_dim: int
    slots: int
    width: int
    seed: int

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, kv and indices, none of them absent."""
        g = torch.Generator().manual_seed(self.seed)
        q = torch.randn(self.rows, self.heads, self.dim, generator=g)
        kv = torch.randn(self.slots, self.dim, generator=g)
        order = torch.rand(self.rows, self.slots, generator=g).argsort(1)
        return q, kv, order[:, : self.width].int()


@st.composite
def cases(draw: st.DrawFn) -> Case:
    dim, slots = draw(st.integers(1, 40)), draw(st.integers(1, 150))
    return Case(
        rows=draw(st.integers(1, 3)),
        heads=draw(st.sampled_from([1, 2, 3, 16])),
        dim=dim,
        v_dim=draw(st.integers(1, dim)),
        slots=slots,
        width=draw(st.integers(1, min(slots, 80))),
        seed=draw(st.integers(0, 2**31)),
    )


def among_absent(indices: torch.Tensor, extra: int, seed: int, absent: int = -1) -> torch.Tensor:
    """`indices` [T, W] in order, between `extra` absent ones at places drawn for each row."""
    rows, width = indices.shape
    g = torch.Generator().manual_seed(seed)
    kept = torch.rand(rows, width + extra, generator=g).argsort(1)[:, :width].sort(1).values
    return torch.full((rows, width + extra), absent, dtype=indices.dtype).scatter(1, kept, indices)


def assert_is_formula(
    got: tuple[torch.Tensor, torch.Tensor],
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    scale: float,
    v_dim: int,
) -> None:
    inputs = {"q": q, "kv": kv, "indices": indices, "scale": scale, "v_dim": v_dim}
    assert_is_attention(got, inputs)


@share(2)
@given(case=cases(), extra=st.integers(0, 70), seed=st.integers(0, 2**31))
@counts_examples("sparse_mla_attention")
def test_absent_slots_anywhere_in_a_row_take_no_part(case: Case, extra: int, seed: int) -> None:
    # vllm-project/vllm#48364: the running maximum was −inf − −inf = NaN after absent slots alone.
    q, kv, indices = case.tensors()
    scale = case.dim**-0.5
    got = sparse_mla_attention(q, kv, among_absent(indices, extra, seed), scale, case.v_dim)
    assert_is_formula(got, q, kv, indices, scale, case.v_dim)
    first = torch.cat([torch.full((case.rows, extra), -1).int(), indices], 1)
    got = sparse_mla_attention(q, kv, first, scale, case.v_dim)
    assert_is_formula(got, q, kv, indices, scale, case.v_dim)


@pytest.mark.parametrize("absent", [0, 1, 16, 64, 200])
def test_sum_is_a_natural_logarithm_wherever_the_slots_are(absent: int) -> None:
    # vllm-project/vllm#48364 (16 absent slots first), flashinfer-ai/flashinfer#5203 (merged with
    # the wrong base: the binary logarithm would be 2.6862906)
    indices = torch.tensor([[-1] * absent + [0, 1, 2, -1]], dtype=torch.int32)
    out, lse = sparse_mla_attention(Q, KV, indices, 1.0, 2)
    total = 2 * math.e + 1
    assert torch.allclose(out[0, 0], torch.tensor([2 * math.e, math.e + 1]) / total, atol=1e-6)
    assert lse.item() == pytest.approx(math.log(total), abs=1e-6)
    assert lse.item() / math.log(2) == pytest.approx(2.6862906, abs=1e-6)


@share(4)
@given(case=cases(), data=st.data())
@counts_examples("sparse_mla_attention")
def test_parts_of_a_row_merge_by_their_natural_logarithms(case: Case, data: st.DataObject) -> None:
    # flashinfer-ai/flashinfer#5203; a part without any slot weighs nothing, and makes no NaN
    q, kv, indices = case.tensors()
    at = data.draw(st.integers(0, case.width))
    parts = [
        sparse_mla_attention(q, kv, part, 0.5, case.v_dim)
        for part in (indices[:, :at], indices[:, at:])
    ]
    lse = torch.logaddexp(*(part[1].double() for part in parts))
    merged = sum(out.double() * (one - lse).exp()[:, :, None] for out, one in parts)
    assert_is_formula((merged, lse), q, kv, indices, 0.5, case.v_dim)


@share(4)
@given(case=cases(), empty=st.integers(0, 2), width=st.sampled_from([0, 1, 7, 65]))
@counts_examples("sparse_mla_attention")
def test_row_without_a_slot_is_zero_and_minus_infinity(case: Case, empty: int, width: int) -> None:
    # flashinfer-ai/flashinfer#4484: backends differed. NVIDIA/Megatron-LM#7434: one of two
    # libraries says +inf; here it is −inf, the logarithm of an empty sum.
    q, kv, indices = case.tensors()
    empty = empty % case.rows
    indices[empty] = -1
    stale = torch.full((case.rows, case.heads, case.v_dim), float("nan"))
    got = sparse_mla_attention(q, kv, indices, 1.0, case.v_dim, out=stale)
    assert_is_formula(got, q, kv, indices, 1.0, case.v_dim)
    assert not got[0][empty].any()
    assert torch.isneginf(got[1][empty]).all()
    nothing = torch.full((case.rows, width), 3, dtype=torch.int32)
    for cache, slots in ((kv[:0], nothing), (kv, nothing - 4)):
        out, lse = sparse_mla_attention(q, cache, slots, 1.0, case.v_dim)
        assert not out.any()
        assert torch.isneginf(lse).all()


@pytest.mark.once  # PyTorch's own autograd, on the attention that the demo model is trained with
@pytest.mark.parametrize("rows, empty", [(5, [0]), (7, [2, 3]), (1, [0]), (12, [11])])
def test_row_without_a_slot_has_no_gradient_and_spoils_no_other(
    rows: int, empty: list[int]
) -> None:
    # NVIDIA/Megatron-LM#7434 asks for a backward pass. The op has none and says so, whatever its
    # arguments require; what trains here attends to a selection that comes as a mask.
    layer = random_model(0).hidden_layers[0].self_attn
    x = torch.randn(1, rows, 32, generator=torch.Generator().manual_seed(rows), requires_grad=True)
    mask = torch.ones(1, rows, rows, dtype=torch.bool).tril()
    mask[:, empty], mask[:, :, empty] = False, False
    out = window._attend(layer, x, torch.arange(rows), True, False, mask, None).rows
    assert not out[0, empty].any()
    (out * torch.linspace(1, 2, 32)).sum().backward()
    assert torch.isfinite(x.grad).all()
    moved = x.grad[0].any(1)
    assert moved.tolist() == [t not in empty for t in range(rows)]

    q, kv = (x.clone().requires_grad_() for x in (Q, KV))
    result = sparse_mla_attention(q, kv, torch.tensor([[0, -1]]), 1.0, 2)
    assert not any(x.requires_grad for x in result)
    assert "no backward" in " ".join((inspect.getdoc(sparse_mla_attention) or "").split())


@pytest.mark.parametrize("page, length", [(4, 13), (1, 5), (16, 33), (64, 65)])
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e30])
def test_what_a_page_holds_behind_the_length_is_never_read(
    page: int, length: int, poison: float
) -> None:
    # flashinfer-ai/flashinfer#941: 0 · NaN leaked out of lanes that were masked after the load.
    pages = 1 + -(-length // page)  # the first of them is another request's
    g = torch.Generator().manual_seed(length)
    clean = torch.randn(pages * page, 8, generator=g)
    dirty = clean.clone()
    dirty[:page], dirty[page + length :] = poison, poison
    slots = torch.full((2, length + 9), -1, dtype=torch.int32)
    slots[:, :length] = page + torch.arange(length)
    slots[1, 1:length] = -1
    q = torch.randn(2, 3, 8, generator=g)
    got = [sparse_mla_attention(q, kv, slots, 0.3, 5) for kv in (clean, dirty)]
    assert all(map(torch.equal, *got))
    assert all(torch.isfinite(x).all() for x in got[1])

    table, lens = torch.arange(1, pages).int()[None], torch.tensor([length]).int()
    options = {"max_context_len": (pages - 1) * page, "page_size": page}
    scores = [
        li.paged_mqa_logits(
            q[:1, None], kv.view(pages, page, 8), torch.ones(1, 3), lens, table, **options
        )
        for kv in (clean, dirty)
    ]
    assert torch.equal(*scores)
    assert torch.isfinite(scores[1]).sum() == length


@pytest.mark.parametrize("rows", [3, 4] if INTERPRET else [64, 65])
@pytest.mark.parametrize("k, kept", [(8, 3), (8, 0), (33, 32), (5, 5)])
def test_stale_lanes_of_a_selection_never_reach_the_attention(rows: int, k: int, kept: int) -> None:
    # flashinfer-ai/flashinfer#5095: a length was given, and lanes behind it were attended to all
    # the same. The op takes no length: a selection writes all its lanes, −1 into those left over.
    g = torch.Generator().manual_seed(rows + k)
    q, kv = torch.randn(rows, 2, 8, generator=g), torch.randn(90, 8, generator=g)
    logits = torch.randn(rows, 40, generator=g)
    owners, table = (
        torch.zeros(rows, dtype=torch.int32),
        torch.randperm(90, generator=g).int()[None],
    )
    ends = torch.full((rows,), kept)
    stale = torch.arange(k, dtype=torch.int32).repeat(rows, 1)
    selected = li.topk_indices(logits, k, None, ends, out=stale)
    slots = li.indices_to_slots(selected, table, owners, 1, out=torch.full_like(stale, 7))
    out, lse = sparse_mla_attention(q, kv, slots, 0.4, 8)
    lanes = table[:, :kept].expand(rows, -1)
    assert_is_formula((out, lse), q, kv, lanes, 0.4, 8)
    alone = sparse_mla_attention(q[-1:], kv, slots[-1:], 0.4, 8)
    assert all(map(torch.equal, alone, (out[-1:], lse[-1:])))
    assert "topk_length" not in inspect.signature(sparse_mla_attention).parameters


@share(4)
@given(case=cases(), extra=st.integers(1, 40), seed=st.integers(0, 2**31), wide=st.booleans())
@counts_examples("sparse_mla_attention")
def test_slots_outside_the_cache_are_as_absent_as_minus_one(
    case: Case, extra: int, seed: int, wide: bool
) -> None:
    # deepseek-ai/FlashMLA#109: −1 and anything from the number of slots on are both "no token".
    q, kv, indices = case.tensors()
    if wide:
        indices = indices.long()
    beyond = {"past the end": case.slots, "far": STALE, "negative": -(2**31)}
    if wide:
        beyond |= {"2³²": 2**32, "2³² and a slot": 2**32 + int(indices[0, 0])}
    spelled = [among_absent(indices, extra, seed, at) for at in (-1, *beyond.values())]
    got = [sparse_mla_attention(q, kv, x, 1.0, case.v_dim) for x in spelled]
    assert_is_formula(got[0], q, kv, indices, 1.0, case.v_dim)
    for other in got[1:]:
        assert all(map(torch.equal, got[0], other))


@pytest.mark.parametrize("bad", [3, STALE, -2])
def test_check_mode_names_a_slot_outside_the_cache(
    bad: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # deepseek-ai/FlashMLA#109: [0, −1, 2147480000, 2] over three slots
    indices = torch.tensor([[0, -1, bad, 2]], dtype=torch.int32)
    got = sparse_mla_attention(Q, KV, indices, 1.0, 2)
    assert_is_formula(got, Q, KV, torch.tensor([[0, 2]]), 1.0, 2)
    monkeypatch.setenv("LIGHTNING_INDEXER_CHECK", "1")
    with pytest.raises(ValueError, match=rf"indices.*{bad}"):
        sparse_mla_attention(Q, KV, indices, 1.0, 2)
