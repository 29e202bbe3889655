import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings

from attention_cases import (
    DTYPES,
    AttentionCase,
    assert_is_attention,
    attention_cases,
)
from counting import AGREEMENT, BATCHES, counts_examples, tallies
from lightning_indexer.kernels.sparse_mla_attention import sparse_mla_attention
from scoring import Canary, share

OP = "sparse_mla_attention"
EXAMPLE = AttentionCase(
    3, 40, 150, 5, (40, 32), "bf16", False, "normal", "holes", torch.int32, "contiguous", seed=3
)
FP8_EXAMPLE = dataclasses.replace(EXAMPLE, fp8=True, slots=12, width=20)


@share(2)
@given(case=attention_cases(fp8=False))
@counts_examples(OP)
@tallies(AGREEMENT, OP)
def test_is_softmax_over_the_listed_slots(case: AttentionCase) -> None:
    inputs = case.inputs()
    assert_is_attention(sparse_mla_attention(**inputs), inputs)


@share(4)
@given(case=attention_cases(fp8=True))
@counts_examples(OP)
@tallies(AGREEMENT, OP)
def test_656_byte_rows_are_their_dequantised_values(case: AttentionCase) -> None:
    inputs = case.inputs()
    assert_is_attention(sparse_mla_attention(**inputs), inputs)


@share(4)
@given(case=attention_cases(fp8=False))
@counts_examples(OP)
@tallies(BATCHES, "sparse_mla_attention")
def test_bits_of_a_row_do_not_depend_on_its_batch(case: AttentionCase) -> None:
    inputs = case.inputs()
    out, lse = sparse_mla_attention(**inputs)
    for t in range(case.rows):
        alone = inputs | {"q": inputs["q"][t : t + 1], "indices": inputs["indices"][t : t + 1]}
        assert_same_bits(sparse_mla_attention(**alone), (out[t : t + 1], lse[t : t + 1]))


def assert_same_bits(
    a: tuple[torch.Tensor, torch.Tensor], b: tuple[torch.Tensor, torch.Tensor]
) -> None:
    for got, want in zip(a, b, strict=True):
        kind = torch.int32 if got.dtype == torch.float32 else torch.int16
        assert torch.equal(got.contiguous().view(kind), want.contiguous().view(kind))


@pytest.mark.parametrize("example", [EXAMPLE, FP8_EXAMPLE], ids=["floats", "fp8"])
def test_bits_do_not_depend_on_the_order_or_number_of_rows(example: AttentionCase) -> None:
    inputs = dataclasses.replace(example, rows=9).inputs()
    out, lse = sparse_mla_attention(**inputs)
    order = torch.tensor([8, 0, 3, 3, 7, 1, 2, 6, 5, 4, 0])
    moved = inputs | {"q": inputs["q"][order], "indices": inputs["indices"][order]}
    assert_same_bits(sparse_mla_attention(**moved), (out[order], lse[order]))


@settings(max_examples=10)
@given(case=attention_cases(fp8=False))
@counts_examples(OP)
def test_parts_of_a_row_merge_by_their_lse(case: AttentionCase) -> None:
    inputs = dataclasses.replace(case, dtype="fp32", width=max(case.width, 2)).inputs()
    cut = inputs["indices"].shape[1] // 2
    parts = [
        sparse_mla_attention(**inputs | {"indices": part})
        for part in (inputs["indices"][:, :cut], inputs["indices"][:, cut:])
    ]
    lse = torch.stack([p[1].double() for p in parts])
    share_of = torch.softmax(lse, 0).nan_to_num(0.0)  # a row without slots: −inf twice
    out = sum(w[..., None] * p[0].double() for w, p in zip(share_of, parts, strict=True))
    assert_is_attention((out, lse.logsumexp(0)), inputs)


@pytest.mark.parametrize("example", [EXAMPLE, FP8_EXAMPLE], ids=["floats", "fp8"])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_arguments_are_left_as_they_are(index_dtype: torch.dtype, example: AttentionCase) -> None:
    case = dataclasses.replace(example, index_dtype=index_dtype, indices="outside")
    inputs, before = case.inputs(), case.inputs()
    sparse_mla_attention(**inputs)
    assert torch.equal(inputs["indices"], before["indices"])
    for name in ("q", "kv"):
        assert torch.equal(inputs[name].view(torch.uint8), before[name].view(torch.uint8))


def test_only_the_results_are_written() -> None:
    inputs = dataclasses.replace(EXAMPLE, dtype="fp32").inputs()
    rows, heads, v_dim = 3, 5, inputs["v_dim"]
    around = torch.full((rows + 2, heads + 2, 2 * v_dim + 2), Canary.POISON)
    out, lse = around[1:-1, 1:-1, 1:-1:2], Canary.of(rows, heads)
    got = sparse_mla_attention(**inputs, out=out, lse=lse.out)
    assert got[0] is out and got[1] is lse.out
    assert_is_attention(got, inputs)
    lse.assert_nothing_else_written()
    out.fill_(Canary.POISON)
    assert (around == Canary.POISON).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [1, 16, 31, 64, 65, 128])
def test_any_number_of_heads_up_to_128(heads: int, dtype: str) -> None:
    inputs = dataclasses.replace(EXAMPLE, rows=1, heads=heads, dtype=dtype).inputs()
    assert_is_attention(sparse_mla_attention(**inputs), inputs)


@pytest.mark.parametrize("dims", [(576, 512), (576, 500), (576, 7), (512, 512), (1, 1)])
def test_any_width_up_to_576_with_up_to_512_values(dims: tuple[int, int]) -> None:
    inputs = dataclasses.replace(EXAMPLE, rows=1, width=70, dims=dims).inputs()
    assert_is_attention(sparse_mla_attention(**inputs), inputs)


@pytest.mark.parametrize("example", [EXAMPLE, FP8_EXAMPLE], ids=["floats", "fp8"])
@pytest.mark.parametrize("rows, width, slots", [(0, 7, 5), (3, 0, 5), (3, 7, 0)])
def test_without_rows_indices_or_slots_every_result_is_empty(
    rows: int, width: int, slots: int, example: AttentionCase
) -> None:
    inputs = dataclasses.replace(example, rows=3, width=7, slots=5).inputs()
    inputs |= {
        "q": inputs["q"][:rows],
        "kv": inputs["kv"][:slots],
        "indices": inputs["indices"][:rows, :width],
    }
    out, lse = sparse_mla_attention(**inputs)
    assert out.shape == (rows, 5, inputs["v_dim"]) and lse.shape == (rows, 5)
    assert (out == 0).all() and (lse == -math.inf).all()


def test_a_slot_listed_twice_counts_twice() -> None:
    q, kv = torch.zeros(1, 1, 4), torch.eye(4)
    out, lse = sparse_mla_attention(q, kv, torch.tensor([[2, -1, 0, 2, 9, 2]]), 1.0, 4)
    assert torch.allclose(out[0, 0], torch.tensor([0.25, 0.0, 0.75, 0.0]))
    assert torch.allclose(lse, torch.tensor(4.0).log())


def test_nan_in_a_selected_row_reaches_the_rows_that_select_it_alone() -> None:
    inputs = dataclasses.replace(EXAMPLE, indices="full").inputs()
    inputs["indices"] = torch.arange(60).view(3, 20) % 40  # rows 0 and 2 share slots 0 to 19
    inputs["kv"] = torch.randn(40, 40).bfloat16()
    inputs["kv"][7, 39] = math.nan  # a column that is no value
    out, lse = sparse_mla_attention(**inputs)
    assert out[[0, 2]].isnan().all() and lse[[0, 2]].isnan().all()
    assert out[1].isfinite().all() and lse[1].isfinite().all()


def test_scores_far_from_zero_neither_overflow_nor_vanish() -> None:
    kv = torch.tensor([[1.0], [1.0], [-1.0]])
    for query in (1e4, -1e4, 3e37):
        out, lse = sparse_mla_attention(
            torch.full((1, 1, 1), query), kv, torch.tensor([[0, 1, 2]]), 1.0, 1
        )
        assert out.item() == math.copysign(1.0, query)
        assert lse.item() == pytest.approx(abs(query), rel=1e-4)


@pytest.mark.parametrize("example", [EXAMPLE, FP8_EXAMPLE], ids=["floats", "fp8"])
def test_op_passes_opcheck(example: AttentionCase) -> None:
    inputs = dataclasses.replace(example, rows=1).inputs()
    v_dim = inputs.pop("v_dim")
    rows, heads, _ = inputs["q"].shape
    out = [torch.zeros(rows, heads, v_dim, dtype=inputs["q"].dtype), torch.zeros(rows, heads)]
    op = torch.ops.lightning_indexer.sparse_mla_attention.default
    torch.library.opcheck(op, tuple(inputs.values()), {"out": out})


@pytest.mark.parametrize("example", [EXAMPLE, FP8_EXAMPLE], ids=["floats", "fp8"])
def test_compiles_without_graph_breaks(example: AttentionCase) -> None:
    inputs = dataclasses.replace(example, rows=1).inputs()
    compiled = torch.compile(sparse_mla_attention, fullgraph=True, backend="aot_eager")
    assert_same_bits(compiled(**inputs), sparse_mla_attention(**inputs))


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [False, True], ids=["floats", "fp8"])
@pytest.mark.parametrize("heads", [1, 16, 32, 64, 128])
@pytest.mark.parametrize("dtype", DTYPES)
def test_on_a_gpu_it_is_the_formula_and_bits_hold(dtype: str, heads: int, fp8: bool) -> None:
    if fp8 and dtype == "fp32":
        return
    case = dataclasses.replace(EXAMPLE, heads=heads, dtype=dtype, fp8=fp8, dims=(576, 512))
    inputs = dataclasses.replace(case, slots=12, width=600).inputs()
    tensors = {n: x.cuda() if isinstance(x, torch.Tensor) else x for n, x in inputs.items()}
    result = sparse_mla_attention(**tensors)
    operand = torch.finfo(DTYPES[dtype]).eps / 2
    assert_is_attention(result, inputs, operand)
    for t in range(3):
        alone = {n: tensors[n][t : t + 1] for n in ("q", "indices")}
        assert_same_bits(
            sparse_mla_attention(**tensors | alone), tuple(x[t : t + 1] for x in result)
        )
