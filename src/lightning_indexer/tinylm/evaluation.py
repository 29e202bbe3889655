"""How often the target accepts the draft's tokens on text that training never saw."""

from __future__ import annotations

from typing import Any

import torch

from .corpus import Corpus, windows
from .demo import Job, ModeResult, run_mode
from .model import TinyLM


def held_out_job(
    lm: TinyLM,
    corpus: Corpus,
    *,
    num_speculative_steps: int = 3,
    num_prompts: int = 32,
    new_tokens: int = 16,
    **options: Any,
) -> Job:
    """Evenly spaced held-out prompts, to be continued as one batch.

    The defaults are many prompts and few tokens each: left alone for longer, a model this small
    repeats itself, and what repeats is always accepted.

    Args:
        lm: trained weights.
        corpus: prompts are of its held-out text.
        num_speculative_steps: K.
        num_prompts: prompts.
        new_tokens: generated for each; the prompts take half of what is left of the context.
        options: of `Job`.
    """
    length = (lm.config.max_model_len - new_tokens) // 2
    last = len(corpus.held_out) - length
    prompts = windows(corpus.held_out, torch.arange(num_prompts) * last // num_prompts, length)
    return Job(
        prompts=[bytes(prompt) for prompt in prompts.tolist()],
        max_new_tokens=new_tokens,
        draft_tokens=num_speculative_steps,
        **options,
    )


def draft_held_out(lm: TinyLM, corpus: Corpus, *, share: bool, **options: Any) -> ModeResult:
    """Runs `held_out_job(lm, corpus, **options)` with speculative decoding.

    Args:
        lm: trained weights.
        corpus: prompts are of its held-out text.
        share: whether draft steps after the first reuse its selection.
        options: of `held_out_job`.

    Returns:
        The tokens and counters; `accepted / drafted` is the acceptance.
    """
    return run_mode(lm, "shared" if share else "fresh", held_out_job(lm, corpus, **options))
