"""Cases stay within their contract, are told wholly by their fields, and scores are judged."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_indexer.testing import (
    CompactContract,
    MqaLogitsContract,
    PagedMqaLogitsContract,
    SlotsContract,
    SparseAttentionContract,
    TopkContract,
    attention_cases,
    cases,
    paged_cases,
    strategies,
)
from lightning_indexer.testing.bounds import score_bound
from lightning_indexer.testing.conformance import properties, run_property
from lightning_indexer.testing.conformance.compact import judge_compaction
from lightning_indexer.testing.conformance.scores import Agreement, judge_scores
from lightning_indexer.testing.layouts import bits_of

pytestmark = pytest.mark.once

NAN, INF = float("nan"), float("inf")
FP16, INT32 = torch.float16, torch.int32
NARROW = {"layouts": ("contiguous",), "empty_sizes": False}
TOPK = TopkContract(max_length=70, max_k=5, dtypes=(FP16,), windows=("ends",), **NARROW)
MQA = MqaLogitsContract(
    dtypes=("bf16",),
    scaled=(False,),
    windows=("full",),
    heads=(2,),
    head_dims=(8,),
    special_values=False,
    max_rows=3,
    max_length=9,
    **NARROW,
)
PAGED = PagedMqaLogitsContract(
    calls=(("float16", FP16),),
    forms=("drafts",),
    page_sizes=(16,),
    heads=(2,),
    head_dims=(8,),
    max_next_n=2,
    max_rows=4,
    max_length=9,
    special_values=False,
    **NARROW,
)
COMPACT = CompactContract(
    several=False,
    num_rows=False,
    orders=("random",),
    rows_dtypes=(INT32,),
    max_height=5,
    max_width=7,
    **NARROW,
)
SLOTS = SlotsContract(garbage=False, page_sizes=(64,), request_dtypes=(INT32,), **NARROW)
ATTENTION = SparseAttentionContract(
    dims=((16, 8),),
    dtypes=(FP16,),
    heads=(2,),
    empty_rows=False,
    garbage=False,
    repeats=False,
    max_rows=2,
    max_width=9,
    max_slots=20,
    **NARROW,
)

WHOLE = st.one_of(
    strategies.topk_cases(),
    strategies.mqa_logits_cases(),
    strategies.paged_mqa_logits_cases(),
    strategies.compact_cases(),
    strategies.slots_cases(),
    strategies.sparse_attention_cases(),
)


def tensors_of(case: object) -> list[torch.Tensor]:
    if isinstance(case, cases.CompactCase):
        return [*case.buffers(), case.rows()]
    if isinstance(case, cases.SlotsCase):
        return list(case.tensors())
    return [x for x in case.inputs().values() if isinstance(x, torch.Tensor)]


@settings(max_examples=60)
@given(case=WHOLE)
def test_a_case_is_what_its_repr_says_and_gives_the_same_tensors_again(case: object) -> None:
    names = {"torch": torch}
    for module in (cases, paged_cases, attention_cases):
        names |= vars(module)
    again = eval(repr(case), names)
    assert again == case and hash(again) == hash(case)
    for a, b in zip(tensors_of(case), tensors_of(again), strict=True):
        assert a.stride() == b.stride() and torch.equal(bits_of(a), bits_of(b))


@given(case=strategies.topk_cases(TOPK))
def test_topk_cases_stay_within_their_contract(case: cases.TopkCase) -> None:
    assert 1 <= case.length <= 70 and 1 <= case.k <= 5 and case.rows >= 1
    assert (case.dtype, case.windows, case.layout) == (FP16, "ends", "contiguous")


WHOLE_ROWS = {"padding": None, "windows": ("none",)}
TORCH_ORDER = {"nan": "greatest", "neg_inf": "least"}


@given(case=strategies.topk_cases(TopkContract(**WHOLE_ROWS, **TORCH_ORDER)))
def test_rows_hold_k_candidates_where_padding_is_not_promised(case: cases.TopkCase) -> None:
    assert case.length >= case.k and case.windows == "none"


@pytest.mark.parametrize(
    "promises, left_out",
    [
        ({"nan": "absent"}, {"nan", "special", "nothing"}),
        ({"neg_inf": "absent"}, {"infinite", "special", "nothing"}),
        ({"pos_inf": False}, {"infinite", "special"}),
        (WHOLE_ROWS, {"nan", "infinite", "special", "nothing"}),
        (WHOLE_ROWS | TORCH_ORDER, set()),
    ],
)
def test_scores_of_no_promise_are_not_drawn(promises: dict, left_out: set[str]) -> None:
    everything = set(strategies.topk_regimes(TopkContract()))
    assert everything - set(strategies.topk_regimes(TopkContract(**promises))) == left_out


@given(case=strategies.mqa_logits_cases(MQA))
def test_scoring_cases_stay_within_their_contract(case: cases.MqaLogitsCase) -> None:
    assert 1 <= case.rows <= 3 and 1 <= case.length <= 9
    assert (case.heads, case.head_dim, case.dtypes) == (2, 8, "bf16")
    assert (case.scaled, case.windows, case.layout) == (False, "full", "contiguous")
    assert case.regime not in ("nan", "infinite")


@given(case=strategies.paged_mqa_logits_cases(PAGED))
def test_paged_cases_stay_within_their_contract(case: paged_cases.PagedMqaLogitsCase) -> None:
    assert 1 <= case.rows <= 4 and 1 <= case.next_n <= 2 and 1 <= case.width <= 9
    assert (case.heads, case.head_dim, case.page_size) == (2, 8, 16)
    assert (case.call, case.form) == (("float16", FP16), "drafts")
    inputs = case.inputs(hostile=False)
    pages = inputs["cache"].shape[0]
    assert ((inputs["block_table"] >= 0) & (inputs["block_table"] < pages)).all()
    assert ((inputs["context_lens"] >= 0) & (inputs["context_lens"] <= case.width)).all()


@given(case=strategies.compact_cases(COMPACT))
def test_compaction_cases_stay_within_their_contract(case: cases.CompactCase) -> None:
    assert 1 <= case.height <= 5 and len(case.widths) == 1 and 1 <= case.widths[0] <= 7
    assert case.num_rows is None
    assert ((case.rows() >= 0) & (case.rows() < case.height)).all()


@given(case=strategies.slots_cases(SLOTS))
def test_slots_cases_stay_within_their_contract(case: cases.SlotsCase) -> None:
    indices, table, requests = case.tensors()
    assert ((indices >= -1) & (indices < table.shape[1] * 64)).all() and (table >= 0).all()
    assert ((requests >= 0) & (requests < len(table))).all()


@given(case=strategies.sparse_attention_cases(ATTENTION))
def test_attention_cases_stay_within_their_contract(
    case: attention_cases.SparseAttentionCase,
) -> None:
    indices = case.inputs()["indices"]
    assert 1 <= case.rows <= 2 and 1 <= case.width <= 9 and 1 <= case.slots <= 20
    used = min(case.width, case.slots)
    assert ((indices[:, :used] >= 0) & (indices[:, :used] < case.slots)).all()
    assert all(len(set(row[:used])) == used for row in indices.tolist())


def test_rows_as_long_as_promised_are_tried() -> None:
    lengths = []

    def note(logits: torch.Tensor, k: int, *_: object) -> torch.Tensor:
        lengths.append(logits.shape[1])
        return torch.zeros(len(logits), k, dtype=INT32)

    name = "selects the best of long rows"
    found = {p.name: p for p in properties("topk", note, TopkContract(max_length=5000))}
    assert run_property(found[name], 1).failure is not None
    assert min(lengths) > 2500
    assert name not in {p.name for p in properties("topk", note)}


SEEN = torch.tensor([[True, True, False]])
WANTED = torch.tensor([[1.0, NAN, -INF]], dtype=torch.float64)


@pytest.mark.parametrize(
    "got, reason",
    [
        ([1.25, NAN, -INF], r"1 of 3 elements off; first at \(0, 0\): got 1.25"),
        ([1.0, 2.0, -INF], r"NaN differs first at \(0, 1\)"),
        ([1.0, NAN, 0.0], "row 0 has score 0.0 at position 2, which it does not see"),
        ([1.0, NAN, NAN], "row 0 has score nan at position 2, which it does not see"),
        ([1.0, NAN], r"shape \[1, 2\], expected \[1, 3\]"),
    ],
)
def test_wrong_scores_are_told_apart(got: list[float], reason: str) -> None:
    ours = MqaLogitsContract()
    bound = torch.full((1, 3), 0.125)
    judge_scores(torch.tensor([[1.125, NAN, -INF]]), WANTED, bound, SEEN, ours)
    with pytest.raises(AssertionError, match=reason):
        judge_scores(torch.tensor([got]), WANTED, bound, SEEN, ours)
    dirty = MqaLogitsContract(outside="anything")
    judge_scores(torch.tensor([[1.0, NAN, 7.0]]), WANTED, bound, SEEN, dirty)


def test_agreement_is_to_the_bit_or_within_twice_the_bound() -> None:
    bound = torch.full((3,), 0.5)
    exact = Agreement(MqaLogitsContract(), bound)
    near = Agreement(MqaLogitsContract(batch_invariant=False), bound)
    a = torch.tensor([1.0, NAN, -INF])
    for agree in (exact, near):
        agree(a, a.clone(), "same")
    apart = torch.tensor([2.0, NAN, -INF])
    near(a, apart, "twice the bound apart")
    with pytest.raises(AssertionError, match="one ulp"):
        exact(a, torch.nextafter(a, torch.tensor(INF)), "one ulp")
    for wrong in ([2.01, NAN, -INF], [1.0, 0.0, -INF], [1.0, NAN, 0.0]):
        with pytest.raises(AssertionError, match="differ"):
            near(a, torch.tensor(wrong), "too far")


def test_bound_needs_a_rounding_that_it_can_speak_of() -> None:
    x = torch.ones(1, 64, 128)
    with pytest.raises(ValueError, match=r"^rounding must be below"):
        score_bound(x, x[0], x[:, :, 0], None, rounding=2.0**-8)


@pytest.mark.parametrize(
    "row, value, reason",
    [
        (0, 9, "buffer: row 0 is not what row 2 held"),
        (1, 9, "buffer: row 1 is of the unknown row 7 and is not −1"),
        (3, 9, "buffer: row 3 has changed, only the first 2 may"),
    ],
)
def test_wrong_compactions_are_told_apart(row: int, value: int, reason: str) -> None:
    old = torch.arange(4, dtype=INT32)[:, None].repeat(1, 3)
    got = old.clone()
    got[0], got[1] = 2, -1
    judge_compaction(old, got, torch.tensor([2, 7]), 4, "buffer")
    got[row] = value
    with pytest.raises(AssertionError, match=reason):
        judge_compaction(old, got, torch.tensor([2, 7]), 4, "buffer")
