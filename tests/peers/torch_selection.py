"""PyTorch's own ways to the k greatest."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch

from lightning_indexer.testing import TopkContract

from .peer import Peer, Probe

#: Rows of k candidates or more, any of equal scores; NaN is not mentioned, so it is not drawn.
ROWS = TopkContract(
    order="score",
    tie_rule="any",
    nan="absent",
    neg_inf="least",
    padding=None,
    windows=("none",),
    index_dtype=torch.int64,
)


def greatest(logits: torch.Tensor, k: int) -> torch.Tensor:
    """torch.topk."""
    return torch.topk(logits, k, dim=-1).indices


def greatest_unsorted(logits: torch.Tensor, k: int) -> torch.Tensor:
    """torch.topk, in no promised order."""
    return torch.topk(logits, k, dim=-1, sorted=False).indices


def stable_sort(logits: torch.Tensor, k: int) -> torch.Tensor:
    """The front of a stable sort."""
    return torch.sort(logits, dim=-1, descending=True, stable=True).indices[:, :k]


def masked_topk(
    logits: torch.Tensor,
    k: int,
    row_starts: torch.Tensor | None = None,
    row_ends: torch.Tensor | None = None,
) -> torch.Tensor:
    """−inf outside the windows, then torch.topk: selection as models write it."""
    length = logits.shape[1]
    places = torch.arange(length)
    hidden = torch.zeros(logits.shape, dtype=torch.bool)
    if row_starts is not None:
        hidden |= places < row_starts[:, None]
    if row_ends is not None:
        hidden |= places >= row_ends[:, None]
    scores = logits.masked_fill(hidden, -math.inf)
    return scores.topk(min(k, length), dim=-1).indices


def _same(fn: Callable[..., torch.Tensor]) -> Callable[[], Callable[..., torch.Tensor]]:
    return lambda: fn


def stricter(contract: TopkContract, *names: str) -> tuple[Probe, ...]:
    """Probes by name, each of one promise more than `contract` makes."""
    full = replace(contract, padding=-1, k_past_length=False)
    ties = ("rounded", "all equal", "relu")
    known = (
        Probe(
            "the smaller position of equal scores",
            replace(contract, tie_rule="smaller position", order="any"),
            ties,
        ),
        Probe("ascending positions", replace(contract, order="ascending"), ("of normal",)),
        Probe("best first", replace(contract, order="score"), ("of normal", "rounded")),
        Probe("NaN is the greatest", replace(contract, nan="greatest"), ("nan",)),
        Probe("NaN is never selected", replace(full, nan="skipped"), ("nan",)),
        Probe("−inf is never selected", replace(full, neg_inf="skipped"), ("infinite",)),
        Probe("k > L: −1 past the row", replace(contract, padding=-1), ("of normal", "all equal")),
        Probe("int32 positions", replace(contract, index_dtype=torch.int32), ("of normal",)),
        Probe("the same answer again", replace(contract, deterministic=True), ("same call",)),
    )
    by_name = {probe.promise: probe for probe in known}
    return tuple(by_name[name] for name in names)


WINDOWED = replace(
    ROWS,
    padding=-1,
    k_past_length=False,
    windows=("ends", "both"),
    positions="absolute",
    neg_inf="absent",
)
UNSTABLE = replace(ROWS, deterministic=False)
TIES, AGAIN = "the smaller position of equal scores", "the same answer again"
ORDERED = ("ascending positions", "NaN is the greatest", "NaN is never selected")
SHORT = ("−inf is never selected", "k > L: −1 past the row", "int32 positions")

PEERS = (
    Peer(
        name="torch.topk",
        package="torch",
        source="docstring of `torch.topk`",
        promises="the k greatest, sorted by score; which of tied elements is not guaranteed and"
        " may vary; NaN is not mentioned",
        op="topk",
        load=_same(greatest),
        contract=UNSTABLE,
        probes=stricter(UNSTABLE, TIES, AGAIN, *ORDERED, *SHORT),
    ),
    Peer(
        name="torch.topk(sorted=False)",
        package="torch",
        source="docstring of `torch.topk`",
        promises="the k greatest in any order",
        op="topk",
        load=_same(greatest_unsorted),
        contract=replace(UNSTABLE, order="any"),
        probes=stricter(
            replace(UNSTABLE, order="any"),
            TIES,
            AGAIN,
            "ascending positions",
        ),
    ),
    Peer(
        name="torch.sort(stable=True)[:k]",
        package="torch",
        source="docstring of `torch.sort`",
        promises="descending by score, equal elements in the order of their positions",
        op="topk",
        load=_same(stable_sort),
        contract=replace(ROWS, tie_rule="smaller position"),
        probes=stricter(replace(ROWS, tie_rule="smaller position"), *ORDERED, *SHORT),
    ),
    Peer(
        name="masked_fill(-inf).topk",
        package="torch",
        source="docstring of `torch.topk`; the composition that models use",
        promises="of rows with k visible keys or more the k greatest",
        op="topk",
        load=_same(masked_topk),
        contract=replace(UNSTABLE, neg_inf="absent"),
        probes=(
            Probe(
                "−1 in rows with fewer than k visible keys", WINDOWED, ("of normal", "all equal")
            ),
            *stricter(replace(UNSTABLE, neg_inf="absent"), TIES),
        ),
    ),
)
