"""Hypothesis strategies: cases within a contract, sizes that break kernels drawn more often."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from .attention_cases import ATTENTION_REGIMES, BYTES_DIMS, SparseAttentionCase
from .cases import CompactCase, MqaLogitsCase, SlotsCase, TopkCase
from .contracts import (
    CompactContract,
    KernelContract,
    MqaLogitsContract,
    PagedMqaLogitsContract,
    ScoreContract,
    SlotsContract,
    SparseAttentionContract,
    TopkContract,
)
from .extra import st
from .paged_cases import PagedMqaLogitsCase
from .regimes import (
    NAN_SCORES,
    NEG_INF_SCORES,
    POS_INF_SCORES,
    SCORE_REGIMES,
    SPECIAL_VALUES,
    VALUE_REGIMES,
)

SEEDS = st.integers(0, 2**31)


@st.composite
def sizes(draw: st.DrawFn, least: int, most: int, *marks: int) -> int:
    """least … most; as often as not an end, a mark, or a neighbour of one."""
    near = {least, least + 1, most - 1, most, *(m + d for m in marks for d in (-1, 0, 1))}
    inside = sorted(n for n in near if least <= n <= most)
    size = draw(st.integers(least, most))
    # Not a union of two strategies: shrinking would not find its way from one to the other.
    kind = draw(st.sampled_from(("any", "nearest", "any", "edge")))
    if kind == "nearest":
        return min(inside, key=lambda n: abs(n - size))
    return inside[size % len(inside)] if kind == "edge" else size


def topk_regimes(contract: TopkContract) -> tuple[str, ...]:
    """Regimes of scores on which the contract makes a promise."""
    left_out: set[str] = set()
    if contract.nan == "absent":
        left_out |= NAN_SCORES
    if contract.neg_inf == "absent":
        left_out |= NEG_INF_SCORES
    if not contract.pos_inf:
        left_out |= POS_INF_SCORES
    if contract.padding is None:  # these regimes leave rows short
        left_out |= NAN_SCORES if contract.nan == "skipped" else set()
        left_out |= NEG_INF_SCORES if contract.neg_inf == "skipped" else set()
    return tuple(r for r in SCORE_REGIMES if r not in left_out)


@st.composite
def topk_cases(
    draw: st.DrawFn,
    contract: TopkContract | None = None,
    *,
    regimes: Sequence[str] = (),
    windows: Sequence[str] = (),
) -> TopkCase:
    """Cases of `topk_indices` within a contract (default: ours), of some regimes and windows."""
    contract = contract or TopkContract()
    least, longest = _least(contract), min(contract.max_length, 1100)
    any_k = contract.padding is not None and contract.k_past_length
    most = contract.max_k if any_k else min(contract.max_k, longest)
    k = draw(sizes(1, most, *contract.blocks))
    if draw(st.booleans()):
        k = min(k, 60)
    low = least if any_k else k
    length = draw(sizes(low, longest, k, *contract.blocks))
    if draw(st.booleans()):  # as often as not a short row
        length = min(length, max(low, 150))
    return TopkCase(
        rows=draw(sizes(least, 2)),
        length=length,
        k=k,
        regime=draw(st.sampled_from(tuple(regimes) or topk_regimes(contract))),
        dtype=draw(st.sampled_from(contract.dtypes)),
        layout=draw(st.sampled_from(contract.layouts)),
        windows=draw(st.sampled_from(tuple(windows) or contract.windows)),
        bound_dtype=draw(st.sampled_from(contract.bound_dtypes)),
        seed=draw(SEEDS),
    )


def longest_topk_cases(contract: TopkContract) -> st.SearchStrategy[TopkCase]:
    """Rows about as long as the contract allows, of regimes that fill one bin of a histogram."""
    most = contract.max_length
    k = min(contract.max_k, 2048, most // 2)
    crowded = ("close", "all equal", "relu", "rounded", "ulp apart")
    return st.builds(
        TopkCase,
        rows=st.just(1),
        length=st.sampled_from((most // 2 + 1, most - 1, most)),
        k=st.sampled_from(sorted({1, k // 2 + 1, k})),
        regime=st.sampled_from(crowded),
        dtype=st.sampled_from(contract.dtypes),
        layout=st.sampled_from(contract.layouts),
        windows=st.just("none" if "none" in contract.windows else contract.windows[0]),
        bound_dtype=st.sampled_from(contract.bound_dtypes),
        seed=SEEDS,
    )


def value_regimes(contract: ScoreContract) -> tuple[str, ...]:
    """Regimes of operands on which the contract makes a promise."""
    special = frozenset() if contract.special_values else SPECIAL_VALUES
    return tuple(r for r in VALUE_REGIMES if r not in special)


def mqa_logits_cases(
    contract: MqaLogitsContract | None = None,
    *,
    regimes: Sequence[str] = (),
    windows: Sequence[str] = (),
    scaled: Sequence[bool] = (),
) -> st.SearchStrategy[MqaLogitsCase]:
    """Cases of `mqa_logits` within a contract (default: ours)."""
    contract = contract or MqaLogitsContract()
    least = _least(contract)
    return st.builds(
        MqaLogitsCase,
        rows=sizes(least, contract.max_rows),
        length=sizes(least, contract.max_length, 16, 32, 64, 128),
        heads=st.sampled_from(contract.heads),
        head_dim=st.sampled_from(contract.head_dims),
        dtypes=st.sampled_from(contract.dtypes),
        scaled=st.sampled_from(tuple(scaled) or contract.scaled),
        regime=st.sampled_from(tuple(regimes) or value_regimes(contract)),
        windows=st.sampled_from(tuple(windows) or contract.windows),
        layout=st.sampled_from(contract.layouts),
        seed=SEEDS,
    )


@st.composite
def paged_mqa_logits_cases(
    draw: st.DrawFn,
    contract: PagedMqaLogitsContract | None = None,
    *,
    regimes: Sequence[str] = (),
    forms: Sequence[str] = (),
) -> PagedMqaLogitsCase:
    """Cases of `paged_mqa_logits` within a contract (default: ours)."""
    contract = contract or PagedMqaLogitsContract()
    least, page_size = _least(contract), draw(st.sampled_from(contract.page_sizes))
    next_n = draw(st.integers(1, contract.max_next_n))
    return PagedMqaLogitsCase(
        requests=draw(sizes(least, max(least, contract.max_rows // next_n))),
        next_n=next_n,
        width=draw(sizes(least, contract.max_length, page_size, 2 * page_size)),
        heads=draw(st.sampled_from(contract.heads)),
        head_dim=draw(st.sampled_from(contract.head_dims)),
        page_size=page_size,
        call=draw(st.sampled_from(contract.calls)),
        form=draw(st.sampled_from(tuple(forms) or contract.forms)),
        regime=draw(st.sampled_from(tuple(regimes) or value_regimes(contract))),
        layout=draw(st.sampled_from(contract.layouts)),
        seed=draw(SEEDS),
    )


def compact_cases(
    contract: CompactContract | None = None, *, orders: Sequence[str] = ()
) -> st.SearchStrategy[CompactCase]:
    """Cases of `compact_topk_indices` within a contract (default: ours)."""
    contract = contract or CompactContract()
    least, height, width = _least(contract), contract.max_height, contract.max_width
    known = 0 if "wild" in contract.orders else 1  # rows that hold a selection
    widths = st.lists(
        sizes(max(least, 1), width, 32, 64, 128),
        min_size=1,
        max_size=3 if contract.several else 1,
    )
    return st.builds(
        CompactCase,
        height=sizes(1, height, 16),
        widths=widths.map(tuple),
        n=sizes(least, height),
        num_rows=st.none() | sizes(known, height) if contract.num_rows else st.none(),
        order=st.sampled_from(tuple(orders) or contract.orders),
        rows_dtype=st.sampled_from(contract.rows_dtypes),
        layout=st.sampled_from(contract.layouts),
        seed=SEEDS,
    )


def slots_cases(
    contract: SlotsContract | None = None, *, garbage: Sequence[bool] = ()
) -> st.SearchStrategy[SlotsCase]:
    """Cases of `indices_to_slots` within a contract (default: ours)."""
    contract = contract or SlotsContract()
    least = _least(contract)
    return st.builds(
        SlotsCase,
        rows=sizes(least, 5),
        width=sizes(least, 70, 32, 64),
        requests=st.integers(1, 4),
        blocks=st.integers(1, 6),
        page_size=st.sampled_from(contract.page_sizes),
        slot_dtype=st.sampled_from(contract.request_dtypes),
        garbage=st.sampled_from(
            tuple(garbage) or ((False, True) if contract.garbage else (False,))
        ),
        layout=st.sampled_from(contract.layouts),
        seed=SEEDS,
    )


def sparse_attention_cases(
    contract: SparseAttentionContract | None = None,
    *,
    regimes: Sequence[str] = (),
    cache: str = "floats",
) -> st.SearchStrategy[SparseAttentionCase]:
    """Cases of `sparse_mla_attention` over a cache, within a contract (default: ours)."""
    contract = contract or SparseAttentionContract()
    least = _least(contract)
    if cache == "656 bytes":  # in Python alone: small pools
        contract = replace(
            contract,
            dims=(BYTES_DIMS,),
            dtypes=tuple(d for d in contract.dtypes if d != torch.float32),
            max_slots=min(contract.max_slots, 12),
            max_width=min(contract.max_width, 20),
        )
    cases = st.builds(
        SparseAttentionCase,
        rows=sizes(least, contract.max_rows),
        heads=st.sampled_from(contract.heads),
        dims=st.sampled_from(contract.dims),
        slots=sizes(1, contract.max_slots),
        width=sizes(least if contract.empty_rows else 1, contract.max_width, 16, 32, 64),
        dtype=st.sampled_from(contract.dtypes),
        regime=st.sampled_from(tuple(regimes) or ATTENTION_REGIMES),
        holes=st.sampled_from(attention_holes(contract)),
        layout=st.sampled_from(contract.layouts),
        seed=SEEDS,
        unlisted=st.just(contract.unlisted),
        cache=st.just(cache),
    )
    if contract.empty_rows:
        return cases
    # a row wider than the pool would hold −1
    return cases.map(lambda case: replace(case, width=min(case.width, case.slots)))


def attention_holes(contract: SparseAttentionContract) -> tuple[str, ...]:
    """What indices may hold besides slots. "some", "tail" and "outside" can empty a row."""
    return (
        "none",
        *(("some", "tail", "empty rows") if contract.empty_rows else ()),
        *(("outside",) if contract.garbage and contract.empty_rows else ()),
        *(("repeats",) if contract.repeats else ()),
    )


def _least(contract: KernelContract) -> int:
    return 0 if contract.empty_sizes else 1
