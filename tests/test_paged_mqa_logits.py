import dataclasses

import pytest
import torch
from hypothesis import given

from counting import AGREEMENT, BATCHES, POISONED, counts_examples, tallies
from lightning_indexer.kernels.e4m3 import as_bytes
from lightning_indexer.kernels.mqa_logits import mqa_logits
from lightning_indexer.kernels.paged_mqa_logits import PAGED_MQA_LOGITS_OP, paged_mqa_logits
from lightning_indexer.testing import reference
from lightning_indexer.testing.calls import call_for_result
from lightning_indexer.testing.compare import assert_matches
from paged_scoring import PagedCase, gathered, paged_bound, paged_cases
from scoring import BF16, FP8, FP32, MOVABLE_REGIME, same_bits, share

INF = float("inf")
PLAIN = PagedCase(
    3, 2, 50, 4, 32, 16, ("nominal 4-D", FP8), "drafts", "normal", "contiguous", seed=4
)


def check(inputs: dict) -> torch.Tensor:
    got = paged_mqa_logits(**inputs)
    assert_matches(got, reference.paged_mqa_logits(**inputs), paged_bound(inputs))
    return got


def ragged_form(inputs: dict) -> dict:
    """The same rows, last first, as the ragged form says them."""
    q = inputs["q"]
    lengths, requests = reference.row_lengths(inputs["context_lens"], q.shape[1], None)
    order = torch.arange(len(lengths)).flip(0)
    flat = as_bytes(q.contiguous()).view(len(lengths), 1, *q.shape[2:])[order]
    return inputs | {
        "q": flat.view(q.dtype),
        "weights": inputs["weights"][order],
        "context_lens": torch.tensor(lengths)[order],
        "row_to_request": torch.tensor(requests)[order],
    }


@share(2)
@given(case=paged_cases)
@counts_examples("paged_mqa_logits")
@tallies(AGREEMENT, "paged_mqa_logits")
def test_scores_are_the_formula_within_fp32_rounding(case: PagedCase) -> None:
    check(case.inputs())


@share(6)
@given(case=paged_cases)
@counts_examples("paged_mqa_logits")
def test_bits_equal_ragged_scores_of_the_gathered_keys(case: PagedCase) -> None:
    case = dataclasses.replace(case, regime=MOVABLE_REGIME or case.regime)
    inputs = case.inputs(hostile=False)
    paged = paged_mqa_logits(**inputs)
    q, lengths, keys, scales = gathered(inputs)
    cache = inputs["cache"]
    for t, length in enumerate(lengths):
        alone = mqa_logits(
            q[t],
            keys[t].to(FP8 if cache.dtype == torch.uint8 else cache.dtype),
            inputs["weights"][t : t + 1],
            torch.tensor([0]),
            torch.tensor([length]),
            k_scale=scales[t].float() if cache.dtype == torch.uint8 else None,
        )
        assert same_bits(paged[t : t + 1], alone)


@share(6)
@given(case=paged_cases)
@counts_examples("paged_mqa_logits")
@tallies(BATCHES, "paged_mqa_logits")
def test_all_three_forms_give_the_same_bits(case: PagedCase) -> None:
    drafts = dataclasses.replace(case, form="drafts").inputs()
    first = paged_mqa_logits(**drafts)
    lengths, _ = reference.row_lengths(drafts["context_lens"], case.next_n, None)
    own = torch.tensor(lengths).view(case.requests, case.next_n)
    assert same_bits(paged_mqa_logits(**drafts | {"context_lens": own}), first)
    assert same_bits(paged_mqa_logits(**ragged_form(drafts)).flip(0), first)


@share(6)
@given(case=paged_cases)
@counts_examples("paged_mqa_logits")
@tallies(POISONED, "paged_mqa_logits")
def test_writes_every_element_of_a_strided_out_and_no_other_byte(case: PagedCase) -> None:
    inputs = case.inputs()
    out = (case.rows, case.width), FP32
    got = call_for_result(paged_mqa_logits, {}, inputs, out=out, layout="strided")
    assert same_bits(got, paged_mqa_logits(**inputs))


def test_returns_the_out_that_it_was_given() -> None:
    out = torch.empty(PLAIN.rows, PLAIN.width)
    assert paged_mqa_logits(**PLAIN.inputs(), out=out) is out


def test_long_contexts_span_tiles_and_pages() -> None:
    case = dataclasses.replace(PLAIN, requests=2, next_n=9, width=700, heads=33, page_size=64)
    inputs = case.inputs(hostile=False)
    inputs["context_lens"] = torch.tensor([700, 613], dtype=torch.int32)
    check(inputs)


def test_lengths_at_the_ends_of_int32_neither_wrap_nor_read_outside() -> None:
    inputs = PLAIN.inputs(hostile=False)
    inputs["context_lens"] = torch.tensor([-(2**31), 2**31 - 1, 0], dtype=torch.int32)
    got = check(inputs)
    assert (got[:2] == -INF).all() and (got[4:] == -INF).all()
    assert torch.isfinite(got[2:4]).all()


def test_nan_key_gives_nan_and_unused_pages_nothing() -> None:
    inputs = PLAIN.inputs(hostile=False)
    inputs["context_lens"][:] = 20
    table = inputs["block_table"]
    table[:] = torch.tensor([1, 2, 999, -7])[: table.shape[1]]
    inputs["cache"][0] = 0x7F
    inputs["cache"].view(inputs["cache"].shape[0], -1)[2, 32 * 2] = 0xFF  # position 18
    got = check(inputs)
    assert torch.isnan(got[1, 18]) and torch.isfinite(got[1, :18]).all()


@pytest.mark.parametrize(
    "changes", [{"requests": 0}, {"next_n": 0}, {"width": 0}], ids=["B=0", "N=0", "width 0"]
)
def test_empty_sizes_give_empty_scores(changes: dict) -> None:
    case = dataclasses.replace(PLAIN, **changes)
    inputs = dataclasses.replace(PLAIN, **(changes | {"next_n": 2})).inputs(hostile=False)
    inputs["q"], inputs["weights"] = inputs["q"][:, : case.next_n], inputs["weights"][: case.rows]
    assert paged_mqa_logits(**inputs).shape == (case.rows, case.width)


def test_cache_of_no_pages_scores_nothing() -> None:
    inputs = PLAIN.inputs()
    inputs["cache"] = inputs["cache"][:0]
    assert (paged_mqa_logits(**inputs) == -INF).all()


@pytest.mark.parametrize("form", ["drafts", "own lengths", "ragged"])
def test_opcheck(form: str) -> None:
    case = dataclasses.replace(PLAIN, form=form)
    i = case.inputs()
    args = (as_bytes(i["q"]), i["cache"], i["weights"], i["context_lens"], i["block_table"])
    out = torch.empty(case.rows, case.width)
    torch.library.opcheck(
        PAGED_MQA_LOGITS_OP, (*args, i.get("row_to_request"), case.page_size), {"out": out}
    )


@pytest.mark.parametrize("form", ["drafts", "own lengths", "ragged"])
def test_compiles_without_graph_breaks(form: str) -> None:
    compiled = torch.compile(paged_mqa_logits, fullgraph=True, backend="aot_eager")
    for requests, width in ((3, 50), (4, 61), (5, 64)):
        case = dataclasses.replace(PLAIN, form=form, requests=requests, width=width)
        inputs = case.inputs()
        assert same_bits(compiled(**inputs), paged_mqa_logits(**inputs))


INT = torch.int32


@pytest.mark.parametrize(
    "name, at, value, message",
    [
        ("context_lens", 1, 51, "context_lens must be at most max_context_len 50, got 51"),
        ("row_to_request", 1, 3, r"row_to_request must be in \[0, 3\), got 3"),
        ("block_table", (1, 1), -1, r"block_table must name pages in \[0, 13\), got -1"),
    ],
)
def test_check_mode_names_what_does_not_exist(
    monkeypatch: pytest.MonkeyPatch, name: str, at, value: int, message: str
) -> None:
    case = dataclasses.replace(PLAIN, next_n=1, form="ragged")
    inputs, out = case.inputs(hostile=False), torch.full((3, 50), 7.0)
    inputs["cache"] = inputs["cache"].repeat(4, 1, 1, 1)[:13]
    inputs["context_lens"][1], inputs["row_to_request"][1] = 20, 1
    inputs[name][at] = value
    monkeypatch.setenv("LIGHTNING_INDEXER_CHECK", "1")
    with pytest.raises(ValueError, match=message):
        paged_mqa_logits(**inputs, out=out)
    assert (out == 7.0).all()
    inputs["context_lens"][:] = 0  # padding may name anything
    assert (paged_mqa_logits(**inputs, out=out) == -INF).all()


def test_autograd_and_autocast_change_nothing() -> None:
    inputs = dataclasses.replace(PLAIN, call=("float32", FP32)).inputs()
    plain = paged_mqa_logits(**inputs)
    inputs["q"].requires_grad_()
    with torch.autocast("cpu", dtype=BF16):
        assert same_bits(paged_mqa_logits(**inputs), plain)
