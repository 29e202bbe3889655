"""Speculative text equals plain greedy text, whatever drafts: what the selection rule buys."""

from dataclasses import dataclass, replace
from itertools import product

import pytest
import torch

from lightning_indexer import BlockTable, MTPSpeculator, RecordedRunner, SpeculatorConfig, generate
from lightning_indexer.kernels.backend import INTERPRET
from lightning_indexer.tinylm.config import MINIATURE
from lightning_indexer.tinylm.model import random_model
from lightning_indexer.tinylm.runtime import build

PAGE_SIZE = 8
NEW_TOKENS = 4 if INTERPRET else 16
PROMPTS = [[3, 1, 4, 1, 5, 0, 2, 6, 5, 3, 5], [2, 7, 1, 0, 2, 0]]
#: With few tokens to choose from, an untrained draft is right now and then.
SMALL_VOCABULARY = replace(MINIATURE, vocab_size=8)
DRAFT_TOKENS = 3
#: Sharing or not, recorded or not.
WAYS = list(product((True, False), repeat=2))[: 1 if INTERPRET else 4]
SEEDS = range(1 if INTERPRET else 20)  # the interpreter takes 0.1 s a selected row


def text(seed, dtype, prompts, speculator_of=None):
    lm = random_model(seed, SMALL_VOCABULARY)
    assert lm.config.index_topk < min(map(len, prompts)), "something must always be pruned"
    length = lm.config.max_model_len
    pages = len(prompts) * -(-length // PAGE_SIZE)
    table = BlockTable(len(prompts), length, num_pages=pages, page_size=PAGE_SIZE)
    target, draft = build(lm, num_pages=pages, max_num_tokens=64, page_size=PAGE_SIZE, dtype=dtype)
    config = SpeculatorConfig(
        num_speculative_steps=DRAFT_TOKENS,
        max_num_reqs=len(prompts),
        max_num_tokens=64,
        max_model_len=length,
        hidden_size=lm.config.hidden_size,
        page_size=PAGE_SIZE,
        prefill_sizes=(8,),
        decode_sizes=(len(prompts),),
        dtype=dtype,
    )
    return generate(
        target,
        prompts,
        NEW_TOKENS,
        block_table=table,
        speculator=speculator_of(draft, config) if speculator_of is not None else None,
        max_num_batched_tokens=64,
    ).tokens


@pytest.mark.parametrize("seed", SEEDS)
def test_shared_and_fresh_drafts_leave_the_text_unchanged(seed):
    plain = text(seed, torch.float64, PROMPTS)
    for share, recorded in WAYS:

        def mtp(draft, config, share=share, recorded=recorded):
            speculator = MTPSpeculator(
                draft,
                config,
                draft_config={"index_share_for_mtp_iteration": share},
                runner=RecordedRunner() if recorded else None,
            )
            if recorded:
                speculator.capture()
            return speculator

        assert text(seed, torch.float64, PROMPTS, mtp) == plain, f"{share=} {recorded=}"


@dataclass
class HalfRight:
    """Drafts for one request: its true continuation, each token wrong with probability 1/3."""

    config: SpeculatorConfig
    truth: list[int]
    generator: torch.Generator

    def propose(self, target, num_rejected, next_tokens):
        known = int(target.seq_lens[0] - num_rejected[0]) + 1
        right = torch.tensor(self.truth[known : known + DRAFT_TOKENS])
        wrong = torch.rand(len(right), generator=self.generator) < 1 / 3
        drafts = torch.full((1, DRAFT_TOKENS), -1)
        drafts[0, : len(right)] = (right + wrong) % 8
        return drafts


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("seed", SEEDS)
def test_partly_right_drafts_leave_the_text_unchanged(seed, dtype):
    prompt = PROMPTS[0]
    (plain,) = text(seed, dtype, [prompt])

    def half_right(draft, config):
        return HalfRight(config, prompt + plain, torch.Generator().manual_seed(seed))

    assert text(seed, dtype, [prompt], half_right) == [plain]
