"""A Triton kernel and the PyTorch path of its op give the same on the same call.

Each agrees with the oracle in the op's own tests; here they are compared with each other.
"""

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import lightning_indexer as li
from attention_cases import AttentionCase, attention_cases
from counting import AGREEMENT, counts_examples, tallies
from fault_cases import OPS
from fault_tools import written
from lightning_indexer.testing.attention_reference import attention_error_bounds
from lightning_indexer.testing.cases import CompactCase, SlotsCase
from lightning_indexer.testing.compare import assert_matches
from lightning_indexer.testing.layouts import bits_of
from lightning_indexer.testing.strategies import compact_cases, slots_cases
from paged_scoring import PagedCase, few_requests, paged_bound, paged_cases
from score_rows import RowsCase, in_small_pieces, row_cases
from scoring import ScoreCase, few_rows, score_bound, score_cases, share

pytestmark = pytest.mark.interpreter


@contextmanager
def pytorch_path() -> Iterator[None]:
    """Until it ends, no op launches its kernel."""
    with pytest.MonkeyPatch.context() as patch:
        patched = 0
        for name, module in list(sys.modules.items()):
            if name.startswith("lightning_indexer.kernels.") and hasattr(module, "use_triton"):
                patch.setattr(module, "use_triton", lambda _: False)
                patched += 1
        assert patched > 10
        yield


def on_both(call: Callable[..., object], inputs: dict) -> tuple:
    kernel = call(**inputs)
    with pytorch_path():
        return kernel, call(**inputs)


def kinds(op: str) -> Callable[[Callable], Callable]:
    """Counts an example of the op, and a comparison of its two implementations."""
    counted = tallies(AGREEMENT, f"{op}, kernel and PyTorch path")
    return lambda test: counts_examples(op)(counted(test))


@share(4)
@given(case=row_cases, small_pieces=st.booleans())
@kinds("topk_indices")
def test_selections_are_the_same(case: RowsCase, small_pieces: bool) -> None:
    with in_small_pieces(small_pieces, case.seed):
        assert torch.equal(*on_both(li.topk_indices, case.inputs()))


@share(4)
@given(case=score_cases)
@kinds("mqa_logits")
def test_scores_are_as_near_as_rounding_allows(case: ScoreCase) -> None:
    inputs = case.inputs()
    kernel, path = on_both(li.mqa_logits, inputs)
    bound = score_bound(*(inputs[name] for name in ("q", "k", "weights", "k_scale")))
    assert_matches(kernel, path.double(), 2 * bound)


@share(4)
@given(case=paged_cases)
@kinds("paged_mqa_logits")
def test_paged_scores_are_as_near_as_rounding_allows(case: PagedCase) -> None:
    inputs = case.inputs()
    kernel, path = on_both(li.paged_mqa_logits, inputs)
    assert_matches(kernel, path.double(), 2 * paged_bound(inputs))


def exact(case: ScoreCase | PagedCase, topk: int) -> dict:
    """A call whose sums are exact, so that both implementations score alike."""
    return case.inputs() | {"topk": topk}


@share(8)
@given(case=few_rows.filter(lambda case: case.regime == "ties"), topk=st.integers(1, 40))
@kinds("select_topk")
def test_selections_by_exact_scores_are_the_same(case: ScoreCase, topk: int) -> None:
    assert torch.equal(*on_both(li.select_topk, exact(case, topk)))


@share(8)
@given(case=few_requests.filter(lambda case: case.regime == "ties"), topk=st.integers(1, 40))
@kinds("paged_select_topk")
def test_paged_selections_by_exact_scores_are_the_same(case: PagedCase, topk: int) -> None:
    assert torch.equal(*on_both(li.paged_select_topk, exact(case, topk)))


@share(4)
@given(case=compact_cases())
@kinds("compact_topk_indices")
def test_compacted_buffers_are_the_same(case: CompactCase) -> None:
    inputs = {"rows": case.rows(), "num_rows": case.limit}
    kernel, path = case.buffers(), case.buffers()
    li.compact_topk_indices(kernel, **inputs)
    with pytorch_path():
        li.compact_topk_indices(path, **inputs)
    assert all(torch.equal(a, b) for a, b in zip(kernel, path, strict=True))


@share(4)
@given(case=slots_cases())
@kinds("indices_to_slots")
def test_slots_are_the_same(case: SlotsCase) -> None:
    indices, table, requests = case.tensors()
    inputs = {"indices": indices, "block_table": table, "row_to_request": requests}
    assert torch.equal(*on_both(li.indices_to_slots, inputs | {"page_size": case.page_size}))


@share(4)
@given(case=attention_cases(fp8=False) | attention_cases(fp8=True))
@kinds("sparse_mla_attention")
def test_attention_is_as_near_as_rounding_allows(case: AttentionCase) -> None:
    inputs = case.inputs()
    results = on_both(li.sparse_mla_attention, inputs)
    bounds = attention_error_bounds(**inputs, operand=2.0**-24)
    for kernel, path, bound in zip(*results, bounds, strict=True):
        assert_matches(kernel, path.double(), 2 * bound)


@pytest.mark.parametrize("name", OPS)
def test_every_op_writes_the_same_bytes_where_sums_are_exact(name: str) -> None:
    op = OPS[name]
    kernel, path = op.valid(), copy.deepcopy(op.valid())
    kinds(name.partition(",")[0])(_same_bytes)(op, kernel, path)


def _same_bytes(op, kernel: dict, path: dict) -> None:
    op.call(**kernel)
    with pytorch_path():
        op.call(**path)
    for a, b in zip(written(op, kernel), written(op, path), strict=True):
        if op.bound:
            assert_matches(a, b.double(), 2 * op.bound)
        else:
            assert torch.equal(bits_of(a), bits_of(b))
