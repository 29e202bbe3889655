"""Whether a draft model can share its selection between draft steps."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from ..indexer.buffer import TopkIndicesBuffer
from ..indexer.config import read_field

CALLABLES = ("set_skip_topk", "compact_topk_indices")


class SharesTopkIndices(Protocol):
    """The part of a draft model that index sharing drives.

    A model that also has `topk_buffers`, a list of its `TopkIndicesBuffer`s, gets their state
    tracked: reusing a selection that is not this round's raises. An empty list says that there is
    nothing to share.
    """

    def set_skip_topk(self, skip: bool) -> None:
        """With True, forwards reuse the buffer's rows and do no indexer work."""

    def compact_topk_indices(self, rows: torch.Tensor) -> None:
        """Row i of the buffer becomes its old row rows[i], in place."""


@dataclass(frozen=True)
class SharingCapability:
    """What was found on a draft model.

    Attributes:
        model: the object with both callables, or None.
        missing: what a model that was asked to share lacks, in words.
        buffers: buffers whose state can be tracked.
    """

    model: SharesTopkIndices | None
    missing: str = ""
    buffers: Sequence[TopkIndicesBuffer] = field(default_factory=tuple)


def find_sharing(draft: Any) -> SharingCapability:
    """Looks the two callables up on `draft.model`, else on `draft`."""
    places = [place for place in (getattr(draft, "model", None), draft) if place is not None]
    for place in places:
        if all(callable(getattr(place, name, None)) for name in CALLABLES):
            buffers = getattr(place, "topk_buffers", None)
            if buffers is not None and not list(buffers):  # callables that reach no indexer
                return SharingCapability(None, "a buffer in topk_buffers")
            return SharingCapability(place, buffers=tuple(buffers or ()))
    lacking = [
        name
        for name in CALLABLES
        if not any(callable(getattr(place, name, None)) for place in places)
    ]
    missing = " and ".join(lacking) if lacking else f"{' and '.join(CALLABLES)} on one object"
    return SharingCapability(None, missing)


def resolve_sharing(draft: Any, draft_config: Any) -> SharingCapability:
    """The capability to use: `model` is None when sharing is not asked for or impossible.

    Asked for (`index_share_for_mtp_iteration` in the draft's config) but impossible is a warning
    naming what is missing, and a plain recompute.
    """
    if not read_field(draft_config, "index_share_for_mtp_iteration", False):
        return SharingCapability(None)
    capability = find_sharing(draft)
    if capability.model is None:
        warnings.warn(
            f"index_share_for_mtp_iteration is set, but {type(draft).__name__} lacks"
            f" {capability.missing}: every draft step recomputes its selection",
            RuntimeWarning,
            stacklevel=3,
        )
    return capability
