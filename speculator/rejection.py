"""Lossless verification of sampled drafts."""

from __future__ import annotations

import torch

from ..kernels.checks import check_tensor
from .sampling import Purpose, SamplingParams, draw_tokens, token_probabilities, uniform_at


@torch.no_grad()
def rejection_sample(
    target_logits: torch.Tensor,
    draft_tokens: torch.Tensor,
    draft_probs: torch.Tensor | None,
    params: SamplingParams,
    positions: torch.Tensor,
    *,
    prompt_tokens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accepts drafts such that every emitted token is distributed as the target samples it.

        accept x = draft[r, j]  iff  u · q[r, j, x] < p[r, j, x],  u uniform, p the target's
        next ~ max(p − q, 0) / Σ max(p − q, 0)  at the first rejected draft
        next ~ p  after the last draft (the bonus token)

    The u of a draft and of `next` are `uniform_at` of the seed and of the place of that token, so
    that replaying a request from its seed repeats its tokens, whatever else is in the batch.
    Temperature 0 gives what `verify_greedy` gives.

    Args:
        target_logits: [R, K+1, V], the target's after the last known token and after each draft;
            those after the end of the drafts are ignored.
        draft_tokens: [R, K] int64, −1 (or any id outside the vocabulary) from the end of the
            request's drafts on.
        draft_probs: [R, K, V] float64, q: what each draft was drawn from; None if drafts were
            chosen without chance, so that q is 1 there.
        params: how the requests sample.
        positions: [R] int64: place in its sequence of the first token to be decided.
        prompt_tokens: [R] int64, or None: −1 for a request that samples; in chunked prefill the
            prompt's next token, which is returned as `next`, and no draft is accepted.

    Returns:
        accepted [R] int64 and next [R] int64. Rejected are
        `(draft_tokens >= 0).sum(1) - accepted`, without a synchronisation.

    Raises:
        ValueError: on mismatching shapes.

    Guarantees: no synchronisation; shapes follow from shapes, so that a graph can hold it.

    Source: Leviathan, Kalman, Matias: Fast inference from transformers via speculative decoding,
    ICML 2023; Chen et al.: Accelerating large language model decoding with speculative sampling,
    2023.
    """
    reqs, rows, vocab = check_tensor("target_logits", target_logits, shape=(None,) * 3).shape
    drafts = rows - 1
    check_tensor("draft_tokens", draft_tokens, shape=(reqs, drafts))
    if draft_probs is not None:
        check_tensor("draft_probs", draft_probs, shape=(reqs, drafts, vocab))
    check_tensor("params.seed", params.seed, shape=(reqs,))
    check_tensor("positions", positions, shape=(reqs,))
    p = token_probabilities(target_logits.flatten(0, 1), params.repeat_each(rows))
    p = p.reshape(reqs, rows, vocab)
    is_draft = ((draft_tokens >= 0) & (draft_tokens < vocab)).cumprod(1) > 0
    tokens = torch.where(is_draft, draft_tokens, 0)
    places = positions.unsqueeze(1) + torch.arange(drafts, device=positions.device)
    u = uniform_at(params.seed.unsqueeze(1), places, Purpose.ACCEPT)
    if draft_probs is not None:
        u = u * _of_tokens(draft_probs, tokens)
    accepted = (is_draft & (u < _of_tokens(p[:, :drafts], tokens))).cumprod(1).sum(1)
    if prompt_tokens is not None:
        accepted = torch.where(prompt_tokens >= 0, 0, accepted)

    request = torch.arange(reqs, device=accepted.device)
    probs = p[request, accepted]
    if drafts > 0:
        at = accepted.clamp_max(drafts - 1)
        if draft_probs is not None:
            q = draft_probs[request, at]
        else:
            vocabulary = torch.arange(vocab, device=accepted.device)
            q = (vocabulary == tokens[request, at].unsqueeze(1)).to(p.dtype)
        residual = (probs - q).clamp_min(0)
        rejected = (accepted < is_draft.sum(1)) & (residual > 0).any(1)
        probs = torch.where(rejected.unsqueeze(1), residual, probs)
    next_tokens = draw_tokens(probs, uniform_at(params.seed, positions + accepted, Purpose.TARGET))
    if prompt_tokens is not None:
        next_tokens = torch.where(prompt_tokens >= 0, prompt_tokens, next_tokens)
    return accepted, next_tokens


def _of_tokens(probs: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """probs[r, j, tokens[r, j]]."""
    return probs.gather(2, tokens.unsqueeze(2)).squeeze(2)
