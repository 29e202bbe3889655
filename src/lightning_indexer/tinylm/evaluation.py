"""How often the target accepts the draft's tokens on text that training never saw."""

from __future__ import annotations

import torch

from .corpus import Corpus, windows
from .demo import Job, ModeResult, run_mode
from .model import TinyLM


def draft_held_out(
    lm: TinyLM,
    corpus: Corpus,
    *,
    share: bool,
    num_speculative_steps: int = 3,
    num_prompts: int = 32,
    new_tokens: int = 16,
) -> ModeResult:
    """Continues evenly spaced held-out prompts with speculative decoding.

    The defaults are many prompts and few tokens each: left alone for longer, a model this small
    repeats itself, and what repeats is always accepted.

    Args:
        lm: trained weights.
        corpus: prompts are of its held-out text.
        share: whether draft steps after the first reuse its selection.
        num_speculative_steps: K.
        num_prompts: prompts, run as one batch.
        new_tokens: generated for each; the prompts take half of what is left of the context.

    Returns:
        The tokens and counters; `accepted / drafted` is the acceptance.
    """
    length = (lm.config.max_model_len - new_tokens) // 2
    last = len(corpus.held_out) - length
    prompts = windows(corpus.held_out, torch.arange(num_prompts) * last // num_prompts, length)
    job = Job(
        prompts=[bytes(prompt) for prompt in prompts.tolist()],
        max_new_tokens=new_tokens,
        draft_tokens=num_speculative_steps,
    )
    return run_mode(lm, "shared" if share else "fresh", job)
