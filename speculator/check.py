"""Proof, by running it, that a draft model shares its selection and shares the right rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..indexer.block_table import BlockTable
from ..indexer.buffer import TopkIndicesBuffer
from .batch import DraftBatches, target_batch, with_hidden
from .draft_model import DraftModel
from .sharing import SharesTopkIndices, find_sharing
from .step_batch import RequestRows, StepBatch


class IndexSharingError(AssertionError):
    """Sharing is not active, or not right; the message says why."""


@dataclass(frozen=True)
class SharingReport:
    """What was checked on a model whose sharing is right.

    Attributes:
        num_buffers: selection buffers found, written, compacted and read.
        requests: requests of the batch that was driven.
        rows_checked: token rows whose selection was looked at.
    """

    num_buffers: int
    requests: int
    rows_checked: int


@torch.no_grad()
def check_index_sharing(
    model: DraftModel,
    *,
    hidden_size: int,
    index_topk: int,
    page_size: int = 64,
    vocab_size: int = 32,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
    seed: int = 0,
) -> SharingReport:
    """Drives `model` through step 0, compaction and a skipped step of three requests.

    Checks that step 0 writes every buffer with positions its rows can see; that compaction moves
    the right rows; that a skipped step leaves every buffer's bytes and address alone; and that
    each request's output depends on its own row of every buffer, and on no other request's.

    Run it before serving: it writes to the first pages of the model's caches.

    Args:
        model: a draft with `set_skip_topk`, `compact_topk_indices` and `topk_buffers`, whose
            caches have pages for three requests of index_topk + 19 tokens, and whose buffers
            have a row for each.
        hidden_size: width of the hidden states it takes.
        index_topk: keys it selects for a row.
        page_size: tokens a page of its caches.
        vocab_size: token ids to draw from.
        dtype: of hidden states.
        device: where it runs.
        seed: of the random tokens and states.

    Raises:
        IndexSharingError: with the reason.
    """
    sharing = find_sharing(model)
    if sharing.model is None:
        raise IndexSharingError(f"{type(model).__name__} lacks {sharing.missing}")
    if not sharing.buffers:
        raise IndexSharingError(f"{type(model).__name__} has no topk_buffers to look at")
    generator = torch.Generator().manual_seed(seed)
    lengths = [index_topk + extra for extra in (7, 19, 11)]
    batches, prefill = _step_0(
        lengths, hidden_size, page_size, vocab_size, dtype, device, generator
    )
    addresses = [buffer.indices.data_ptr() for buffer in sharing.buffers]
    try:
        _check_step_0(model, sharing.model, sharing.buffers, prefill)
        _check_compaction(sharing.model, sharing.buffers, batches.last_token_indices)
        decode = batches.decode(
            1,
            torch.randint(vocab_size, (len(lengths),), generator=generator).to(device),
            torch.randn(len(lengths), hidden_size, generator=generator).to(device, dtype),
            num_reqs=len(lengths),
            num_reqs_padded=len(lengths),
        )
        _check_reuse(model, sharing.model, sharing.buffers, decode)
        moved = [
            b.indices.data_ptr() != at for b, at in zip(sharing.buffers, addresses, strict=True)
        ]
        if any(moved):
            raise IndexSharingError(f"buffer {moved.index(True)} has moved to another address")
    finally:
        sharing.model.set_skip_topk(False)
        for buffer in sharing.buffers:
            buffer.clear()
    return SharingReport(len(sharing.buffers), len(lengths), prefill.num_tokens)


def _step_0(
    lengths: Sequence[int],
    hidden_size: int,
    page_size: int,
    vocab_size: int,
    dtype: torch.dtype,
    device: torch.device | str | None,
    generator: torch.Generator,
) -> tuple[DraftBatches, StepBatch]:
    """Whole prompts as a target would have run them, turned into the draft's first batch."""
    longest = max(lengths) + 2
    pages = -(-longest // page_size)
    table = BlockTable(
        len(lengths), longest, num_pages=len(lengths) * pages, page_size=page_size, device=device
    )
    rows = []
    for request, length in enumerate(lengths):
        table.allocate(request, longest)
        ids = torch.randint(vocab_size, (length,), generator=generator).tolist()
        rows.append(RequestRows(request, 0, ids))
    target = target_batch(rows, table.table, page_size)
    hidden = torch.randn(sum(lengths), hidden_size, generator=generator).to(device, dtype)
    batches = DraftBatches(
        max_num_reqs=len(lengths),
        max_num_tokens=sum(lengths),
        max_model_len=longest,
        page_size=page_size,
        hidden_size=hidden_size,
        dtype=dtype,
        device=device,
    )
    none = torch.zeros(len(lengths), dtype=torch.int64, device=device)
    prefill = batches.prefill(
        with_hidden(target, hidden),
        num_rejected=none,
        next_tokens=none,
        num_tokens_padded=sum(lengths),
        num_reqs_padded=len(lengths),
    )
    return batches, prefill


def _check_step_0(
    model: DraftModel,
    sharing: SharesTopkIndices,
    buffers: Sequence[TopkIndicesBuffer],
    prefill: StepBatch,
) -> None:
    for buffer in buffers:
        buffer.indices.fill_(-1)
    sharing.set_skip_topk(False)
    model.forward(prefill)
    seen = prefill.context_lens().unsqueeze(1)
    for i, buffer in enumerate(buffers):
        rows = buffer.rows(prefill.num_tokens)
        if bool((rows < 0).all(dim=1).any()):
            raise IndexSharingError(f"step 0 selects nothing for some row of buffer {i}: a no-op")
        if bool((rows >= seen).any()):
            raise IndexSharingError(f"a row of buffer {i} holds a position that it cannot see")


def _check_compaction(
    sharing: SharesTopkIndices, buffers: Sequence[TopkIndicesBuffer], last: torch.Tensor
) -> None:
    before = [buffer.indices.clone() for buffer in buffers]
    sharing.compact_topk_indices(last)
    for i, (buffer, old) in enumerate(zip(buffers, before, strict=True)):
        wrong = (buffer.rows(len(last)) != old[last]).any(dim=1)
        if bool(wrong.any()):
            request = int(wrong.nonzero()[0])
            raise IndexSharingError(
                f"after compaction row {request} of buffer {i} is not that of request {request}'s"
                " last token"
            )


def _check_reuse(
    model: DraftModel,
    sharing: SharesTopkIndices,
    buffers: Sequence[TopkIndicesBuffer],
    decode: StepBatch,
) -> None:
    sharing.set_skip_topk(True)
    before = [buffer.indices.clone() for buffer in buffers]
    plain = _output(model, decode)
    for i, (buffer, old) in enumerate(zip(buffers, before, strict=True)):
        if not torch.equal(buffer.indices, old):
            raise IndexSharingError(f"a layer of buffer {i} selects although skip_topk is set")
    for i, (buffer, old) in enumerate(zip(buffers, before, strict=True)):
        for request in range(decode.num_reqs):
            # Only the position selected first: any attention over the row must notice.
            buffer.indices[request, 1:] = -1
            changed = (_output(model, decode) != plain).any(dim=1)
            buffer.indices.copy_(old)
            if not bool(changed[request]):
                raise IndexSharingError(
                    f"with skip_topk set, request {request} does not read its row of buffer {i}"
                )
            if int(changed.sum()) > 1:
                raise IndexSharingError(
                    f"with skip_topk set, row {request} of buffer {i} reaches other requests"
                )


def _output(model: DraftModel, batch: StepBatch) -> torch.Tensor:
    output = model.forward(batch)
    return (output[0] if isinstance(output, tuple) else output).clone()
