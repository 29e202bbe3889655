"""Tiny random DeepseekV32 and GlmMoeDsa models of the installed transformers, and their MTP heads.

transformers 5.24 has `generate(use_mtp=True)`, but knows no mask for the MTP layers of DSA models,
takes a GLM layer's pair for its hidden state, and loads MTP weights from a checkpoint alone.
`DsaMtpModel` fills these three gaps; drafting, verification and crop are transformers' own.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from transformers import (
    DeepseekV32Config,
    DeepseekV32ForCausalLM,
    GlmMoeDsaConfig,
    GlmMoeDsaForCausalLM,
    modeling_layers,
)
from transformers.masking_utils import create_causal_mask

from lightning_indexer.adapters import transformers as li_transformers

transformers.logging.set_verbosity_error()

VOCABULARY, TOPK = 256, 16
DEEPSEEK, GLM = "DeepseekV32", "GlmMoeDsa"
FAMILIES = (DEEPSEEK, GLM)
GLM_ROLES = ("full", "shared", "full")
#: Scores closer than this, relative to the row's greatest, may trade places when rounded.
NEAR = 1e-5

_CLASSES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    DEEPSEEK: (DeepseekV32Config, DeepseekV32ForCausalLM, {"num_hidden_layers": 3}),
    GLM: (
        GlmMoeDsaConfig,
        GlmMoeDsaForCausalLM,
        {"num_hidden_layers": 3, "indexer_types": list(GLM_ROLES)},
    ),
}
_TINY = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "max_position_embeddings": 1024,
    "index_topk": TOPK,
    "index_head_dim": 32,
    "index_n_heads": 16,  # of few heads, all dot products with a key are often negative: ties at 0
    "first_k_dense_replace": 1,
    "bos_token_id": 0,
    "eos_token_id": None,
    "num_mtp_layers": 1,
    "mtp_layer_types": ["indexed_attention"],
    "mtp_mlp_layer_types": ["sparse"],
}


def build(family: str, seed: int, *, dtype: torch.dtype = torch.float32, **config: Any) -> Any:
    """A model for inference; `config` overrides `_TINY`."""
    config_class, model_class, options = _CLASSES[family]
    torch.manual_seed(seed)
    model = model_class(config_class(**(_TINY | options | config))).to(dtype).eval()
    if dtype == torch.float64:
        model.set_experts_implementation("eager")  # the grouped products know no fp64
    return model


def token_ids(seed: int, batch: int, length: int) -> torch.Tensor:
    """Random prompts [batch, length]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (batch, length), generator=generator)


@torch.no_grad()
def logits(model: Any, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    return model(ids, attention_mask=mask).logits


def generate(model: Any, ids: torch.Tensor, new_tokens: int, **options: Any) -> torch.Tensor:
    """The new tokens of greedy decoding, [B, new_tokens]."""
    options = {"max_new_tokens": new_tokens, "do_sample": False} | options
    return model.generate(ids, **options)[:, ids.shape[1] :]


@contextmanager
def patched(model: Any, *, attention: bool) -> Iterator[li_transformers.PatchReport]:
    """The model and, if it has one, its MTP head, patched for a while."""
    models = [model, *filter(None, [model.__dict__.get("mtp")])]
    reports = [li_transformers.patch(m, attention=attention) for m in models]
    try:
        yield reports[0]
    finally:
        for m in models:
            li_transformers.unpatch(m)


@dataclass
class Ties:
    """Rows whose k-th and next score were equal, or near enough for rounding to swap them."""

    equal: int = 0
    near: int = 0
    rows: int = 0


@dataclass
class _Watch:
    """Counts the ties among the scores that indexers hand to `Tensor.topk`."""

    ties: Ties = field(default_factory=Ties)
    depth: int = 0

    def enter(self, *_: object) -> None:
        self.depth += 1

    def leave(self, *_: object) -> None:
        self.depth -= 1

    def topk(self, scores: torch.Tensor, k: int, **options: Any) -> Any:
        if self.depth and k < scores.shape[-1]:
            best = torch.topk(scores, k + 1, dim=-1).values
            low, high = best[..., -1], best[..., -2]
            seen = low > torch.finfo(scores.dtype).min / 2  # more candidates than k
            gap = high - low
            self.ties.rows += int(seen.sum())
            self.ties.equal += int((seen & (gap == 0)).sum())
            limit = NEAR * best.abs().where(best > torch.finfo(best.dtype).min / 2, 0).amax(-1)
            self.ties.near += int((seen & (gap <= limit)).sum())
        return torch.topk(scores, k, **options)


@contextmanager
def boundary_ties(model: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ties]:
    """Ties at the boundary of the selections that the stock indexers of `model` make meanwhile."""
    watch = _Watch()
    handles = []
    for module in model.modules():
        if type(module).__name__.endswith("Indexer"):
            handles.append(module.register_forward_pre_hook(watch.enter))
            handles.append(module.register_forward_hook(watch.leave))
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "topk", lambda x, k, **options: watch.topk(x, k, **options))
        yield watch.ties
    for handle in handles:
        handle.remove()


class DsaMtpModel(modeling_layers.MtpModel):
    """The MTP head of `main_model`, as `generate(use_mtp=True)` drives it."""

    def __init__(self, main_model: Any, num_mtp_layers: int) -> None:
        super().__init__(main_model, num_mtp_layers)
        for layer in self.layers:
            layer.mtp_block.register_forward_hook(_hidden_state)

    def create_masks_for_mtp_layer(
        self, layer_idx: int, inputs_embeds: torch.Tensor, mtp_cache: Any, position_ids: Any
    ) -> dict[str, torch.Tensor]:
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=inputs_embeds,
            attention_mask=None,
            cache=mtp_cache,
            position_ids=position_ids,
            layer_idx=layer_idx,
            allow_is_causal_skip=False,
        )
        return {"attention_mask": mask}

    @classmethod
    def from_pretrained(cls, main_model: Any, device_map: Any = None, **_: Any) -> "DsaMtpModel":
        return main_model.__dict__["mtp"]


def _hidden_state(_module: Any, _args: Any, output: Any) -> torch.Tensor:
    return output[0] if isinstance(output, tuple) else output


def add_mtp(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gives the model an MTP head; returns a list that grows by one number a main forward.

    A tiny random model hardly looks past the last token. So does the head, which starts from that
    token's embedding: many of its drafts are right, and many wrong.
    """
    mtp = DsaMtpModel(model, 1).to(model.dtype).eval()
    size, std = model.config.hidden_size, model.config.initializer_range
    with torch.no_grad():
        for name, parameter in mtp.layers.named_parameters():
            if parameter.dim() > 1:  # those of experts were never initialised
                parameter.normal_(std=std)
            if name.endswith("eh_proj.weight"):
                parameter[:, :size] = torch.eye(size)
        for buffer in mtp.layers.buffers():
            buffer.zero_()
    if model.dtype == torch.float64:
        mtp.set_experts_implementation("eager")
    model.__dict__["mtp"] = mtp  # not a submodule: no part of the state dict
    monkeypatch.setattr(modeling_layers, "MtpModel", DsaMtpModel)
    forwards: list[int] = []
    model.model.register_forward_hook(partial(_count, forwards))
    return forwards


def _count(forwards: list[int], _module: Any, args: Any, output: Any) -> None:
    forwards.append(output.last_hidden_state.shape[1])
