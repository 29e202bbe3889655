"""Finding the two callables of sharing, and driving them without a speculator."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest
import torch

from lightning_indexer.indexer.buffer import SelectionKind
from lightning_indexer.speculator.mtp import MTPSpeculator
from lightning_indexer.speculator.sharing import find_sharing, resolve_sharing
from toy import (
    PlainDraft,
    SharingDraft,
    simple_drafts,
    simple_round,
    toy_block_table,
    toy_config,
    toy_draft,
)

CONFIG = toy_config(4)
ASKED = {"index_share_for_mtp_iteration": True}


def _wrapped(inner) -> SimpleNamespace:
    """A draft whose real model is `draft.model`."""
    return SimpleNamespace(
        model=inner,
        config=inner.config,
        forward=inner.forward,
        compute_logits=inner.compute_logits,
    )


def test_callables_are_found_on_the_model_inside_first():
    inner = toy_draft(CONFIG)
    outer = _wrapped(inner)
    outer.set_skip_topk = outer.compact_topk_indices = lambda _: None  # no-ops of a wrapper
    assert find_sharing(outer).model is inner


def test_callables_are_found_on_the_draft_otherwise():
    draft = toy_draft(CONFIG)
    assert find_sharing(draft).model is draft
    draft.model = SimpleNamespace()
    assert find_sharing(draft).model is draft


def test_wrapped_draft_shares():
    # ROCm/ATOM#2008: compaction looked at the wrapper, which has no buffer, and did nothing
    inner = toy_draft(CONFIG)
    speculator = MTPSpeculator(_wrapped(inner), CONFIG)
    table = toy_block_table(CONFIG)
    got = speculator.propose(*simple_round(table, [2, 3]))
    assert speculator.share_mtp_topk_indices
    assert inner.buffer.state.kind is SelectionKind.PER_REQUEST
    assert torch.equal(got, simple_drafts(table, [2, 3], 4, shares=True))


@pytest.mark.parametrize("missing", ["set_skip_topk", "compact_topk_indices"])
@pytest.mark.parametrize("inside", [False, True])
def test_missing_callable_is_warned_of_by_name(missing, inside):
    draft = toy_draft(CONFIG)
    setattr(draft, missing, None)
    draft = _wrapped(draft) if inside else draft
    with pytest.warns(RuntimeWarning, match=missing) as caught:
        speculator = MTPSpeculator(draft, CONFIG)
    other = {"set_skip_topk", "compact_topk_indices"} - {missing}
    assert other.pop() not in str(caught[0].message)
    assert not speculator.share_mtp_topk_indices
    table = toy_block_table(CONFIG)
    got = speculator.propose(*simple_round(table, [2, 3]))
    assert torch.equal(got, simple_drafts(table, [2, 3], 4, shares=False))


def test_both_missing_are_named():
    with pytest.warns(RuntimeWarning, match="set_skip_topk and compact_topk_indices"):
        resolve_sharing(toy_draft(CONFIG, PlainDraft), ASKED)


def test_callables_on_two_objects_are_not_enough():
    draft = SimpleNamespace(model=SimpleNamespace(set_skip_topk=print), compact_topk_indices=print)
    with pytest.warns(RuntimeWarning, match="on one object"):
        assert resolve_sharing(draft, ASKED).model is None


@pytest.mark.parametrize(
    "config", [{}, {"index_share_for_mtp_iteration": False}, SimpleNamespace()]
)
def test_not_asked_for_is_silent(config):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert resolve_sharing(toy_draft(CONFIG, PlainDraft), config).model is None
        assert resolve_sharing(toy_draft(CONFIG, SharingDraft), config).model is None


def test_buffer_driven_by_hand_never_raises():
    # a foreign runner moves the flag and compacts by itself, at any K
    config, table = toy_config(0), toy_block_table(toy_config(0))
    draft = toy_draft(config)
    target, _, _ = simple_round(table, [3, 2])
    for _ in range(2):
        draft.set_skip_topk(False)
        draft.forward(target)
        for rows in ([2, 4], [0, 1], [1]):
            draft.compact_topk_indices(torch.tensor(rows))
        draft.set_skip_topk(True)
        draft.buffer.check_reusable(torch.zeros(3), 3)
        draft.forward(target)
    assert draft.buffer.state.kind is SelectionKind.UNTRACKED
    assert draft.buffer.indices[0, 1] == 1  # row [1] of rows [0, 1] of rows [2, 4]
