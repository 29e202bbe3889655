"""Checks of sampling parameters."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_indexer.speculator.sampling import SamplingParams, token_probabilities

pytestmark = pytest.mark.once


def test_equal_seeds_are_equal_and_wrap_at_64_bits():
    params = SamplingParams.of([5, 5 + 2**64, -1, 2**64 - 1])
    assert params.seed.tolist() == [5, 5, -1, -1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, "temperature must be finite and at least 0, got -0.1"),
        ({"temperature": math.inf}, "temperature must be finite"),
        ({"temperature": math.nan}, "temperature must be finite"),
        ({"temperature": [1.0]}, "temperature must have 2 entries, one for each seed, got 1"),
        ({"top_p": 0}, r"top_p must be in \(0, 1\], got 0"),
        ({"top_p": 1.1}, r"top_p must be in \(0, 1\], got 1.1"),
        ({"top_p": [1, 1, 1]}, "top_p must have 2 entries"),
    ],
)
def test_unusable_parameters_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams.of([0, 1], **options)


def test_parameters_of_other_shapes_and_types_are_refused():
    one, seed = torch.ones(2), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(TypeError, match="seed must be int64"):
        SamplingParams(one, one, one)
    with pytest.raises(TypeError, match="temperature must be float32"):
        SamplingParams(one.double(), one, seed)
    with pytest.raises(ValueError, match=r"top_p must have shape \[2\], got \[3\]"):
        SamplingParams(one, torch.ones(3), seed)


def test_logits_that_do_not_fit_are_refused():
    params = SamplingParams.of([0, 0])
    with pytest.raises(ValueError, match=r"logits must have shape \[2, any\]"):
        token_probabilities(torch.zeros(3, 4), params)
    with pytest.raises(ValueError, match="logits must have 1 to 4194304 columns, got 0"):
        token_probabilities(torch.zeros(2, 0), params)
