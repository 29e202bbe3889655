"""Public reports of shared selections gone wrong, as rounds of our own; each names its source."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import ClassVar

import pytest
import torch
from torch import nn

import lightning_indexer as li
from lightning_indexer.indexer import sharing as indexer_sharing
from toy import (
    VOCAB,
    DraftOracle,
    simple_drafts,
    simple_round,
    target_rows,
    toy_block_table,
    toy_config,
    toy_draft,
)

PAGE, MARKER = 4, 777


class RowReader(nn.Module):
    """Its best two keys are the two before a row's own; its token spells the row that it reads.

    Position 7 selects [5, 6] and drafts token 56.
    """

    def __init__(self, config: li.SpeculatorConfig) -> None:
        super().__init__()
        self.config = {"index_share_for_mtp_iteration": True}
        self.buffer = li.TopkIndicesBuffer(config.max_num_tokens, 2)
        self.topk_buffers = [self.buffer]
        self.skip_topk = False
        self.selections = torch.zeros((), dtype=torch.int64)  # counted on the device, so by replays
        position = torch.arange(config.max_model_len)
        distance = position[:, None] - position
        self.scores = ((distance == 1) | (distance == 2)).float()

    def set_skip_topk(self, skip: bool) -> None:
        self.skip_topk = skip

    def compact_topk_indices(self, rows: torch.Tensor) -> None:
        li.compact_topk_indices(self.buffer.indices, rows)

    def forward(self, batch: li.StepBatch) -> torch.Tensor:
        rows = self.buffer.rows(batch.num_tokens_padded)
        if not self.skip_topk:
            self.selections.add_(1)
            lens = batch.context_lens()
            li.topk_indices(self.scores[batch.positions], 2, torch.zeros_like(lens), lens, out=rows)
        return rows.float() @ torch.tensor([[10.0, 0, 0], [1.0, 0, 0]])

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return (hidden[:, :1] == torch.arange(100)).float()


@pytest.mark.parametrize("shares, drafts", [(True, [56, 56, 56]), (False, [56, 67, 78])])
def test_draft_selects_for_itself_although_the_target_left_its_rows(
    shares: bool, drafts: list[int]
) -> None:
    # ROCm/ATOM#1362: the share flag made the draft layer reuse the target's [0, 1].
    config = toy_config(3)
    draft = RowReader(config)
    draft.buffer.indices.copy_(torch.tensor([0, 1]).expand_as(draft.buffer.indices))
    speculator = li.MTPSpeculator(
        draft, config, draft_config={"index_share_for_mtp_iteration": shares}
    )
    assert speculator.propose(*simple_round(toy_block_table(config), [8])).tolist() == [drafts]


@pytest.mark.parametrize("mode", ["plain", "recorded", "eager", "aot_eager"])
def test_round_of_three_drafts_selects_once_in_every_mode(mode: str) -> None:
    # ROCm/ATOM#2008: a flag frozen at the first trace, so that every step selected.
    config = toy_config(3, padded=mode == "recorded")
    draft = RowReader(config)
    speculator = li.MTPSpeculator(
        draft, config, runner=li.RecordedRunner() if mode == "recorded" else None
    )
    if mode == "recorded":
        speculator.capture()
    elif mode != "plain":
        torch._dynamo.reset()
        draft.forward = torch.compile(draft.forward, backend=mode, fullgraph=True)
    table = toy_block_table(config)
    for lengths, drafts in (([8], [56]), ([8, 4], [56, 12]), ([4], [12])):
        before = int(draft.selections)
        got = speculator.propose(*simple_round(table, lengths))
        assert int(draft.selections) - before == 1
        assert got.tolist() == [[token] * 3 for token in drafts]


def test_draft_without_a_buffer_is_not_said_to_share() -> None:
    # ROCm/ATOM#2008: the callables were there, on a wrapper that has no buffer.
    draft = toy_draft(toy_config(3))
    draft.topk_buffers = []
    with pytest.raises(li.IndexSharingError, match="a buffer in topk_buffers"):
        li.check_index_sharing(draft, hidden_size=3, index_topk=4)


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_request_from_another_machine_brings_keys_and_selects_for_itself(
    order: tuple[int, int], recorded: bool
) -> None:
    # sgl-project/sglang#30839: one request with a valid selection, one that arrived without any.
    config = toy_config(3, padded=recorded)
    runners = [li.RecordedRunner() if recorded else None for _ in range(2)]
    there, here = (li.MTPSpeculator(toy_draft(config), config, runner=runner) for runner in runners)
    if recorded:
        there.capture()
        here.capture()
    afar, table = toy_block_table(config), toy_block_table(config)
    simple_round(table, [1, 1])  # allocates
    prompt = [i % VOCAB for i in range(5)]
    there.propose(*simple_round(afar, [5]))
    here.propose(*simple_round(table, [5]))
    places, owner = torch.arange(5), torch.ones(5, dtype=torch.int32)
    for name in ("cache", "index_k"):
        moved = getattr(there.model, name).keys[afar.slots(places, owner * 0)]
        getattr(here.model, name).keys[table.slots(places, owner)] = moved

    chunks = [[2, 0], [1]]
    expected = []
    for request in range(2):
        pages = table.table[request].tolist()
        oracle = DraftOracle(pages, config.page_size, config.max_model_len, shares=True)
        oracle.propose(0, prompt, 0, 1, 3)
        expected.append(oracle.propose(5, chunks[request], 0, 1, 3))
    batch = target_rows(table, [li.RequestRows(r, 5, chunks[r]) for r in order])
    zeros = torch.zeros(2, dtype=torch.int64)
    computed, reused = here.stats.rows_computed, here.stats.rows_reused
    assert here.propose(batch, zeros, zeros + 1).tolist() == [expected[r] for r in order]
    assert here.stats.rows_computed - computed == 3  # every row of step 0, the newcomer's too
    assert here.stats.rows_reused - reused == 4


@pytest.mark.parametrize("mode", ["eager", "steps", "fused"])
@pytest.mark.parametrize("first", [0, 1])
def test_request_whose_first_round_left_no_selection_selects_in_the_next(
    first: int, mode: str
) -> None:
    # sgl-project/sglang#30839: no round but one of K > 1 leaves a selection of one row a request.
    config = toy_config(4, padded=mode != "eager", fused_steps=(4,) if mode == "fused" else ())
    runner = None if mode == "eager" else li.RecordedRunner()
    speculator = li.MTPSpeculator(toy_draft(config), config, runner=runner)
    if mode != "eager":
        speculator.capture()
    table = toy_block_table(config)
    lengths, zeros = [5, 2], torch.zeros(2, dtype=torch.int64)
    oracles = [
        DraftOracle(pages, config.page_size, config.max_model_len, shares=True)
        for pages in (simple_round(table, lengths), table.table[:2].tolist())[1]
    ]
    for steps, start, tokens in ((first, 0, [0, 1, 2, 0, 1]), (4, 5, [1]), (first, 6, [2])):
        rows = [
            li.RequestRows(0, start, tokens),
            # the other one's prefix came from elsewhere: a row a round from the start
            li.RequestRows(1, {0: 0, 5: 1, 6: 2}[start], [tokens[0]]),
        ]
        got = speculator.propose(
            target_rows(table, rows), zeros, zeros + 1, num_speculative_steps=steps
        )
        expected = [
            oracle.propose(row.start, row.token_ids, 0, 1, steps)
            for oracle, row in zip(oracles, rows, strict=True)
        ]
        assert got[:, :steps].tolist() == expected
    assert speculator.stats.rows_compacted == 2


@pytest.mark.parametrize("recorded", [False, True])
def test_metadata_of_more_capacity_than_the_round_has_requests(recorded: bool) -> None:
    # vllm-project/vllm#39542: arrays of capacity 8, of which a batch of 3 used the first three.
    config = toy_config(3, padded=recorded)
    speculator = li.MTPSpeculator(
        toy_draft(config), config, runner=li.RecordedRunner() if recorded else None
    )
    if recorded:
        speculator.capture()
    table = toy_block_table(config)
    target, rejected, tokens = simple_round(table, [2, 1, 1])

    def roomy(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, torch.full((8 - 3, *x.shape[1:]), MARKER, dtype=x.dtype)])

    fields = ("query_start_loc", "seq_lens", "block_table")
    target = replace(target, **{name: roomy(getattr(target, name)) for name in fields})
    got = speculator.propose(target, rejected, tokens)
    assert torch.equal(got, simple_drafts(table, [2, 1, 1], 3, shares=True))


def test_more_rows_than_owners_are_refused_by_size() -> None:
    # sgl-project/sglang#33197: indices padded to 8 rows beside offsets of 2.
    indices = torch.zeros((8, 4), dtype=torch.int32)
    owners, table = torch.zeros(2, dtype=torch.int32), torch.zeros((2, 1), dtype=torch.int32)
    with pytest.raises(ValueError, match=r"row_to_request must have shape \[8\], got \[2\]"):
        li.indices_to_slots(indices, table, owners, PAGE)


def test_lengths_of_requests_and_of_rows_say_the_same() -> None:
    # vllm-project/vllm#38865: the offset of a draft row, applied to lengths that contain it.
    g = torch.Generator().manual_seed(0)
    q, cache = torch.randn(2, 3, 2, 8, generator=g), torch.randn(6, PAGE, 8, generator=g)
    weights, table = torch.rand(6, 2, generator=g), torch.arange(6).view(2, 3).int()
    scores = [
        li.paged_mqa_logits(
            q, cache, weights, torch.tensor(lens).int(), table, max_context_len=12, page_size=PAGE
        )
        for lens in ([7, 9], [[5, 6, 7], [7, 8, 9]])
    ]
    assert torch.equal(*scores)
    assert torch.isfinite(scores[0]).sum(1).tolist() == [5, 6, 7, 7, 8, 9]


def test_lengths_for_another_number_of_rows_are_refused_by_size() -> None:
    # NVIDIA/TensorRT-LLM#17247: lengths of no drafts, 4 rows a request.
    q, cache, weights = torch.ones(32, 4, 2, 8), torch.ones(1, PAGE, 8), torch.ones(128, 2)
    lens, table = torch.ones((32, 1), dtype=torch.int32), torch.zeros((32, 1), dtype=torch.int32)
    for op in (li.paged_mqa_logits, partial(li.paged_select_topk, topk=2)):
        with pytest.raises(ValueError, match=r"next_n\] = \[32, 4\], got \[32, 1\]"):
            op(q, cache, weights, lens, table, max_context_len=4, page_size=PAGE)


@pytest.mark.parametrize("counts", [[2, 1], [2, 1, 1], [2, 1, 1, 2, 1, 1], [2, 0, 3]])
def test_unequal_numbers_of_rows_are_neither_padded_nor_mixed(counts: list[int]) -> None:
    # vllm-project/vllm#32175 (rows padded to [2, 2] clobbered those behind them), #39542 (arrays
    # of more capacity than requests), #52500 (8 rows of 6 requests taken for uniform), #25869
    # (starts and lengths confused; a request of no rows).
    g = torch.Generator().manual_seed(0)
    table = li.BlockTable(8, 12, num_pages=24, page_size=PAGE)
    for request in range(8):
        table.allocate(request, 12)
    cache = torch.randn(24, PAGE, 8, generator=g)
    rows = [li.RequestRows(r, 3 + r, [0] * n) for r, n in enumerate(counts)]
    batch = li.target_batch(rows, table.table, PAGE)
    total = sum(counts)
    q, weights = torch.randn(total, 1, 2, 8, generator=g), torch.rand(total, 2, generator=g)
    assert batch.row_to_request.bincount(minlength=len(counts)).tolist() == counts
    lens, owners = (torch.full((16,), 2**30, dtype=torch.int32) for _ in range(2))
    lens[:total], owners[:total] = batch.context_lens(), batch.row_to_request
    buffer = torch.full((16, 3), MARKER, dtype=torch.int32)

    def select(rows: slice, **options) -> torch.Tensor:
        args = (q[rows], cache, weights[rows], lens[rows], table.table, 3)
        paging = {"row_to_request": owners[rows], "max_context_len": 12, "page_size": PAGE}
        return li.paged_select_topk(*args, **paging, **options)

    select(slice(0, total), out=buffer[:total])
    starts = batch.query_start_loc.tolist()
    alone = [select(slice(*ends)) for ends in pairwise(starts)]
    assert [len(x) for x in alone] == counts
    assert torch.equal(buffer[:total], torch.cat(alone))
    assert (buffer[:total] < lens[:total, None]).all()
    assert (buffer[total:] == MARKER).all()


def test_callables_that_reach_no_indexer_are_not_taken_for_sharing() -> None:
    # ROCm/ATOM#2008: the hooks of the outer model found no layer, and every step recomputed.
    class Wrapper(nn.Module):
        config: ClassVar = {"index_share_for_mtp_iteration": True}
        set_skip_topk = indexer_sharing.set_skip_topk
        compact_topk_indices = indexer_sharing.compact_topk_indices
        topk_buffers = property(indexer_sharing.topk_buffers_of)

    with pytest.warns(RuntimeWarning, match="Wrapper lacks a buffer in topk_buffers"):
        speculator = li.MTPSpeculator(Wrapper(), toy_config(3))
    assert not speculator.share_mtp_topk_indices
