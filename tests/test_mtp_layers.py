"""Drafts of several indexer layers: every buffer is compacted, tracked and read, and only once."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from counting import AGREEMENT, counts_examples, tallies
from lightning_indexer.indexer import sharing
from lightning_indexer.indexer.buffer import SelectionKind, TopkIndicesBuffer
from lightning_indexer.indexer.dsa_attention import DSACache
from lightning_indexer.indexer.layer_plan import layer_roles
from lightning_indexer.speculator.check import IndexSharingError, check_index_sharing
from lightning_indexer.speculator.mtp import MTPSpeculator
from lightning_indexer.speculator.runner import GraphStateError
from lightning_indexer.tinylm.config import MINIATURE
from lightning_indexer.tinylm.layers import DecoderLayer, MTPLayer
from lightning_indexer.tinylm.linear import RowBlockLinear, in_row_blocks
from lightning_indexer.tinylm.model import random_model
from lightning_indexer.tinylm.runtime import build
from tiny_rounds import PAGE, PAGES, TOPK, tiny_batch, tiny_propose, tiny_speculator, tiny_table

pytestmark = pytest.mark.once

STEPS, ROWS = 4, 64
CHUNKS = [(0, 0, 9), (1, 0, 5), (2, 0, 7)]
LAYOUTS = ["own", "shared", "aliased"]


def _buffers(layout: str, append_columns: int = 0) -> list[TopkIndicesBuffer]:
    """Of two layers."""
    first, second = (
        TopkIndicesBuffer(ROWS, TOPK + append_columns, append_columns=append_columns)
        for _ in range(2)
    )
    if layout == "aliased":
        second.indices = first.indices
    return [first, first if layout == "shared" else second]


class StackedDraft(nn.Module):
    """An MTP layer and a decoder layer above it, both with an indexer."""

    set_skip_topk = sharing.set_skip_topk
    set_write_skipped_index_k = sharing.set_write_skipped_index_k
    compact_topk_indices = sharing.compact_topk_indices
    topk_buffers = property(sharing.topk_buffers_of)

    def __init__(
        self, seed: int, buffers: list[TopkIndicesBuffer], roles: tuple[str, ...] = ("full",) * 2
    ) -> None:
        super().__init__()
        self.config = MINIATURE
        self.embed_tokens = nn.Embedding(MINIATURE.vocab_size, MINIATURE.hidden_size)
        assert roles[0] == "full"
        first = MTPLayer(MINIATURE, buffers[0])
        self.layers = nn.ModuleList([first, DecoderLayer(MINIATURE, roles[1], buffers[1])])
        self.lm_head = RowBlockLinear(MINIATURE.hidden_size, MINIATURE.vocab_size, bias=False)
        g = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.dim() == 2:
                    parameter.normal_(std=MINIATURE.hidden_size**-0.5, generator=g)
        self.to(torch.float64).eval().requires_grad_(False)
        sizes = {"page_size": PAGE, "dtype": torch.float32, "index_k_dtype": torch.float32}
        self.caches = [
            DSACache.make(layer.self_attn.config, role, PAGES, **sizes)
            for layer, role in zip(self.layers, roles, strict=True)
        ]

    def forward(self, batch):
        first, _ = self.layers
        x = in_row_blocks(first.combine, self.embed_tokens(batch.input_ids), batch.hidden)
        for layer, cache_ in zip(self.layers, self.caches, strict=True):
            x = layer(x, batch, batch.context_lens(), cache_)
        return in_row_blocks(first.shared_head.norm, x)

    def compute_logits(self, hidden):
        return self.lm_head(hidden)


class OneRequest:
    """The oracle: a draft of one request that itself keeps its last token's row of each buffer.

    A speculator that knows of no sharing drives it, so nothing is compacted.
    """

    def __init__(self, draft: StackedDraft, buffers: list[TopkIndicesBuffer]) -> None:
        self.draft, self.buffers = draft, buffers
        self.compute_logits = draft.compute_logits
        self.config = draft.config
        self.rows: list[torch.Tensor] = []

    def forward(self, batch):
        if not self.rows:
            output = self.draft.forward(batch)
            last = batch.num_tokens - 1
            self.rows = [buffer.indices[last].clone() for buffer in self.buffers]
            return output
        for buffer, row in zip(self.buffers, self.rows, strict=True):
            buffer.indices[0] = row
        for indexer in (layer.self_attn.indexer for layer in self.draft.layers):
            indexer.skip_topk = True
        output = self.draft.forward(batch)
        for indexer in (layer.self_attn.indexer for layer in self.draft.layers):
            indexer.skip_topk = False
        return output


@cache
def _oracle(seed: int, layout: str, chunk: tuple[int, int, int]) -> list[int]:
    buffers = _buffers(layout)
    model = OneRequest(StackedDraft(seed, buffers), buffers)
    speculator = tiny_speculator(model, STEPS, shares=False)
    return tiny_propose(speculator, [chunk]).tolist()[0]


@cache
def _speculator(seed: int, layout: str, recorded: bool, append: int = 0, **options):
    draft = StackedDraft(seed, _buffers(layout, append))
    return tiny_speculator(
        draft, STEPS, recorded=recorded, append_new_positions=append > 0, **options
    )


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@settings(max_examples=50)  # an example runs whole rounds several times
@given(
    seed=st.integers(0, 3),
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=3),
    steps=st.integers(0, STEPS),
)
@counts_examples("stacked drafts")
@tallies(AGREEMENT, "stacked drafts")
def test_every_layer_reuses_its_own_rows_of_the_right_request(
    layout, recorded, seed, lengths, steps
):
    chunks = [(r, 0, n) for r, n in enumerate(lengths)]
    got = tiny_propose(_speculator(seed, layout, recorded), chunks, steps)[:, :steps]
    assert got.tolist() == [_oracle(seed, layout, chunk)[:steps] for chunk in chunks]


def test_rows_of_the_other_layer_would_change_the_drafts():
    own = [_oracle(seed, "own", chunk) for seed in range(4) for chunk in CHUNKS]
    assert own != [_oracle(seed, "shared", chunk) for seed in range(4) for chunk in CHUNKS]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_buffer_is_compacted_once(layout):
    buffers = _buffers(layout)
    speculator = tiny_speculator(StackedDraft(0, buffers), STEPS)
    tiny_propose(speculator, CHUNKS)
    wanted = []

    def remember(num_reqs):
        last = speculator.last_token_indices[:num_reqs]
        assert last.tolist() == [1, 2, 6]  # the second of two would read row 1 of the first
        wanted.extend(buffer.indices[last].clone() for buffer in buffers)
        MTPSpeculator.on_prefill_end(speculator, num_reqs)

    speculator.on_prefill_end = remember
    tiny_propose(speculator, [(0, 9, 2), (1, 5, 1), (2, 7, 4)])
    for buffer, rows in zip(buffers, wanted, strict=True):
        assert torch.equal(buffer.indices[:3], rows)
        assert not torch.equal(rows[0], rows[1])
    assert torch.equal(*wanted) == (layout != "own")
    assert speculator.stats.rows_compacted == 2 * 3


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_buffer_is_tracked(layout, recorded):
    speculator = tiny_speculator(StackedDraft(0, _buffers(layout)), STEPS, recorded=recorded)
    buffers = speculator.sharing.buffers
    assert len(buffers) == (1 if layout == "shared" else 2)
    kinds = []
    speculator.on_multi_step_decode_begin = lambda num_reqs: (
        kinds.append({buffer.state.kind for buffer in buffers}),
        MTPSpeculator.on_multi_step_decode_begin(speculator, num_reqs),
    )
    for generation in (1, 2):
        tiny_propose(speculator, CHUNKS)
        assert {b.state.generation for b in buffers} == {generation + recorded}  # a capture is one
    assert kinds == [{SelectionKind.PER_REQUEST}] * 2
    for buffer in buffers:
        buffer.clear()
    with pytest.raises(RuntimeError, match="the selection is empty"):
        MTPSpeculator.on_multi_step_decode_begin(speculator, 3)


@pytest.mark.parametrize("moved", [0, 1])
def test_replay_with_either_buffer_moved_is_refused(moved):
    speculator = tiny_speculator(StackedDraft(0, _buffers("own")), STEPS, recorded=True)
    buffer = speculator.sharing.buffers[moved]
    held, buffer.indices = buffer.indices, buffer.indices.clone()
    with pytest.raises(GraphStateError, match="a tensor has moved"):
        tiny_propose(speculator, CHUNKS)
    buffer.indices = held
    got = tiny_propose(speculator, CHUNKS).tolist()
    assert got == [_oracle(0, "own", chunk) for chunk in CHUNKS]


@pytest.mark.parametrize("layout", ["own", "shared"])
@pytest.mark.parametrize("every", [None, 1, 2])
def test_appended_and_refreshed_rows_reach_every_layer(layout, every):
    for seed in range(2):
        eager, recorded = (
            _speculator(seed, layout, recorded, append=STEPS - 1, refresh_every=every)
            for recorded in (False, True)
        )
        for steps in (STEPS, 3):
            expected = tiny_propose(eager, CHUNKS, steps)
            assert torch.equal(tiny_propose(recorded, CHUNKS, steps), expected)
            for ours, theirs in zip(recorded.sharing.buffers, eager.sharing.buffers, strict=True):
                assert torch.equal(ours.indices[:3], theirs.indices[:3])
                since = 0 if every is None else (steps - 1) // every * every
                for row, (_, _, length) in zip(ours.indices.tolist(), CHUNKS, strict=False):
                    made = [length - 1 + s if since < s < steps else -1 for s in range(1, STEPS)]
                    assert row[TOPK:] == made
    fresh = tiny_speculator(StackedDraft(1, _buffers(layout)), STEPS, shares=False)
    same = torch.equal(tiny_propose(fresh, CHUNKS), tiny_propose(eager, CHUNKS))
    assert same or every != 1


def _check(draft):
    return check_index_sharing(
        draft,
        hidden_size=MINIATURE.hidden_size,
        index_topk=TOPK,
        page_size=PAGE,
        dtype=torch.float64,
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_check_passes_every_layout(layout):
    report = _check(StackedDraft(0, _buffers(layout)))
    assert report.num_buffers == (1 if layout == "shared" else 2)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("missed", [0, 1])
def test_check_names_a_layer_that_the_flag_does_not_reach(missed, layout):
    draft = StackedDraft(0, _buffers(layout))
    reached = draft.layers[1 - missed].self_attn.indexer
    draft.set_skip_topk = reached.set_skip_topk
    named = missed if layout == "own" else 0
    with pytest.raises(IndexSharingError, match=f"a layer of buffer {named} selects although"):
        _check(draft)


@pytest.mark.parametrize("missed", [0, 1])
def test_check_names_a_buffer_that_compaction_misses(missed):
    draft = StackedDraft(0, _buffers("own"))
    draft.compact_topk_indices = draft.layers[1 - missed].self_attn.indexer.compact_topk_indices
    with pytest.raises(IndexSharingError, match=f"row 0 of buffer {missed} is not that of request"):
        _check(draft)


def test_check_names_a_buffer_that_a_layer_does_not_read():
    draft = StackedDraft(0, _buffers("own"))
    elsewhere = TopkIndicesBuffer(ROWS, TOPK)
    indexer = draft.layers[1].self_attn.indexer
    select = indexer.forward

    def from_elsewhere(hidden, *inputs, **options):
        selected, rows = select(hidden, *inputs, **options), elsewhere.rows(hidden.shape[0])
        return rows if indexer.skip_topk else rows.copy_(selected)

    indexer.forward = from_elsewhere
    with pytest.raises(IndexSharingError, match="request 0 does not read its row of buffer 1"):
        _check(draft)


def test_target_and_draft_never_write_each_others_rows():
    target, draft = build(
        random_model(0), num_pages=PAGES, page_size=PAGE, max_num_tokens=48, dtype=torch.float64
    )
    (ours,), (theirs,) = draft.topk_buffers, target.topk_buffers
    assert ours.indices.untyped_storage().data_ptr() != theirs.indices.untyped_storage().data_ptr()
    speculator = tiny_speculator(draft, STEPS, refresh_every=2)
    target.forward(tiny_batch(tiny_table(), CHUNKS))
    kept = theirs.indices.clone()
    assert (kept[:21] >= 0).any(dim=1).all()
    tiny_propose(speculator, CHUNKS)
    assert torch.equal(theirs.indices, kept)
    kept = ours.indices.clone()
    target.forward(tiny_batch(tiny_table(), [(0, 9, 4), (1, 5, 4)]))
    assert torch.equal(ours.indices, kept)
    assert not torch.equal(theirs.indices[:8], kept[:8])


@pytest.mark.parametrize("pattern", ["FS", "FSSS", "SSSS", ["full", "shared"]])
def test_draft_layers_select_at_step_0_whatever_the_pattern_says(pattern):
    config = {
        "num_hidden_layers": 2,
        "num_nextn_predict_layers": 2,
        "index_topk_pattern": pattern,
    }
    roles = layer_roles(config)
    assert roles == ("full", "shared", "full", "full")
    buffers = _buffers("own")
    speculator = tiny_speculator(StackedDraft(0, buffers, roles[-2:]), STEPS)
    for junk in (0, 3, 2**20):  # such as the target's rows
        for buffer in buffers:
            buffer.indices.fill_(junk)
        speculator.model.set_skip_topk(True)
        got = tiny_propose(speculator, CHUNKS).tolist()
        assert got == [_oracle(0, "own", chunk) for chunk in CHUNKS]
