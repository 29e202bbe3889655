"""Which layers select for themselves and which reuse the selection of the layer before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .config import read_field

_ROLES = {"F": "full", "S": "shared", "full": "full", "shared": "shared"}


def layer_roles(config: Any) -> tuple[str, ...]:
    """The role of every layer: hidden layers first, then MTP layers.

    In this precedence: `indexer_types` ("full"/"shared" a layer); `index_topk_pattern` (a string
    or list of "F"/"S"); `index_topk_freq` f with `index_skip_topk_offset` o (default 2), where
    layer l is full iff max(l − o + 1, 0) % f == 0. Without any of them every layer is full.
    Layer 0 and all MTP layers are full whatever the config says: nothing precedes the one, and a
    draft's first step must never reuse the target's selection.

    Args:
        config: object or mapping with `num_hidden_layers` and optionally
            `num_nextn_predict_layers` (0) and the fields above.

    Returns:
        A tuple of "full" and "shared", `num_hidden_layers + num_nextn_predict_layers` long.

    Raises:
        ValueError: for an unknown role, a pattern that does not cover the hidden layers, or a
            frequency below 1.

    Source: GLM-5.2's config; vLLM and SGLang read it the same way.
    """
    hidden = read_field(config, "num_hidden_layers")
    if hidden is None or hidden < 1:
        raise ValueError(f"num_hidden_layers must be at least 1, got {hidden}")
    draft = read_field(config, "num_nextn_predict_layers", 0)
    roles = _hidden_roles(config, hidden)
    return ("full", *roles[1:], *("full",) * draft)


def stage_roles(
    roles: Sequence[str], first: int, end: int, *, receives_selection: bool = False
) -> tuple[str, ...]:
    """The roles of layers [first, end), a pipeline stage, if it can run.

    Args:
        roles: of all layers, from `layer_roles`.
        first: the stage's first layer.
        end: the layer after its last one.
        receives_selection: whether the stage before hands its selection over, into the first
            rows of this stage's buffer, with every batch.

    Raises:
        ValueError: when the range is empty or outside the layers; or when the first layer is
            shared and nothing hands it a selection: it would read rows that nobody wrote.
    """
    if not 0 <= first < end <= len(roles):
        raise ValueError(f"layers [first, end) must lie in [0, {len(roles)}), got [{first}, {end})")
    if roles[first] == "shared" and not receives_selection:
        full = [layer for layer, role in enumerate(roles) if role == "full"]
        raise ValueError(
            f"first must be a full layer (of {full}) unless receives_selection, got layer {first},"
            " which is shared: the stage would read a selection that nobody has written"
        )
    return tuple(roles[first:end])


def _hidden_roles(config: Any, hidden: int) -> list[str]:
    draft = read_field(config, "num_nextn_predict_layers", 0)
    for name in ("indexer_types", "index_topk_pattern"):
        pattern = read_field(config, name)
        if pattern is None:
            continue
        if len(pattern) not in (hidden, hidden + draft):
            raise ValueError(
                f"{name} must name a role for each of {hidden} layers, got {len(pattern)}"
            )
        unknown = [role for role in pattern if role not in _ROLES]
        if unknown:
            raise ValueError(f"{name} must hold full/shared or F/S, got {unknown[0]!r}")
        return [_ROLES[role] for role in pattern[:hidden]]
    freq = read_field(config, "index_topk_freq", 1)
    offset = read_field(config, "index_skip_topk_offset", 2)
    if freq < 1:
        raise ValueError(f"index_topk_freq must be at least 1, got {freq}")
    return [
        "full" if max(layer - offset + 1, 0) % freq == 0 else "shared" for layer in range(hidden)
    ]
