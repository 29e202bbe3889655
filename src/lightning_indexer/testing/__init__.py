"""Oracles, cases and conformance suites for testing kernels, ours or anybody's.

`check_topk(fn, TopkContract(...))` and its kin judge a kernel by its own promises; the names below
are loaded when they are asked for, since only the suites need hypothesis.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .canary import CanaryError as CanaryError
    from .canary import Guarded as Guarded
    from .compare import assert_matches as assert_matches
    from .conformance import check_compact as check_compact
    from .conformance import check_index_sharing as check_index_sharing
    from .conformance import check_mqa_logits as check_mqa_logits
    from .conformance import check_paged_mqa_logits as check_paged_mqa_logits
    from .conformance import check_slots as check_slots
    from .conformance import check_sparse_attention as check_sparse_attention
    from .conformance import check_topk as check_topk
    from .contracts import CompactContract as CompactContract
    from .contracts import IndexSharingContract as IndexSharingContract
    from .contracts import MqaLogitsContract as MqaLogitsContract
    from .contracts import PagedMqaLogitsContract as PagedMqaLogitsContract
    from .contracts import SlotsContract as SlotsContract
    from .contracts import SparseAttentionContract as SparseAttentionContract
    from .contracts import TopkContract as TopkContract
    from .report import ConformanceError as ConformanceError
    from .report import ConformanceReport as ConformanceReport

_HOMES = {
    "canary": ("CanaryError", "Guarded"),
    "compare": ("assert_matches",),
    "conformance": (
        "check_compact",
        "check_index_sharing",
        "check_mqa_logits",
        "check_paged_mqa_logits",
        "check_slots",
        "check_sparse_attention",
        "check_topk",
    ),
    "contracts": (
        "CompactContract",
        "IndexSharingContract",
        "MqaLogitsContract",
        "PagedMqaLogitsContract",
        "SlotsContract",
        "SparseAttentionContract",
        "TopkContract",
    ),
    "report": ("ConformanceError", "ConformanceReport"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOME_OF[name]}", __name__), name)
