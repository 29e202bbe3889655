"""What `patch` and `unpatch` change on a model, what they report, and what they refuse."""

import copy
import subprocess
import sys
from functools import partial
from typing import Any

import pytest
import torch
from hf_models import DEEPSEEK, FAMILIES, GLM, GLM_ROLES, build, logits, patched, token_ids

from lightning_indexer.adapters import transformers as li_transformers


def snapshot(model: Any) -> dict[str, tuple[int, type, frozenset[str]]]:
    """Identity, type and own attributes of every module."""
    return {
        name: (id(module), type(module), frozenset(vars(module)))
        for name, module in model.named_modules()
    }


@pytest.mark.parametrize("attention", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_unpatch_restores_the_model(family: str, attention: bool) -> None:
    model, ids = build(family, 0, index_n_heads=4), token_ids(0, 2, 64)
    before, stock = snapshot(model), logits(model, ids)
    state = model.state_dict()
    with patched(model, attention=attention):
        during = snapshot(model)
        assert {n: s[:2] for n, s in during.items()} == {n: s[:2] for n, s in before.items()}
        assert during != before
        now = model.state_dict()
        assert list(now) == list(state)
        assert all(now[name].data_ptr() == state[name].data_ptr() for name in state)
    assert snapshot(model) == before
    assert torch.equal(logits(model, ids), stock)


def test_report_of_indexer_and_attention() -> None:
    with patched(build(GLM, 0), attention=True) as report:
        pass
    assert report.family == GLM
    assert [(layer.name, layer.role) for layer in report.layers] == [
        (f"model.layers.{i}.self_attn", role) for i, role in enumerate(GLM_ROLES)
    ]
    assert all(layer.attention for layer in report.layers)
    assert [layer.indexer for layer in report.layers] == [role == "full" for role in GLM_ROLES]
    assert report.left_alone == ()
    assert "3 DSA layers, 1 of them shared; replaced 2 indexers and 3 attentions" in str(report)


def test_report_of_indexer_alone() -> None:
    with patched(build(DEEPSEEK, 0), attention=False) as report:
        pass
    assert report.left_alone == tuple(f"model.layers.{i}.self_attn" for i in range(3))
    assert not any(layer.attention for layer in report.layers)
    assert f"{DEEPSEEK} of transformers {report.transformers}" in str(report)


def test_copy_of_a_patched_model_is_patched_itself() -> None:
    model = build(DEEPSEEK, 0)
    with patched(model, attention=True):
        twin = copy.deepcopy(model)
        for a, b in zip(model.model.layers, twin.model.layers, strict=True):
            for module in (b.self_attn, b.self_attn.indexer):
                assert module.forward.args == (module,)
            assert a.self_attn.forward.args == (a.self_attn,)
    assert torch.isfinite(logits(twin, token_ids(0, 1, 40))).all()


def refuses(model: Any, *needles: str, error: type[Exception] = ValueError, **options: Any) -> None:
    """patch raises, naming all the needles, and leaves the model as it was."""
    before = snapshot(model) if isinstance(model, torch.nn.Module) else None
    with pytest.raises(error) as raised:
        li_transformers.patch(model, **options)
    for needle in needles:
        assert needle in str(raised.value), raised.value
    assert before is None or snapshot(model) == before


def test_refuses_what_is_no_module() -> None:
    refuses("model", "torch.nn.Module", "str", error=TypeError)


def test_refuses_a_model_without_dsa_layers() -> None:
    layers = torch.nn.ModuleList([torch.nn.MultiheadAttention(8, 2)])
    refuses(layers, "DeepseekV32Attention", "got a ModuleList with MultiheadAttention")
    refuses(torch.nn.Linear(2, 2), "got a Linear with no attention")


def test_refuses_a_second_patch_and_an_unpatch_too_many() -> None:
    model = build(GLM, 0)
    with patched(model, attention=False):
        refuses(model, "already", "unpatch")
        refuses(model, "already", attention=True)
    with pytest.raises(ValueError, match="must have been patched, got a GlmMoeDsaForCausalLM"):
        li_transformers.unpatch(model)


def test_refuses_an_old_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(li_transformers, "version", lambda name: "5.23.2")
    refuses(build(DEEPSEEK, 0), ">= 5.24", "got 5.23.2")


def test_refuses_a_transformers_whose_indexer_takes_something_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = build(DEEPSEEK, 0)

    def forward(self: Any, hidden_states: Any, q_resid: Any, window: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(type(model.model.layers[0].self_attn.indexer), "forward", forward)
    refuses(model, "self_attn.indexer", "got hidden_states, q_resid, window", "not supported")


def test_refuses_a_forward_that_others_replaced() -> None:
    model = build(GLM, 0)
    indexer = model.model.layers[2].self_attn.indexer
    indexer.forward = partial(type(indexer).forward, indexer)
    refuses(model, "model.layers.2.self_attn.indexer", "accelerate")


def test_refuses_to_fold_a_projection_that_is_no_linear() -> None:
    model = build(DEEPSEEK, 0)
    attention = model.model.layers[1].self_attn
    attention.kv_b_proj = torch.nn.Sequential(attention.kv_b_proj)
    refuses(model, "model.layers.1.self_attn.kv_b_proj", "attention=False", attention=True)
    ids = token_ids(0, 1, 40)
    stock = logits(model, ids)
    with patched(model, attention=False):
        assert torch.equal(logits(model, ids), stock)


def test_refuses_shapes_beyond_the_kernel() -> None:
    model = build(DEEPSEEK, 0, kv_lora_rank=520, num_hidden_layers=1)
    refuses(model, "at most 128 heads, kv_lora_rank 512", "got 4, 520 and 536", attention=True)


def test_attention_refuses_gradients_and_dropout() -> None:
    model, ids = build(DEEPSEEK, 0, attention_dropout=0.5), token_ids(0, 1, 40)
    with patched(model, attention=True):
        with pytest.raises(ValueError, match="no backward"):
            model(ids)
        for name, parameter in model.named_parameters():  # as an adapter on q_b_proj trains
            parameter.requires_grad_("layers.0.self_attn.q_b_proj" in name)
        with pytest.raises(ValueError, match="no backward"):
            model(ids)
        with torch.inference_mode():
            assert torch.isfinite(model(ids).logits).all()
        model.train()
        with torch.no_grad(), pytest.raises(ValueError, match="no dropout"):
            model(ids)


@pytest.mark.parametrize("family", FAMILIES)
def test_training_with_our_indexer_has_the_gradients_of_stock(family: str) -> None:
    model, ids = build(family, 0), token_ids(0, 2, 48)

    def gradients() -> dict[str, torch.Tensor]:
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    stock = gradients()
    with patched(model, attention=False):
        ours = gradients()
    assert ours.keys() == stock.keys() and len(ours) > 10
    assert all(torch.equal(ours[name], stock[name]) for name in stock)


def test_runs_under_torch_compile() -> None:
    model, ids = build(GLM, 0), token_ids(0, 2, 48)
    with patched(model, attention=True):
        expected = logits(model, ids)
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        assert torch.equal(logits(compiled, ids), expected)


def test_adapter_imports_no_transformers() -> None:
    adapter = "lightning_indexer.adapters.transformers"
    code = f"import sys, {adapter}; print('transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
