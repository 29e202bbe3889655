"""The rows of one forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class StepBatch:
    """The rows of one forward; rows [num_tokens, num_tokens_padded) are padding.

    Attributes:
        input_ids: [Tp] int64 token ids.
        positions: [Tp] int64 positions in the rows' sequences.
        hidden: [Tp, hidden_size] hidden states that a draft model takes as input, and that a
            target's batch carries as the target's output; [Tp, 0] before the target has run.
        query_start_loc: [Rp+1] int32, request r's rows are [start[r], start[r+1]).
        seq_lens: [Rp] int32, tokens a request's last row sees, itself included; 0 for padding.
        block_table: [Rp, pages] int32 page ids, −1 where none.
        slot_mapping: [Tp] int64 cache slot of each row, −1 to write none.
        row_to_request: [Tp] int32 request of each row; a padding row has −1 or a padding request.
        num_reqs: live requests.
        num_tokens: live rows.
        num_tokens_padded: Tp.
        page_size: S, tokens a page.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    hidden: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    row_to_request: torch.Tensor
    num_reqs: int
    num_tokens: int
    num_tokens_padded: int
    page_size: int

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Every tensor of the batch."""
        return tuple(value for value in vars(self).values() if isinstance(value, torch.Tensor))

    @property
    def max_context_len(self) -> int:
        """No row sees more keys: what the block table can address."""
        return self.block_table.shape[1] * self.page_size

    def context_lens(self) -> torch.Tensor:
        """[Tp] int32: keys each row sees, itself included; 0 for a row without a slot."""
        request = self.row_to_request.clamp_min(0).to(torch.int64)
        rows = torch.arange(self.num_tokens_padded, device=request.device)
        rows_after = self.query_start_loc[request + 1] - 1 - rows
        seen = (self.seq_lens[request] - rows_after).clamp_min(0)
        return torch.where(self.slot_mapping >= 0, seen, 0).to(torch.int32)


@dataclass(frozen=True)
class RequestRows:
    """Consecutive tokens of one request, to be run by the target.

    Attributes:
        request: the request's row of the block table.
        start: position of the first token.
        token_ids: the tokens.
    """

    request: int
    start: int
    token_ids: Sequence[int]
