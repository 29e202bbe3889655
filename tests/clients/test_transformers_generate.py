"""Generation on patched models: speculative decoding, static caches, crop, shared layers."""

from typing import Any

import pytest
import torch
from hf_models import (
    FAMILIES,
    GLM,
    add_mtp,
    boundary_ties,
    build,
    generate,
    logits,
    patched,
    token_ids,
)
from transformers import DynamicCache, StaticCache

import lightning_indexer as li

SEEDS, NEW_TOKENS = 20, 24
DRAFTS = {"prompt_lookup": {"prompt_lookup_num_tokens": 4}, "MTP": {"use_mtp": True}}


@pytest.mark.parametrize("family", FAMILIES)
def test_speculative_equals_greedy_on_every_seed(
    family: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    # Four index heads: scores of 0, and with them ties at the boundary, are common.
    equal = {(who, draft): 0 for draft in DRAFTS for who in ("stock", "ours")}
    forwards, verified = dict.fromkeys(DRAFTS, 0), dict.fromkeys(DRAFTS, 0)
    tied = 0
    for seed in range(SEEDS):
        model = build(family, seed, index_n_heads=4)
        counted = add_mtp(model, monkeypatch)
        ids = token_ids(seed, 1, 8).repeat(1, 5)
        with boundary_ties(model, monkeypatch) as ties:
            expected = generate(model, ids, NEW_TOKENS)
        tied += ties.equal > 0
        for draft, options in DRAFTS.items():
            tokens = generate(model, ids, NEW_TOKENS, **options)
            equal["stock", draft] += torch.equal(tokens, expected)
        with patched(model, attention=True):
            expected = generate(model, ids, NEW_TOKENS)
            for draft, options in DRAFTS.items():
                counted.clear()
                tokens = generate(model, ids, NEW_TOKENS, **options)
                equal["ours", draft] += torch.equal(tokens, expected)
                forwards[draft] += len(counted)
                verified[draft] += sum(rows > 1 for rows in counted[1:])
    with capsys.disabled():
        for draft in DRAFTS:
            print(
                f"\n{family} {draft}: speculative equals greedy on {equal['ours', draft]} of"
                f" {SEEDS} seeds patched, {equal['stock', draft]} stock ({tied} seeds with ties);"
                f" {SEEDS * NEW_TOKENS} tokens in {forwards[draft]} forwards,"
                f" {verified[draft]} of them of drafts",
                end="",
            )
        print()
    assert {draft: equal["ours", draft] for draft in DRAFTS} == dict.fromkeys(DRAFTS, SEEDS)
    assert min(verified.values()) > 2 * SEEDS  # forwards of more than one row
    assert max(forwards.values()) < SEEDS * NEW_TOKENS  # some drafts were accepted
    assert min(equal["stock", draft] for draft in DRAFTS) < SEEDS


@pytest.mark.parametrize("family", FAMILIES)
def test_speculative_equals_greedy_with_our_indexer_alone(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(4):
        model = build(family, seed, index_n_heads=4)
        add_mtp(model, monkeypatch)
        ids = token_ids(seed, 1, 8).repeat(1, 5)
        with patched(model, attention=False):
            expected = generate(model, ids, NEW_TOKENS)
            for options in DRAFTS.values():
                assert torch.equal(generate(model, ids, NEW_TOKENS, **options), expected)


def new_cache(model: Any, kind: str) -> Any:
    if kind == "static":
        return StaticCache(config=model.config, max_cache_len=96)
    return DynamicCache(config=model.config)


@torch.no_grad()
def forward(model: Any, ids: torch.Tensor, cache: Any) -> torch.Tensor:
    return model(ids, cache=cache).logits


@pytest.mark.parametrize("attention", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_static_cache_gives_the_tokens_of_a_dynamic_one(family: str, attention: bool) -> None:
    for seed in range(3):
        model, ids = build(family, seed, index_n_heads=4), token_ids(seed, 2, 40)
        mask = torch.ones_like(ids)
        mask[0, :17] = 0
        options: dict[str, Any] = {"attention_mask": mask}
        with patched(model, attention=attention):
            dynamic = generate(model, ids, 12, **options)
            static = generate(model, ids, 12, cache_implementation="static", **options)
        assert torch.equal(static, dynamic)


@pytest.mark.parametrize("attention", [False, True])
@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("family", FAMILIES)
def test_crop_leaves_no_trace(family: str, kind: str, attention: bool) -> None:
    model, ids = build(family, 0, index_n_heads=4), token_ids(0, 2, 60)
    wrong = token_ids(1, 2, 6)
    with patched(model, attention=attention):
        cache = new_cache(model, kind)
        forward(model, ids[:, :50], cache)
        expected = forward(model, ids[:, 50:], cache)
        cache = new_cache(model, kind)
        forward(model, ids[:, :50], cache)
        forward(model, wrong, cache)
        cache.crop(-wrong.shape[1])
        assert torch.equal(forward(model, ids[:, 50:], cache), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_generation_goes_on_after_patch_and_unpatch(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The cache is the model's own, in its own layout.
    model, ids = build(family, 0), token_ids(0, 1, 60)
    with boundary_ties(model, monkeypatch) as ties:
        cache = new_cache(model, "dynamic")
        forward(model, ids[:, :30], cache)
        middle = forward(model, ids[:, 30:45], cache)
        last = forward(model, ids[:, 45:], cache)
    assert not ties.near
    cache = new_cache(model, "dynamic")
    forward(model, ids[:, :30], cache)
    with patched(model, attention=True):
        torch.testing.assert_close(forward(model, ids[:, 30:45], cache), middle)
    torch.testing.assert_close(forward(model, ids[:, 45:], cache), last)


PATTERNS = {
    "types": {"indexer_types": ["full", "full", "shared", "shared", "full"]},
    "freq": {"index_topk_freq": 2, "index_skip_topk_offset": 3},
    "pattern": {"index_topk_pattern": "FSSFS"},
}


@pytest.mark.parametrize("attention", [False, True])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_shared_layers_use_the_selection_of_the_full_one_before(
    pattern: str, attention: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"num_hidden_layers": 5, "indexer_types": None} | PATTERNS[pattern]
    model, ids = build(GLM, 1, **options), token_ids(1, 2, 64)
    with boundary_ties(model, monkeypatch) as ties:
        stock = logits(model, ids)
    assert not ties.near
    calls = []
    for module in model.modules():
        if type(module).__name__ == "GlmMoeDsaIndexer":
            module.register_forward_hook(lambda m, _args, _out: calls.append(m.layer_idx))
    with patched(model, attention=attention) as report:
        torch.testing.assert_close(logits(model, ids), stock, atol=1e-5, rtol=0)
    roles = tuple(layer.role for layer in report.layers)
    assert roles == li.layer_roles(model.config)[:5]
    assert calls == [i for i, role in enumerate(roles) if role == "full"]
    assert "shared" in roles
