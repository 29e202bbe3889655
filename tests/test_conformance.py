"""Our own ops keep the promises that the kit's default contracts make for them."""

import pytest

from counting import EXAMPLES
from lightning_indexer.kernels.backend import INTERPRET
from lightning_indexer.kernels.compact import compact_topk_indices
from lightning_indexer.kernels.mqa_logits import mqa_logits
from lightning_indexer.kernels.paged_mqa_logits import paged_mqa_logits
from lightning_indexer.kernels.slots import indices_to_slots
from lightning_indexer.kernels.sparse_mla_attention import sparse_mla_attention
from lightning_indexer.kernels.topk import topk_indices
from lightning_indexer.testing.conformance import SUITES, properties, run_property
from lightning_indexer.testing.contracts import MqaLogitsContract, PagedMqaLogitsContract
from lightning_indexer.testing.runner import Property

#: numpy's BLAS, which multiplies for the interpreter, rounds by the place in the matrix.
BITS = {"batch_invariant": not INTERPRET}
OURS = {
    "topk": (topk_indices, None),
    "mqa_logits": (mqa_logits, MqaLogitsContract(**BITS)),
    "paged_mqa_logits": (paged_mqa_logits, PagedMqaLogitsContract(**BITS)),
    "compact": (compact_topk_indices, None),
    "slots": (indices_to_slots, None),
    "sparse_attention": (sparse_mla_attention, None),
}
PROPERTIES = [
    (op, prop) for op, (fn, contract) in OURS.items() for prop in properties(op, fn, contract)
]


def test_every_suite_has_an_op_of_ours() -> None:
    assert OURS.keys() == SUITES.keys()


@pytest.mark.parametrize("op, prop", PROPERTIES, ids=[f"{op}-{p.name}" for op, p in PROPERTIES])
def test_op_keeps_its_promise(op: str, prop: Property) -> None:
    outcome = run_property(prop, 3 if INTERPRET else 12)
    assert outcome.failure is None, str(outcome.failure)
    EXAMPLES[f"conformance of {op}", "drawn by the kit"] += outcome.cases


def test_ops_that_write_out_keep_theirs_too() -> None:
    for op, fn in (("topk", topk_indices), ("slots", indices_to_slots), ("mqa_logits", mqa_logits)):
        contract = SUITES[op][0](takes_out=True)
        outcome = run_property(properties(op, fn, contract)[0], 4)
        assert outcome.failure is None, str(outcome.failure)
