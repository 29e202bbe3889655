"""Greedy verification: a draft token is accepted iff the target would have chosen it."""

from __future__ import annotations

import torch


def verify_greedy(
    target_tokens: torch.Tensor,
    draft_tokens: torch.Tensor,
    *,
    prompt_tokens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accepts the longest prefix of drafts that equals the target's own choices.

        accepted[r] = max{a : draft[r, j] = target[r, j] for all j < a}
        next[r] = target[r, accepted[r]]

    Args:
        target_tokens: [R, K+1] int64, the target's choice after the last known token and after
            each draft; entries after a draft of −1 are ignored.
        draft_tokens: [R, K] int64, −1 where nothing was drafted.
        prompt_tokens: [R] int64, or None: −1 for a request that samples; in chunked prefill the
            prompt's next token, which is returned as `next`, and no draft is accepted.

    Returns:
        accepted [R] int64 and next [R] int64: the target's correction, or its bonus token when
        every draft was accepted.
    """
    drafts = draft_tokens.shape[1]
    matches = (draft_tokens == target_tokens[:, :drafts]) & (draft_tokens >= 0)
    accepted = matches.to(torch.int64).cumprod(dim=1).sum(dim=1)
    next_tokens = target_tokens.gather(1, accepted.unsqueeze(1)).squeeze(1)
    if prompt_tokens is None:
        return accepted, next_tokens
    samples = prompt_tokens < 0
    return torch.where(samples, accepted, 0), torch.where(samples, next_tokens, prompt_tokens)
