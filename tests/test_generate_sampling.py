"""`generate` with sampling: the law of plain sampling, replay from seeds, greedy at 0."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from chi_square import FALSE_ALARM, counts_of, p_value
from counting import BATCHES, RERUNS, counts_examples, tallies
from lightning_indexer.speculator.generate import generate
from lightning_indexer.speculator.mtp import MTPSpeculator
from lightning_indexer.speculator.recorded import RecordedRunner
from lightning_indexer.speculator.sampling import SamplingParams
from soft_toy import SoftDraft, SoftTarget, continuation_law
from toy import VOCAB, num_slots, toy_block_table, toy_config, toy_draft

pytestmark = pytest.mark.once

PROMPT = [1, 2, 0]
SAMPLES = 4000


def _generate(
    prompts,
    new_tokens,
    sampling,
    *,
    steps=None,
    kind=MTPSpeculator,
    budget=None,
    recorded=False,
    vocab_size=VOCAB,
):
    """With `steps` drafts a round, or without a speculator."""
    reqs = max(len(prompts), 4)
    config = toy_config(
        steps or 0, padded=recorded, max_num_reqs=reqs, max_num_tokens=8 * reqs,
        vocab_size=vocab_size,
    )  # fmt: skip
    speculator = None
    if steps is not None:
        runner = RecordedRunner() if recorded else None
        speculator = kind(toy_draft(config, SoftDraft), config, runner=runner)
        if recorded:
            speculator.capture()
    return generate(
        SoftTarget(num_slots(config)),
        prompts,
        new_tokens,
        block_table=toy_block_table(config),
        speculator=speculator,
        sampling=sampling,
        max_num_batched_tokens=budget or 8 * reqs,
    )


def _agreement(sampling, **options) -> float:
    """The p-value of three new tokens after PROMPT under the law of plain sampling."""
    result = _generate([PROMPT] * SAMPLES, 3, sampling, **options)
    tokens = torch.tensor(result.tokens)
    chances = continuation_law(PROMPT, 3, sampling.rows(slice(1)))
    counts = counts_of((tokens[:, 0] * VOCAB + tokens[:, 1]) * VOCAB + tokens[:, 2], VOCAB**3)
    assert (counts[chances == 0] == 0).all()
    return p_value(counts[chances > 0], chances[chances > 0])


@pytest.mark.parametrize("options", [{}, {"steps": 2}, {"steps": 2, "vocab_size": None}])
def test_texts_follow_the_law_of_plain_sampling(options):
    sampling = SamplingParams.of(range(SAMPLES), temperature=0.7)
    assert _agreement(sampling, **options) > FALSE_ALARM


def test_top_p_texts_follow_the_law_of_plain_sampling():
    sampling = SamplingParams.of(range(SAMPLES), top_p=0.7)
    assert _agreement(sampling, steps=2) > FALSE_ALARM


class _ForgetsProbabilities(MTPSpeculator):
    @property
    def draft_probs(self):
        """Those of other requests' drafts."""
        return super().draft_probs.roll(1, 0)


def test_probabilities_of_other_requests_are_noticed():
    sampling = SamplingParams.of(range(SAMPLES), temperature=0.4)
    assert _agreement(sampling, steps=2) > FALSE_ALARM
    assert _agreement(sampling, steps=2, kind=_ForgetsProbabilities) < FALSE_ALARM


cases = {
    "steps": st.sampled_from([None, 0, 1, 3]),
    "prompts": st.lists(
        st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=7), min_size=1, max_size=4
    ),
    "new_tokens": st.integers(1, 6),
    "tight": st.booleans(),  # prompts come in small chunks
    "recorded": st.booleans(),
    "seed": st.integers(-(2**63), 2**63 - 9),
}


def _options(steps, prompts, tight, recorded):
    budget = len(prompts) * ((steps or 0) + 1) if tight else None
    return {"steps": steps, "budget": budget, "recorded": recorded}


@given(**cases)
@counts_examples("generate")
@tallies(RERUNS, "generate")
def test_texts_come_again_from_their_seeds(steps, prompts, new_tokens, tight, recorded, seed):
    sampling = SamplingParams.of(range(seed, seed + len(prompts)))
    options = _options(steps, prompts, tight, recorded)
    first = _generate(prompts, new_tokens, sampling, **options)
    assert _generate(prompts, new_tokens, sampling, **options).tokens == first.tokens
    eager = _generate(prompts, new_tokens, sampling, **options | {"recorded": False})
    assert eager.tokens == first.tokens


@given(**cases)
@counts_examples("generate")
def test_temperature_zero_is_greedy_text(steps, prompts, new_tokens, tight, recorded, seed):
    sampling = SamplingParams.of(range(seed, seed + len(prompts)), temperature=0)
    got = _generate(prompts, new_tokens, sampling, **_options(steps, prompts, tight, recorded))
    assert got.tokens == _generate(prompts, new_tokens, None).tokens


@given(**cases)
@counts_examples("generate")
@tallies(BATCHES, "generate")
def test_prompt_samples_alone_what_it_samples_among_others(
    steps, prompts, new_tokens, tight, recorded, seed
):
    # without a draft: the toy's drafts hash their pages, and a draft's tokens move the target's
    sampling = SamplingParams.of(range(seed, seed + len(prompts)))
    budget = len(prompts) if tight else None
    together = _generate(prompts, new_tokens, sampling, budget=budget).tokens
    for r, prompt in enumerate(prompts):
        row = sampling.rows(slice(r, r + 1))
        assert _generate([prompt], new_tokens, row).tokens == [together[r]]


def test_greedy_and_sampled_prompts_mix():
    sampling = SamplingParams.of([1, 2, 3], temperature=[0.0, 1.0, 0.0])
    prompts = [[0, 1, 2], [2], [1, 1]]
    greedy = _generate(prompts, 6, None).tokens
    mixed = _generate(prompts, 6, sampling, steps=3).tokens
    assert [mixed[0], mixed[2]] == [greedy[0], greedy[2]]


def test_sampling_for_another_number_of_prompts_is_refused():
    with pytest.raises(ValueError, match="sampling must have 2 rows, got 1"):
        _generate([[1], [2]], 3, SamplingParams.of([0]))
