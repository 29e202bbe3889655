"""How often the target accepts the draft's tokens on text that training never saw."""

from __future__ import annotations

import torch

from ..indexer.block_table import BlockTable
from ..speculator.config import SpeculatorConfig
from ..speculator.generate import GenerationResult, generate
from ..speculator.mtp import MTPSpeculator
from .corpus import Corpus, windows
from .model import TinyLM
from .runtime import build

PAGE_SIZE = 64


def draft_held_out(
    lm: TinyLM,
    corpus: Corpus,
    *,
    share: bool,
    num_speculative_steps: int = 3,
    num_prompts: int = 32,
    new_tokens: int = 16,
) -> GenerationResult:
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
    config = lm.config
    length = (config.max_model_len - new_tokens) // 2
    last = len(corpus.held_out) - length
    prompts = windows(corpus.held_out, torch.arange(num_prompts) * last // num_prompts, length)
    pages = num_prompts * -(-config.max_model_len // PAGE_SIZE)
    rows = max(num_prompts * length, num_prompts * (num_speculative_steps + 1))
    target, draft = build(lm, num_pages=pages, max_num_tokens=rows, page_size=PAGE_SIZE)
    speculator = MTPSpeculator(
        draft,
        SpeculatorConfig(
            num_speculative_steps=num_speculative_steps,
            max_num_reqs=num_prompts,
            max_num_tokens=rows,
            max_model_len=config.max_model_len,
            hidden_size=config.hidden_size,
            page_size=PAGE_SIZE,
        ),
        draft_config={"index_share_for_mtp_iteration": share},
    )
    table = BlockTable(num_prompts, config.max_model_len, num_pages=pages, page_size=PAGE_SIZE)
    return generate(
        target,
        prompts.tolist(),
        new_tokens,
        block_table=table,
        speculator=speculator,
        max_num_batched_tokens=rows,
    )
