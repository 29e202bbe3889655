"""Builds the batches of rows for one forward. Nothing else in the package does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from ..indexer.block_table import positions_to_slots
from .step_batch import RequestRows, StepBatch


def target_batch(
    requests: Sequence[RequestRows], block_table: torch.Tensor, page_size: int
) -> StepBatch:
    """The batch of a target forward over `requests`, in order; `hidden` is empty."""
    device = block_table.device
    counts = [len(r.token_ids) for r in requests]
    ids = [token for r in requests for token in r.token_ids]
    places = [r.start + i for r, n in zip(requests, counts, strict=True) for i in range(n)]
    owner = [b for b, n in enumerate(counts) for _ in range(n)]
    positions = torch.tensor(places, dtype=torch.int64, device=device)
    row_to_request = torch.tensor(owner, dtype=torch.int32, device=device)
    starts = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    lens = [r.start + n for r, n in zip(requests, counts, strict=True)]
    owners = torch.tensor([r.request for r in requests], dtype=torch.int64, device=device)
    table = block_table[owners]
    return StepBatch(
        input_ids=torch.tensor(ids, dtype=torch.int64, device=device),
        positions=positions,
        hidden=torch.empty((len(ids), 0), device=device),
        query_start_loc=starts.to(device),
        seq_lens=torch.tensor(lens, dtype=torch.int32, device=device),
        block_table=table,
        slot_mapping=positions_to_slots(positions, table, row_to_request, page_size),
        row_to_request=row_to_request,
        num_reqs=len(requests),
        num_tokens=len(ids),
        num_tokens_padded=len(ids),
        page_size=page_size,
    )


def with_hidden(batch: StepBatch, hidden: torch.Tensor) -> StepBatch:
    """`batch` carrying the hidden states that the target gave for its rows."""
    return replace(batch, hidden=hidden)


class DraftBatches:
    """Builds a speculator's batches in tensors of fixed address, so that graphs may hold them.

    A round is `prefill`, then `decode(1)`, `decode(2)`, …; each batch is a view that the next one
    overwrites. Nothing here synchronises.
    """

    def __init__(
        self,
        *,
        max_num_reqs: int,
        max_num_tokens: int,
        max_model_len: int,
        page_size: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device | str | None,
    ) -> None:
        rows, reqs = max(max_num_tokens, max_num_reqs), max_num_reqs
        pages = -(-max_model_len // page_size)

        def ints(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.max_model_len, self.page_size = max_model_len, page_size
        self._input_ids = ints(rows + 1, dtype=torch.int64)  # the last one is never a row
        self._positions = ints(rows, dtype=torch.int64)
        self._hidden = torch.zeros((rows, hidden_size), dtype=dtype, device=device)
        self._query_start_loc = ints(reqs + 1)
        self._seq_lens = ints(reqs)
        self._block_table = ints(reqs, pages)
        self._slot_mapping = ints(rows, dtype=torch.int64)
        self._row_to_request = ints(rows)
        self._arange = torch.arange(rows + 1, dtype=torch.int32, device=device)
        #: [max_num_reqs] row of each request's last unrejected token; 0 for padding.
        self.last_token_indices = ints(reqs, dtype=torch.int64)
        #: [max_num_reqs] its position; padding is 0.
        self.last_positions = ints(reqs, dtype=torch.int64)
        # [max_num_reqs] tokens up to it; 0 for padding and dummies
        self._last_lens = ints(reqs)
        # [max_num_reqs] rows from this position on draft nothing
        self._draft_ends = ints(reqs, dtype=torch.int64)

    def prefill(
        self,
        target: StepBatch,
        num_rejected: torch.Tensor,
        next_tokens: torch.Tensor,
        *,
        num_tokens_padded: int,
        num_reqs_padded: int,
        caps: torch.Tensor | None = None,
    ) -> StepBatch:
        """Step 0: the target's rows, ids shifted left by one, next tokens at the last rows.

        Args:
            target: the batch that the target just ran, its hidden states included.
            num_rejected: [num_reqs] rows at each request's end that verification rejected.
            next_tokens: [num_reqs] the sampled token, or the prompt's next in chunked prefill.
            num_tokens_padded: rows of the batch.
            num_reqs_padded: requests of the batch.
            caps: [num_reqs] most tokens to draft for each request; None is no cap.
        """
        reqs, tokens = target.num_reqs, target.num_tokens
        copied = min(target.num_tokens_padded, num_tokens_padded)
        self._hidden[:copied] = target.hidden[:copied]
        self._hidden[copied:num_tokens_padded].zero_()
        first, end = target.query_start_loc[:reqs], target.query_start_loc[1 : reqs + 1]
        last = end.to(torch.int64) - num_rejected - 1
        kept = (last >= first) & (last < end)  # a request that keeps no row of its own is a dummy
        last = torch.where(kept, last, 0)
        _fill(self.last_token_indices, last, 0)
        _fill(self._input_ids[:num_tokens_padded], target.input_ids[1:tokens], 0)
        self._input_ids[torch.where(kept, last, -1)] = next_tokens.to(torch.int64)
        _fill(self._positions[:num_tokens_padded], target.positions[:tokens], 0)
        _fill(self._slot_mapping[:num_tokens_padded], target.slot_mapping[:tokens], -1)
        _fill(self._row_to_request[:num_tokens_padded], target.row_to_request[:tokens], -1)
        _fill(self._query_start_loc, target.query_start_loc[: reqs + 1], tokens)
        _fill(self._seq_lens, target.seq_lens[:reqs], 0)
        self._block_table.fill_(-1)
        width = min(target.block_table.shape[1], self._block_table.shape[1])
        self._block_table[:reqs, :width] = target.block_table[:reqs, :width]
        _fill(self.last_positions, self._positions[last], 0)
        lens = target.seq_lens[:reqs] - num_rejected.to(torch.int32)
        _fill(self._last_lens, torch.where(kept & (self._slot_mapping[last] >= 0), lens, 0), 0)
        self._draft_ends.fill_(self.max_model_len)
        if caps is not None:
            ends = self.last_positions[:reqs] + caps.clamp_max(self.max_model_len)
            self._draft_ends[:reqs] = ends.clamp_max(self.max_model_len)
        return self._view(reqs, tokens, num_tokens_padded, num_reqs_padded)

    def decode(
        self,
        step: int,
        input_ids: torch.Tensor,
        hidden: torch.Tensor,
        *,
        num_reqs: int,
        num_reqs_padded: int,
    ) -> StepBatch:
        """Step s ≥ 1: one row a request, s positions after its last token.

        All of it is device work on tensors of fixed address, which a graph may hold; with
        num_reqs = num_reqs_padded it depends on no number but s and the padded size.

        Padded rows, dummies and rows past max_model_len or their request's cap get slot −1 and
        length 0.

        Args:
            step: s.
            input_ids: [≥ num_reqs] the tokens drafted by the step before.
            hidden: [≥ num_reqs, hidden_size] its feedback hidden states.
            num_reqs: live requests.
            num_reqs_padded: rows of the batch.
        """
        rows = num_reqs_padded
        positions = self.last_positions[:rows] + step
        live = self.drafted(step)[:rows] & (self._arange[:rows] < num_reqs)
        self._positions[:rows] = positions.clamp_max(self.max_model_len - 1)
        lens = (self._last_lens[:rows] + step).clamp_max(self.max_model_len)
        self._seq_lens[:rows] = torch.where(live, lens, 0)
        _fill(self._input_ids[:rows], input_ids[:num_reqs], 0)
        self._hidden[:num_reqs] = hidden[:num_reqs]
        self._row_to_request[:rows] = self._arange[:rows]
        self._query_start_loc[: rows + 1] = self._arange[: rows + 1]
        slots = positions_to_slots(
            self._positions[:rows],
            self._block_table,
            self._row_to_request[:rows],
            self.page_size,
        )
        self._slot_mapping[:rows] = torch.where(live, slots, -1)
        return self._view(num_reqs, num_reqs, rows, rows)

    def dummy(self, num_rows: int, num_reqs: int) -> StepBatch:
        """A batch for capture: every slot is −1 and every length 0, so no live cache changes."""
        self.last_token_indices.zero_()
        self.last_positions.zero_()
        self._last_lens.zero_()
        self._input_ids.zero_()
        self._positions.zero_()
        self._hidden.zero_()
        self._seq_lens.zero_()
        self._slot_mapping.fill_(-1)
        self._block_table.fill_(-1)
        self._row_to_request.fill_(-1)
        self._query_start_loc[: num_reqs + 1] = self._arange[: num_reqs + 1].clamp_max(num_rows)
        return self._view(num_reqs, num_rows, num_rows, num_reqs)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Every tensor that batches are views of, or made from."""
        return tuple(value for value in vars(self).values() if isinstance(value, torch.Tensor))

    def drafted(self, step: int) -> torch.Tensor:
        """[max_num_reqs] bool: whether step s drafts a token for the request."""
        return (self._last_lens > 0) & (self.last_positions + step < self._draft_ends)

    def _view(self, reqs: int, tokens: int, tokens_padded: int, reqs_padded: int) -> StepBatch:
        return StepBatch(
            input_ids=self._input_ids[:tokens_padded],
            positions=self._positions[:tokens_padded],
            hidden=self._hidden[:tokens_padded],
            query_start_loc=self._query_start_loc[: reqs_padded + 1],
            seq_lens=self._seq_lens[:reqs_padded],
            block_table=self._block_table[:reqs_padded],
            slot_mapping=self._slot_mapping[:tokens_padded],
            row_to_request=self._row_to_request[:tokens_padded],
            num_reqs=reqs,
            num_tokens=tokens,
            num_tokens_padded=tokens_padded,
            page_size=self.page_size,
        )


def _fill(out: torch.Tensor, values: torch.Tensor, padding: int) -> None:
    """out ← values, then `padding`."""
    out[: values.shape[0]] = values
    out[values.shape[0] :] = padding
