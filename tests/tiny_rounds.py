"""Rounds of the demo's (untrained) draft layer in float64, for what a toy cannot show."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import lightning_indexer as li
from lightning_indexer.tinylm.model import random_model
from lightning_indexer.tinylm.runtime import TinyDraft, build

PAGE, MAX_LEN, REQUESTS, PAGES = 8, 40, 3, 15
TOPK = 4  # of `random_model`


def tiny_draft(seed: int = 0, *, append_columns: int = 0) -> TinyDraft:
    _, draft = build(
        random_model(seed),
        num_pages=PAGES,
        page_size=PAGE,
        max_num_tokens=REQUESTS * 16,
        dtype=torch.float64,
        index_k_dtype=torch.float32,
        append_columns=append_columns,
    )
    return draft


def tiny_speculator(
    draft: Any, steps: int, *, shares: bool = True, recorded: bool = False, **options: Any
) -> li.MTPSpeculator:
    """Over `tiny_table`; captured, with fused rounds of K = steps, if recorded."""
    config = li.SpeculatorConfig(
        num_speculative_steps=steps,
        max_num_reqs=REQUESTS,
        max_num_tokens=REQUESTS * 16,
        max_model_len=MAX_LEN,
        hidden_size=draft.config.hidden_size,
        page_size=PAGE,
        prefill_sizes=(8, REQUESTS * 16) if recorded else (),
        decode_sizes=(1, REQUESTS) if recorded else (),
        fused_steps=(steps,) if recorded and steps > 1 else (),
        dtype=torch.float64,
    )
    speculator = li.MTPSpeculator(
        draft,
        config,
        draft_config={"index_share_for_mtp_iteration": shares},
        runner=li.RecordedRunner() if recorded else None,
        **options,
    )
    if recorded:
        speculator.capture()
    return speculator


def tiny_table() -> li.BlockTable:
    table = li.BlockTable(REQUESTS, MAX_LEN, num_pages=PAGES, page_size=PAGE)
    for request in range(REQUESTS):
        table.allocate(request, MAX_LEN)
    return table


def tiny_batch(table: li.BlockTable, chunks: Sequence[tuple[int, int, int]]) -> li.StepBatch:
    """Rows (request, start, count) with tokens and hidden states of their request and position."""
    g = torch.Generator().manual_seed(0)
    tokens = torch.randint(128, (REQUESTS, MAX_LEN), generator=g)
    hidden = torch.randn(REQUESTS, MAX_LEN, 32, generator=g, dtype=torch.float64)
    rows = [li.RequestRows(r, s, tokens[r, s : s + n].tolist()) for r, s, n in chunks]
    states = torch.cat([hidden[r, s : s + n] for r, s, n in chunks])
    return li.with_hidden(li.target_batch(rows, table.table, PAGE), states)


def tiny_propose(
    speculator: li.MTPSpeculator,
    chunks: Sequence[tuple[int, int, int]],
    steps: int | None = None,
    **options: Any,
) -> torch.Tensor:
    """A round after the target has run `chunks`, none of whose rows was rejected."""
    zeros = torch.zeros(len(chunks), dtype=torch.int64)
    batch = tiny_batch(tiny_table(), chunks)
    return speculator.propose(batch, zeros, zeros + 1, num_speculative_steps=steps, **options)
