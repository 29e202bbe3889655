"""Public reports of caches gone wrong, in rounds of the demo's draft; each names its source."""

from __future__ import annotations

import pytest
import torch

import lightning_indexer as li
from lightning_indexer.tinylm.model import random_model
from lightning_indexer.tinylm.runtime import TinyDraft, build

pytestmark = pytest.mark.once

RUNNERS = [li.EagerRunner, li.RecordedRunner]
PAGE, MAX_LEN, POISON = 8, 64, 1e6


def _tiny(*, padded: bool = False, dtype: torch.dtype = torch.float8_e4m3fn, **options):
    """A speculator of the demo's (untrained) draft layer, and pages for two requests."""
    _, draft = build(
        random_model(0), num_pages=16, page_size=PAGE, max_num_tokens=64, index_k_dtype=dtype
    )
    config = li.SpeculatorConfig(
        num_speculative_steps=3,
        max_num_reqs=2,
        max_num_tokens=32,
        max_model_len=MAX_LEN,
        hidden_size=draft.config.hidden_size,
        page_size=PAGE,
        prefill_sizes=(8, 32) if padded else (),
        decode_sizes=(1, 2) if padded else (),
    )
    table = li.BlockTable(2, MAX_LEN, num_pages=16, page_size=PAGE)
    for request in range(2):
        table.allocate(request, MAX_LEN)
    return li.MTPSpeculator(draft, config, **options), draft, table


def _batch(table: li.BlockTable, *chunks: tuple[int, int, int]) -> li.StepBatch:
    """Rows (request, start, count) with tokens and hidden states of their request and position."""
    g = torch.Generator().manual_seed(0)
    tokens = torch.randint(128, (2, MAX_LEN), generator=g)
    hidden = torch.randn(2, MAX_LEN, 32, generator=g)
    rows = [li.RequestRows(r, s, tokens[r, s : s + n].tolist()) for r, s, n in chunks]
    states = torch.cat([hidden[r, s : s + n] for r, s, n in chunks])
    return li.with_hidden(li.target_batch(rows, table.table, PAGE), states)


def _nothing_rejected(batch: li.StepBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """num_rejected, and next tokens of 1."""
    zeros = torch.zeros(batch.num_reqs, dtype=torch.int64)
    return zeros, zeros + 1


def _caches(draft: TinyDraft) -> list[torch.Tensor]:
    """All that a runtime keeps of a token: index keys with their scales, and latents."""
    index_k = draft.cache.index_k.state_tensors().values()
    return [*index_k, draft.cache.latent.rows]


@pytest.mark.parametrize("verified", [1, 3])
def test_index_keys_that_skipped_steps_left_out_are_never_read(verified: int) -> None:
    # xLLM-AI/xllm#2339: skipping the selection skips the drafted positions' index keys as well.
    # Here it does so on purpose: the next round's step 0 writes those it keeps before any is read.
    found = []
    for poisoned in (False, True):
        speculator, draft, table = _tiny(dtype=torch.float32)
        index_k = draft.cache.index_k.data.view(-1, draft.config.index_head_dim)
        first = _batch(table, (0, 0, 12))
        speculator.propose(first, *_nothing_rejected(first))
        drafted = table.slots(torch.tensor([12, 13]), torch.zeros(2, dtype=torch.int32))
        assert not index_k[drafted].any()
        assert draft.cache.latent.rows[drafted].any(dim=1).all()
        if poisoned:
            index_k[drafted] = POISON
        second = _batch(table, (0, 12, verified))
        got = speculator.propose(second, *_nothing_rejected(second))
        rows = draft.topk_buffers[0].rows(1).clone()
        found.append((got, rows, index_k[second.slot_mapping]))
        assert not (index_k[second.slot_mapping] == POISON).any()
    assert all(map(torch.equal, *found))


def test_stage_that_begins_with_a_shared_layer_runs_on_the_rows_of_the_stage_before() -> None:
    # sgl-project/sglang#28537: indices were not handed on, and a stage began with a layer that
    # has none of its own (39 of 78; its rows are layer 38's).
    roles = li.layer_roles(
        {"num_hidden_layers": 78, "index_topk_freq": 4, "index_skip_topk_offset": 3}
    )
    assert roles[38:40] == ("full", "shared")
    with pytest.raises(ValueError, match="got layer 39, which is shared"):
        li.stage_roles(roles, 39, 78)
    assert li.stage_roles(roles, 39, 78, receives_selection=True) == roles[39:]
    lm = random_model(0)
    assert lm.config.roles[:2] == ("full", "shared")
    whole, first, second = (
        build(lm, num_pages=16, page_size=PAGE, max_num_tokens=32)[0] for _ in range(3)
    )
    table = li.BlockTable(2, MAX_LEN, num_pages=16, page_size=PAGE)
    table.allocate(0, 20)
    batch = _batch(table, (0, 0, 20))
    lens = batch.context_lens()

    def run(target, layers: slice, x: torch.Tensor) -> torch.Tensor:
        for layer, cache in zip(target.layers[layers], target.caches[layers], strict=True):
            x = layer(x, batch, lens, cache)
        return x

    embedded = whole.embed_tokens(batch.input_ids)
    expected = run(whole, slice(0, 2), embedded)
    between = run(first, slice(0, 1), embedded)
    assert not torch.equal(run(second, slice(1, 2), between), expected)
    (ours,), (theirs,) = second.topk_buffers, first.topk_buffers
    ours.rows(20).copy_(theirs.rows(20))
    assert torch.equal(run(second, slice(1, 2), between), expected)


@pytest.mark.parametrize("runner", RUNNERS)
def test_idle_round_leaves_every_byte_of_the_caches(runner: type[li.GraphRunner]) -> None:
    # vllm-project/vllm#56734: two dummy rows of request −1 overwrote live pages.
    speculator, draft, table = _tiny(padded=True, runner=runner())
    speculator.capture()
    live = _batch(table, (0, 0, 12), (1, 0, 9))
    speculator.propose(live, *_nothing_rejected(live))
    before = [cache.clone() for cache in _caches(draft)]
    assert all(cache.any() for cache in before)
    dummy = _batch(table, (0, 12, 1), (1, 9, 1))
    for name, value in (("slot_mapping", -1), ("row_to_request", -1), ("seq_lens", 0)):
        getattr(dummy, name).fill_(value)
    assert (speculator.propose(dummy, *_nothing_rejected(dummy)) == -1).all()
    assert all(map(torch.equal, _caches(draft), before))


@pytest.mark.parametrize("runner", RUNNERS)
def test_warm_up_and_prompts_shorter_than_the_selection(runner: type[li.GraphRunner]) -> None:
    # sgl-project/sglang#28785: warm-up failed where lengths below k took a dense shortcut, which
    # left no indices. Here such a row holds all its positions, and −1.
    speculator, draft, table = _tiny(padded=True, runner=runner())
    assert draft.config.index_topk == 4
    speculator.capture()
    batch = _batch(table, (0, 0, 2), (1, 0, 1))
    got = speculator.propose(batch, *_nothing_rejected(batch))
    assert (got >= 0).all()
    (buffer,) = draft.topk_buffers
    assert buffer.rows(2).tolist() == [[0, 1, -1, -1], [0, -1, -1, -1]]


@pytest.mark.parametrize("whole", [True, False])
def test_restored_request_drafts_as_if_its_pages_had_never_been_taken(whole: bool) -> None:
    # sgl-project/sglang#39156: latents came back, index keys did not. sgl-project/sglang#28896:
    # the target's came back, the draft's did not.
    found = []
    for evicted in (False, True):
        speculator, draft, _ = _tiny()
        table = li.BlockTable(2, MAX_LEN, num_pages=8, page_size=PAGE)  # one request's
        table.allocate(0, MAX_LEN)
        first = _batch(table, (0, 0, 30))
        speculator.propose(first, *_nothing_rejected(first))
        if evicted:
            index_k, latents = _caches(draft)
            pages, slots = table.table[0, :4].long(), first.slot_mapping
            saved = index_k[pages], latents[slots]
            table.release(0)
            table.allocate(1, MAX_LEN)
            other = _batch(table, (1, 0, 32))
            speculator.propose(other, *_nothing_rejected(other))
            table.release(1)
            table.allocate(0, MAX_LEN)
            assert set(slots.tolist()) < set(other.slot_mapping.tolist())
            latents[slots] = saved[1]
            if whole:
                index_k[pages] = saved[0]
        second = _batch(table, (0, 30, 2))
        got = speculator.propose(second, *_nothing_rejected(second))
        found.append((got, draft.topk_buffers[0].rows(1).clone()))
    assert all(map(torch.equal, *found)) == whole
