"""vLLM 0.33: our indexer in the place of its own, and its MTP speculator driving our modules.

Installed beside vLLM, this package is loaded by the entry point `vllm.general_plugins`, in every
process of the engine, and `register` replaces `SparseAttnIndexer` for models built from then on:

    VLLM_PLUGINS=lightning_indexer vllm serve deepseek-ai/DeepSeek-V3.2

A draft model of one's own, with `LightningIndexer` layers, becomes one that vLLM's `MTPSpeculator`
shares selections in (the draft's config has `index_share_for_mtp_iteration`):

    draft.model = Predictor(...)  # a module that holds LightningIndexers
    li_vllm.share_topk_indices(draft)

Verified on a CPU against the installed vLLM: registration, its metadata builder, its forward
context, its speculator and its Triton kernels in the interpreter. Not run, for want of a GPU: a
model of vLLM end to end, its graphs, and its caches as its own CUDA kernels write them.

Importing this module imports no vLLM.
"""

from __future__ import annotations

import warnings
from functools import partial
from importlib.metadata import version
from typing import Any

from torch import nn

from ..indexer.buffer import TopkIndicesBuffer
from ..indexer.sharing import compact_topk_indices, indexers_of, set_skip_topk, topk_buffers_of

SUPPORTED = "0.33"


def register() -> None:
    """Replaces vLLM's `SparseAttnIndexer` by ours, for layers built from now on.

    Safe to call again. Warns, naming the reason, and changes nothing when vLLM is another release
    or another plugin has replaced the layer already: a plugin that raises would stop the engine.
    """
    found = version("vllm")
    if found.split(".")[:2] != SUPPORTED.split("."):
        _warn(f"vLLM must be {SUPPORTED}.x, got {found}")
        return
    from vllm.config.compilation import CompilationConfig  # type: ignore[import-not-found]
    from vllm.model_executor.custom_op import op_registry_oot  # type: ignore[import-not-found]

    from .vllm_indexer import QUALIFIED_NAME, LightningSparseAttnIndexer, SparseAttnIndexer

    present = op_registry_oot.get(SparseAttnIndexer.__name__)
    if present is None:
        SparseAttnIndexer.register_oot(LightningSparseAttnIndexer)
    elif present is not LightningSparseAttnIndexer:
        _warn(f"SparseAttnIndexer must be vLLM's own, got {present.__module__}.{present.__name__}")
        return
    # Piecewise graphs are split at these ops: ours reads the metadata of each step.
    if QUALIFIED_NAME not in CompilationConfig._attention_ops:
        CompilationConfig._attention_ops.append(QUALIFIED_NAME)


def _warn(reason: str) -> None:
    warnings.warn(f"lightning_indexer left vLLM as it was: {reason}", RuntimeWarning, stacklevel=3)


def share_topk_indices(draft: nn.Module) -> list[TopkIndicesBuffer]:
    """Gives `draft.model` the two callables that vLLM's `MTPSpeculator` drives.

    The hooks call `draft.model.set_skip_topk(skip)` and `draft.model.compact_topk_indices(rows)`,
    and vLLM asks with hasattr whether it may. Ours reach every `LightningIndexer` inside
    `draft.model` and compact all their buffers in one launch. vLLM gives no account of its rounds,
    so buffers stay UNTRACKED and refuse nothing.

    Args:
        draft: what vLLM's speculator holds as its model.

    Returns:
        The selection buffers, each once.

    Raises:
        TypeError: draft or draft.model is no module.
        ValueError: there is no LightningIndexer, or draft.model has such a callable already.
    """
    inner: Any = getattr(draft, "model", None)
    for name, module in (("draft", draft), ("draft.model", inner)):
        if not isinstance(module, nn.Module):
            raise TypeError(f"{name} must be a torch.nn.Module, got {type(module).__name__}")
    if not indexers_of(inner):
        raise ValueError(f"draft.model must hold a LightningIndexer, got {type(inner).__name__}")
    callables = {
        "set_skip_topk": partial(set_skip_topk, inner),
        "compact_topk_indices": partial(compact_topk_indices, inner),
    }
    for name in callables:
        if hasattr(inner, name):
            raise ValueError(f"draft.model must not have {name}, got {type(inner).__name__}'s own")
    for name, function in callables.items():
        setattr(inner, name, function)
    return topk_buffers_of(inner)
