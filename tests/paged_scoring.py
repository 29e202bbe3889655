"""Paged calls for the scoring tests: the kit's cases within our contract."""

from lightning_indexer.testing.bounds import gathered
from lightning_indexer.testing.bounds import paged_score_bound as paged_bound
from lightning_indexer.testing.contracts import PagedMqaLogitsContract
from lightning_indexer.testing.paged_cases import PagedMqaLogitsCase as PagedCase
from lightning_indexer.testing.strategies import paged_mqa_logits_cases

__all__ = ["PagedCase", "few_requests", "gathered", "paged_bound", "paged_cases"]

paged_cases = paged_mqa_logits_cases(
    PagedMqaLogitsContract(special_values=False, empty_sizes=False)
)
#: Selection is slow in the interpreter.
few_requests = paged_mqa_logits_cases(
    PagedMqaLogitsContract(special_values=False, empty_sizes=False, max_rows=4)
)
