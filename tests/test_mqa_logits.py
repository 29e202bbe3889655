import dataclasses

import pytest
import torch
from hypothesis import given

from counting import AGREEMENT, BATCHES, POISONED, counts_examples, tallies
from lightning_indexer.kernels.e4m3 import as_bytes
from lightning_indexer.kernels.mqa_logits import MQA_LOGITS_OP, mqa_logits
from lightning_indexer.testing import reference
from lightning_indexer.testing.calls import call_for_result
from lightning_indexer.testing.compare import assert_matches
from scoring import (
    BF16,
    FP8,
    FP16,
    FP32,
    MOVABLE_REGIME,
    ScoreCase,
    same_bits,
    score_bound,
    score_cases,
    share,
    strided,
)

NAN, INF = float("nan"), float("inf")
PLAIN = ScoreCase(5, 40, 4, 32, "fp32", True, "normal", "causal", "contiguous", seed=1)


def windows_mask(inputs: dict) -> torch.Tensor:
    positions = torch.arange(inputs["k"].shape[0])
    return (positions >= inputs["row_starts"][:, None]) & (positions < inputs["row_ends"][:, None])


def check(inputs: dict) -> torch.Tensor:
    got = mqa_logits(**inputs)
    bound = score_bound(inputs["q"], inputs["k"], inputs["weights"], inputs["k_scale"])
    assert_matches(got, reference.mqa_logits(**inputs), bound)
    return got


@share(2)
@given(case=score_cases)
@counts_examples("mqa_logits")
@tallies(AGREEMENT, "mqa_logits")
def test_scores_are_the_formula_within_fp32_rounding(case: ScoreCase) -> None:
    check(case.inputs())


@share(8)
@given(case=score_cases)
@counts_examples("mqa_logits")
@tallies(BATCHES, "mqa_logits")
def test_bits_depend_on_query_and_key_alone(case: ScoreCase) -> None:
    regime = MOVABLE_REGIME or case.regime
    inputs = dataclasses.replace(case, windows="full", regime=regime).inputs()
    together = mqa_logits(**inputs)
    g = case.generator()
    rows = torch.randperm(case.rows, generator=g)[: max(1, case.rows // 2)]
    keys = torch.randperm(case.length, generator=g)[: max(1, case.length // 2)]
    k_scale = inputs["k_scale"]
    bounds = torch.zeros(len(rows), dtype=torch.int32)
    moved = mqa_logits(
        as_bytes(inputs["q"])[rows].view(inputs["q"].dtype),
        as_bytes(inputs["k"])[keys].view(inputs["k"].dtype),
        inputs["weights"][rows],
        bounds,
        bounds + len(keys),
        k_scale=None if k_scale is None else k_scale[keys],
    )
    assert same_bits(moved, together[rows][:, keys])


@share(8)
@given(case=score_cases)
@counts_examples("mqa_logits")
def test_what_no_window_holds_changes_nothing(case: ScoreCase) -> None:
    inputs = dataclasses.replace(case, scaled=True, windows="any").inputs()
    before = mqa_logits(**inputs)
    unseen = ~windows_mask(inputs).any(0)
    as_bytes(inputs["k"])[unseen] = 0x7F if inputs["k"].dtype == FP8 else NAN
    inputs["k_scale"][unseen] = NAN
    assert same_bits(mqa_logits(**inputs), before)


@share(8)
@given(case=score_cases)
@counts_examples("mqa_logits")
def test_nan_and_infinity_reach_the_scores_of_their_keys_alone(case: ScoreCase) -> None:
    inputs = case.inputs()
    g = case.generator()
    special = torch.randint(0, case.length, (1 + case.length // 4,), generator=g)
    at = torch.randint(0, case.head_dim, special.shape, generator=g)
    if inputs["k"].dtype == FP8:
        as_bytes(inputs["k"])[special, at] = 0xFF
    else:
        inputs["k"][special, at] = torch.tensor([NAN, INF, -INF])[at % 3].to(inputs["k"].dtype)
    check(inputs)


@share(8)
@given(case=score_cases)
@counts_examples("mqa_logits")
@tallies(POISONED, "mqa_logits")
def test_writes_every_element_of_a_strided_out_and_nothing_else(case: ScoreCase) -> None:
    inputs = case.inputs()
    out = (case.rows, case.length), FP32
    got = call_for_result(mqa_logits, {}, inputs, out=out, layout="strided")
    assert same_bits(got, mqa_logits(**inputs))


def test_returns_the_out_that_it_was_given() -> None:
    out = torch.empty(PLAIN.rows, PLAIN.length)
    assert mqa_logits(**PLAIN.inputs(), out=out) is out


@pytest.mark.parametrize("dtypes", ["fp32", "bf16 queries, fp8 keys"])
def test_many_tiles_of_rows_and_keys(dtypes: str) -> None:
    case = ScoreCase(19, 1100, 33, 40, dtypes, True, "normal", "causal", "contiguous", seed=3)
    inputs = case.inputs()
    got = check(inputs)
    last = {n: x[-1:] if n in ("q", "weights") else x for n, x in inputs.items()}
    last |= {"row_starts": torch.tensor([777], dtype=torch.int32), "row_ends": torch.tensor([1099])}
    assert same_bits(mqa_logits(**last)[:, 777:1099], got[-1:, 777:1099])


@pytest.mark.parametrize("heads, head_dim", [(64, 128), (1, 32), (2, 64), (5, 33)])
def test_bits_do_not_depend_on_threads(heads: int, head_dim: int) -> None:
    case = ScoreCase(3, 600, heads, head_dim, "fp32", False, "normal", "full", "contiguous", 5)
    inputs = case.inputs()
    one = mqa_logits(**inputs)
    try:
        torch.set_num_threads(2)
        two = mqa_logits(**inputs)
    finally:
        torch.set_num_threads(1)
    assert same_bits(one, two)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP8])
def test_subnormal_keys_count(dtype: torch.dtype) -> None:
    smallest = {BF16: 2.0**-133, FP16: 2.0**-24, FP8: 2.0**-9}[dtype]
    inputs = PLAIN.inputs()
    inputs["q"] = inputs["q"] * 2.0**40
    inputs["k"] = (torch.sign(inputs["k"]) * smallest).to(dtype)
    assert (check(inputs)[:, 0] != 0).any()


def test_autocast_autograd_and_default_dtype_change_nothing() -> None:
    inputs = PLAIN.inputs()
    plain = mqa_logits(**inputs)
    inputs["q"].requires_grad_()
    inputs["weights"].requires_grad_()
    try:
        torch.set_default_dtype(torch.float64)
        with torch.autocast("cpu", dtype=BF16):
            assert same_bits(mqa_logits(**inputs), plain)
    finally:
        torch.set_default_dtype(FP32)
    with torch.inference_mode():
        assert same_bits(mqa_logits(**inputs), plain)


@pytest.mark.parametrize("rows, length", [(0, 7), (3, 0), (0, 0)])
def test_empty_sizes_give_empty_scores(rows: int, length: int) -> None:
    inputs = dataclasses.replace(PLAIN, rows=rows, length=length, windows="full").inputs()
    assert mqa_logits(**inputs).shape == (rows, length)


def test_extreme_windows_are_cut() -> None:
    inputs = PLAIN.inputs()
    low, high = -(2**31), 2**31 - 1
    inputs["row_starts"] = torch.tensor([low, low, high, 0, 39], dtype=torch.int32)
    inputs["row_ends"] = torch.tensor([high, low, low, -1, high], dtype=torch.int32)
    check(inputs)


@pytest.mark.parametrize("dtypes", ["fp32", "fp8", "bf16 queries, fp8 keys"])
def test_opcheck(dtypes: str) -> None:
    inputs = dataclasses.replace(PLAIN, dtypes=dtypes).inputs()
    args = [as_bytes(inputs[n]) for n in ("q", "k", "weights", "row_starts", "row_ends")]
    out = torch.empty(PLAIN.rows, PLAIN.length)
    torch.library.opcheck(MQA_LOGITS_OP, (*args, inputs["k_scale"]), {"out": out})


@pytest.mark.parametrize("dtypes", ["fp32", "fp8"])
def test_compiles_without_graph_breaks(dtypes: str) -> None:
    compiled = torch.compile(mqa_logits, fullgraph=True, backend="aot_eager")
    for length in (40, 41, 57):
        inputs = dataclasses.replace(PLAIN, dtypes=dtypes, length=length).inputs()
        assert same_bits(compiled(**inputs), mqa_logits(**inputs))
        out = torch.empty(PLAIN.rows, length)
        compiled(**inputs, out=out)
        assert same_bits(out, mqa_logits(**inputs))


@pytest.mark.parametrize(
    "name, row, value, message",
    [
        ("row_starts", 2, -1, r"row_starts must stay in \[0, 40\].*got -1 \(1 such rows\)"),
        ("row_ends", 0, 41, r"row_ends must stay in \[0, 40\].*got 41"),
    ],
)
def test_check_mode_names_a_window_that_leaves_the_keys(
    monkeypatch: pytest.MonkeyPatch, name: str, row: int, value: int, message: str
) -> None:
    inputs, out = PLAIN.inputs(), torch.full((5, 40), 7.0)
    inputs[name][row] = value
    monkeypatch.setenv("LIGHTNING_INDEXER_CHECK", "1")
    with pytest.raises(ValueError, match=message):
        mqa_logits(**inputs, out=out)
    assert (out == 7.0).all()
    inputs["row_ends"][row] = -5  # an empty window may say anything
    mqa_logits(**inputs, out=out)
    assert (out[row] == -INF).all()


def test_strided_inputs_give_the_bits_of_contiguous_ones() -> None:
    inputs = dataclasses.replace(PLAIN, dtypes="fp8").inputs()
    assert same_bits(mqa_logits(**{n: strided(x) for n, x in inputs.items()}), mqa_logits(**inputs))
