"""Patched DeepseekV32 and GlmMoeDsa models give the logits of stock ones; k is below the length.

Compared on seeds where no selection of the stock model has a tie at its boundary: there ours is
one of several right answers, and stock's another.
"""

from typing import Any

import pytest
import torch
from hf_models import (
    DEEPSEEK,
    FAMILIES,
    GLM,
    TOPK,
    Ties,
    boundary_ties,
    build,
    generate,
    logits,
    patched,
    token_ids,
)

from lightning_indexer.adapters import transformers as li_transformers

SEEDS = {"sdpa": 20, "eager": 4}  # by attention implementation: their masks differ
LENGTH, PROMPT, NEW_TOKENS = 64, 40, 8
PADDING = (17, 0)  # of the two sequences of a batch, on the left
BF16 = torch.bfloat16


def tolerance(expected: torch.Tensor) -> float:
    """Of fp32 models: a hundred roundings of the greatest logit."""
    return 100 * 2.0**-24 * float(expected.abs().max())


def padding_mask(padding: tuple[int, ...], length: int) -> torch.Tensor:
    return (torch.arange(length) >= torch.tensor(padding)[:, None]).long()


def greedy(model: Any, ids: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """New tokens, and the logits [new tokens, B, vocabulary] that they were the greatest of."""
    options = {"return_dict_in_generate": True, "output_logits": True} | options
    out = model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False, **options)
    return out.sequences[:, ids.shape[1] :], torch.stack(out.logits)


def run(model: Any, seed: int) -> dict[str, torch.Tensor]:
    """What is compared: prefill, a left-padded batch of it, and generation from both."""
    ids, mask = token_ids(seed, 2, LENGTH), padding_mask(PADDING, LENGTH)
    prompt, prompt_mask = ids[:, :PROMPT], padding_mask(PADDING, PROMPT)
    tokens, scores = greedy(model, prompt)
    padded_tokens, padded_scores = greedy(model, prompt, attention_mask=prompt_mask)
    return {
        "prefill": logits(model, ids),
        "left-padded": logits(model, ids, mask)[mask.bool()],
        "tokens": tokens,
        "generation": scores,
        "left-padded tokens": padded_tokens,
        "left-padded generation": padded_scores,
    }


@pytest.mark.parametrize("implementation", SEEDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_patched_logits_equal_stock(
    family: str, implementation: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    compared, excluded, greatest = 0, 0, 0.0
    for seed in range(2 * SEEDS[implementation]):
        model = build(family, seed)
        model.set_attn_implementation(implementation)
        with boundary_ties(model, monkeypatch) as ties:
            stock = run(model, seed)
        assert ties.rows > 100  # rows that had to leave keys out
        if ties.near:
            excluded += 1
            continue
        with patched(model, attention=False):
            selected = run(model, seed)
        with patched(model, attention=True):
            attended = run(model, seed)
        for name, expected in stock.items():
            assert torch.equal(selected[name], expected), (seed, name)
            if expected.dtype == torch.int64:
                assert torch.equal(attended[name], expected), (seed, name)
            else:
                error = float((attended[name] - expected).abs().max())
                assert error <= tolerance(expected), (seed, name)
                greatest = max(greatest, error)
        compared += 1
        if compared == SEEDS[implementation]:
            break
    with capsys.disabled():
        print(
            f"\n{family} {implementation}: {compared} seeds equal stock bit for bit with our"
            f" indexer, and within {greatest:.1e} with our attention; {excluded} had ties"
        )
    assert compared == SEEDS[implementation]


@pytest.mark.parametrize("family", FAMILIES)
def test_wrong_rope_style_differs(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    swapped = {"half_split": "interleaved", "interleaved": "half_split"}
    wrong = [
        li_transformers.Family(f.name, f.classes, swapped[f.rope_style], f.shares)
        for f in li_transformers.FAMILIES
    ]
    for seed in range(5):
        model, ids = build(family, seed), token_ids(seed, 1, LENGTH)
        stock = logits(model, ids)
        with monkeypatch.context() as patch:
            patch.setattr(li_transformers, "FAMILIES", wrong)
            for attention in (False, True):
                with patched(model, attention=attention):
                    error = (logits(model, ids) - stock).abs()
                assert float(error.max()) > 100 * tolerance(stock)
                # of the first k positions there is nothing to choose
                assert float(error[:, :TOPK].max()) <= tolerance(stock)


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_selects_as_stock(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(5):
        model, ids = build(family, seed, dtype=BF16), token_ids(seed, 2, LENGTH)
        with boundary_ties(model, monkeypatch) as ties:
            stock = logits(model, ids)
        assert not ties.equal
        with patched(model, attention=False):
            assert torch.equal(logits(model, ids), stock)


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_attention_of_one_layer_is_within_two_roundings(family: str) -> None:
    # In deeper models a rounding moves selections and expert choices, stock's own as well.
    types = {"indexer_types": ["full"]} if family == GLM else {}
    for seed in range(5):
        model = build(family, seed, dtype=BF16, num_hidden_layers=1, **types)
        ids = token_ids(seed, 2, LENGTH)
        stock = logits(model, ids).float()
        with patched(model, attention=True):
            error = (logits(model, ids).float() - stock).abs().max()
        assert error <= 2 * 2.0**-8 * stock.abs().max()


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_attention_is_as_close_to_fp32_as_stock(family: str) -> None:
    stock_errors, errors = [], []
    for seed in range(8):
        model, ids = build(family, seed, dtype=BF16), token_ids(seed, 2, LENGTH)
        stock = logits(model, ids).float()
        with patched(model, attention=True):
            attended = logits(model, ids).float()
        exact = logits(model.float(), ids)
        stock_errors.append((stock - exact).square().mean())
        errors.append((attended - exact).square().mean())
    assert sum(errors) <= 1.2 * sum(stock_errors)


def test_fp64_models_keep_their_precision_but_for_our_attention() -> None:
    model, ids = build(DEEPSEEK, 0, dtype=torch.float64), token_ids(0, 2, LENGTH)
    stock = logits(model, ids)
    with patched(model, attention=False):
        assert torch.equal(logits(model, ids), stock)
    with patched(model, attention=True):
        attended = logits(model, ids)
    assert attended.dtype == torch.float64
    assert float((attended - stock).abs().max()) <= tolerance(stock)


def test_ties_are_seen_where_there_are_some(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(DEEPSEEK, 0, index_n_heads=1)  # half of all scores are 0
    with boundary_ties(model, monkeypatch) as ties:
        generate(model, token_ids(0, 1, PROMPT), 2)
    assert isinstance(ties, Ties) and ties.near >= ties.equal > 10
