"""DeepseekV32 and GlmMoeDsa models of Hugging Face transformers, with our indexer and attention.

    from lightning_indexer.adapters import transformers as li_transformers

    print(li_transformers.patch(model))  # which layers, in which roles
    model.generate(**inputs)
    li_transformers.unpatch(model)

Works on a model that is given, and imports transformers neither here nor later.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Any, Literal

import torch

from ..indexer.config import RopeStyle
from ..kernels.sparse_mla_attention import MAX_DIM, MAX_HEADS, MAX_V_DIM
from .transformers_attention import attention_forward
from .transformers_indexer import indexer_forward

MIN_VERSION = (5, 24)

_INPUTS = ("hidden_states", "position_embeddings", "attention_mask", "cache", "position_ids")
_INDEXER = (_INPUTS[0], "q_resid", *_INPUTS[1:3], "position_ids", "cache")


@dataclass(frozen=True)
class Family:
    """What sets the layers of one model family apart."""

    name: str
    classes: str  # what names of its classes begin with
    rope_style: RopeStyle  # of the indexer; the attention's is interleaved in all
    shares: bool  # layers pass their selection on

    def is_attention(self, module: torch.nn.Module) -> bool:
        """Whether the module is this family's attention: that class, no subclass."""
        home = f"transformers.models.{self.name}.modeling_{self.name}"
        found = (type(module).__module__, type(module).__name__)
        return found == (home, f"{self.classes}Attention")

    def attention_arguments(self) -> tuple[str, ...]:
        """Of the stock attention's forward."""
        return (*_INPUTS, *(("prev_topk_indices",) if self.shares else ()), "kwargs")


FAMILIES = (
    Family("deepseek_v32", "DeepseekV32", "half_split", shares=False),
    Family("glm_moe_dsa", "GlmMoeDsa", "interleaved", shares=True),
)


@dataclass(frozen=True)
class PatchedLayer:
    """One DSA layer: a full one selects, a shared one uses the selection of the full one before."""

    name: str  # of its attention, within the model
    role: Literal["full", "shared"]
    indexer: bool  # replaced
    attention: bool  # replaced


@dataclass(frozen=True)
class PatchReport:
    """What `patch` replaced, and what it left alone."""

    family: str
    transformers: str  # the version
    layers: tuple[PatchedLayer, ...]
    left_alone: tuple[str, ...]  # modules named …Indexer or …Attention that run their own code

    def __str__(self) -> str:
        indexers = sum(layer.indexer for layer in self.layers)
        attentions = sum(layer.attention for layer in self.layers)
        shared = sum(layer.role == "shared" for layer in self.layers)
        return (
            f"{self.family} of transformers {self.transformers}: {len(self.layers)} DSA layers,"
            f" {shared} of them shared; replaced {indexers} indexers and {attentions} attentions,"
            f" left {len(self.left_alone)} modules alone"
        )


def patch(model: torch.nn.Module, *, attention: bool = True) -> PatchReport:
    """forward of every DSA indexer of `model`, and with `attention` of every DSA attention ← ours.

    Weights, caches, hooks and masks stay the model's own. State dict, module objects and types do
    not change, and neither do checkpoints or caches: a generation may go on after `unpatch`.

    Args:
        model: a DeepseekV32 or GlmMoeDsa model, or any module that holds such layers.
        attention: replace the attention too. Then it has no backward, returns no weights, and uses
            no attention implementation of transformers. With False the stock attention gets
            our selection, for its mask or its kernel, and training works as before.

    Returns:
        Which layers, in which roles, and what was left alone.

    Raises:
        TypeError: model is no module.
        ValueError: it has no such layers (naming what it has), is patched already, comes from a
            transformers before 5.24 or one whose signatures differ, a forward was replaced by
            others, or its shapes exceed `sparse_mla_attention`'s. Nothing is replaced then. A
            patched forward raises it on masks with holes, and with `attention` where a gradient
            or dropout is asked for.

    Guarantees:
        Of given queries, keys and weights the selection is `select_topk`'s: exact, ties to the
        smaller position, whatever the batch, the lengths and the rows of the call (the model's
        projections may still round by them). Rows that see nothing have output 0.

    Source:
        transformers 5.24's `modeling_deepseek_v32` and `modeling_glm_moe_dsa`.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    family, attentions = _find_layers(model)
    found = version("transformers")
    if tuple(int(part) for part in found.split(".")[:2]) < MIN_VERSION:
        raise ValueError(f"model must come from transformers >= 5.24, got {found}")
    layers = []
    for name, module in attentions.items():
        full = module.indexer is not None
        if full:
            _check_forward(f"{name}.indexer", module.indexer, _INDEXER)
        if attention:
            _check_forward(name, module, family.attention_arguments())
            _check_shapes(name, module)
        layers.append(PatchedLayer(name, "full" if full else "shared", full, attention))
    for module in attentions.values():
        if module.indexer is not None:
            style, fill = family.rope_style, not attention
            module.indexer.forward = partial(
                indexer_forward, module.indexer, rope_style=style, fill=fill
            )
        if attention:
            module.forward = partial(attention_forward, module, passes_indices=family.shares)
    return PatchReport(family.classes, found, tuple(layers), tuple(_stock_modules(model)))


def unpatch(model: torch.nn.Module) -> None:
    """Every forward that `patch` replaced ← the class's own.

    Raises:
        ValueError: nothing in `model` is patched.
    """
    patched = [module for module in model.modules() if _is_patched(module)]
    if not patched:
        raise ValueError(f"model must have been patched, got a {type(model).__name__} as it was")
    for module in patched:
        del module.forward


def _is_patched(module: torch.nn.Module) -> bool:
    forward = module.__dict__.get("forward")
    ours = (indexer_forward, attention_forward)
    return isinstance(forward, partial) and forward.func in ours


def _find_layers(model: torch.nn.Module) -> tuple[Family, dict[str, Any]]:
    """The family, and its attention modules by name."""
    modules = dict(model.named_modules())
    if any(map(_is_patched, modules.values())):
        raise ValueError("model must not be patched already: unpatch it first")
    for family in FAMILIES:
        found = {name: module for name, module in modules.items() if family.is_attention(module)}
        if found:
            return family, found
    kinds = sorted({type(modules[name]).__name__ for name in _stock_modules(model)})
    raise ValueError(
        "model must have DeepseekV32Attention or GlmMoeDsaAttention layers, got a"
        f" {type(model).__name__} with {', '.join(kinds) or 'no attention'}"
    )


def _stock_modules(model: torch.nn.Module) -> list[str]:
    return [
        name
        for name, module in model.named_modules()
        if type(module).__name__.endswith(("Indexer", "Attention")) and not _is_patched(module)
    ]


def _check_forward(name: str, module: torch.nn.Module, arguments: tuple[str, ...]) -> None:
    if "forward" in module.__dict__:
        raise ValueError(
            f"{name} must run its class's forward, got one that was set on the module"
            " (by accelerate's device hooks or kernelize?)"
        )
    got = tuple(inspect.signature(type(module).forward).parameters)[1:]
    if got != arguments:
        raise ValueError(
            f"{name} ({type(module).__name__}) must take {', '.join(arguments)}, got"
            f" {', '.join(got)}: this version of transformers is not supported"
        )


def _check_shapes(name: str, module: Any) -> None:
    projection = module.kv_b_proj
    if type(projection) is not torch.nn.Linear or projection.bias is not None:
        raise ValueError(
            f"{name}.kv_b_proj must be a torch.nn.Linear without bias to be folded into the"
            f" queries, got {projection}; patch with attention=False"
        )
    heads, latent, rope = module.num_heads, module.kv_lora_rank, module.qk_rope_head_dim
    need = (heads * (module.qk_nope_head_dim + module.v_head_dim), latent)
    if tuple(projection.weight.shape) != need:
        raise ValueError(
            f"{name}.kv_b_proj must hold all heads, [{need[0]}, {need[1]}], got"
            f" {list(projection.weight.shape)}; patch with attention=False"
        )
    if heads > MAX_HEADS or latent > MAX_V_DIM or latent + rope > MAX_DIM:
        raise ValueError(
            f"{name} must have at most {MAX_HEADS} heads, kv_lora_rank {MAX_V_DIM} and {MAX_DIM}"
            f" with qk_rope_head_dim, got {heads}, {latent} and {latent + rope}; patch with"
            " attention=False"
        )
