"""Greedy verification: a draft token is accepted iff the target would have chosen it."""

from __future__ import annotations

import torch


def verify_greedy(
    target_tokens: torch.Tensor, draft_tokens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accepts the longest prefix of drafts that equals the target's own choices.

        accepted[r] = max{a : draft[r, j] = target[r, j] for all j < a}
        next[r] = target[r, accepted[r]]

    Args:
        target_tokens: [R, K+1] int64, the target's choice after the last known token and after
            each draft; entries after a draft of −1 are ignored.
        draft_tokens: [R, K] int64, −1 where nothing was drafted.

    Returns:
        accepted [R] int64 and next [R] int64: the target's correction, or its bonus token when
        every draft was accepted.
    """
    drafts = draft_tokens.shape[1]
    matches = (draft_tokens == target_tokens[:, :drafts]) & (draft_tokens >= 0)
    accepted = matches.to(torch.int64).cumprod(dim=1).sum(dim=1)
    return accepted, target_tokens.gather(1, accepted.unsqueeze(1)).squeeze(1)
