"""`SparseAttnIndexer` of vLLM with our scores and our selection. Imports vLLM: see `vllm.py`."""

from __future__ import annotations

import sys
from typing import Any

import torch
from vllm.compilation.breakable_cudagraph import (  # type: ignore[import-not-found]
    eager_break_during_capture,
)
from vllm.config import CUDAGraphMode  # type: ignore[import-not-found]
from vllm.forward_context import get_forward_context  # type: ignore[import-not-found]
from vllm.model_executor.layers.sparse_attn_indexer import (  # type: ignore[import-not-found]
    SparseAttnIndexer,
)
from vllm.model_executor.layers.sparse_attn_indexer import (
    sparse_attn_indexer as stock_sparse_attn_indexer,
)
from vllm.platforms import current_platform  # type: ignore[import-not-found]
from vllm.utils.deep_gemm import mqa_logits_use_mx_scales  # type: ignore[import-not-found]
from vllm.utils.torch_utils import _resolve_layer_name  # type: ignore[import-not-found]

from ..kernels.registry import NAMESPACE, register_op
from ..kernels.select_topk import GPU_WORKSPACE_BYTES
from ..kernels.write_index_k import write_index_k
from .vllm_rows import select_batch

OP_NAME = "vllm_sparse_attn_indexer"
QUALIFIED_NAME = f"{NAMESPACE}::{OP_NAME}"
#: DeepSeek-V3.2 and GLM-5 on CUDA: builds the layer, but calls the function beneath it.
FUSED_MODULE = "vllm.models.deepseek_v32.attention"


def covers_platform() -> bool:
    """Whether caches here hold e4m3fn and fp32 scales in plain pages.

    On sm_100 vLLM stores four bytes of exponent as a scale; on ROCm e4m3fnuz or shuffled pages.
    """
    other = current_platform.is_rocm() or current_platform.is_xpu()
    return not other and not mqa_logits_use_mx_scales()


@eager_break_during_capture
def _sparse_attn_indexer(
    hidden_states: torch.Tensor,
    layer: str,
    kv_cache: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor | None,
    weights: torch.Tensor,
    scale_format: str,
    max_model_len: int,
    *,
    out: torch.Tensor,
) -> None:
    """Rows of `out` [tokens, k] ← selections; k, if given, goes to the cache first."""
    context = get_forward_context()
    if not isinstance(context.attn_metadata, dict):  # vLLM measures the peak of memory
        torch.empty(GPU_WORKSPACE_BYTES, dtype=torch.uint8, device=hidden_states.device)
        return
    metadata = context.attn_metadata[layer]
    if k is not None:
        tokens = min(k.shape[0], metadata.slot_mapping.shape[0])  # either may be padded
        write_index_k(
            kv_cache,
            k[:tokens],
            metadata.slot_mapping[:tokens],
            page_size=kv_cache.shape[1],
            scale_format=scale_format,
        )
    out[: hidden_states.shape[0]] = -1  # padding, and prefills that vLLM gives no chunk
    graph = context.cudagraph_runtime_mode == CUDAGraphMode.FULL  # serves longer contexts later
    select_batch(
        metadata,
        kv_cache,
        q,
        weights.float(),
        out,
        max_context_len=max_model_len if graph else min(metadata.max_seq_len, max_model_len),
    )


# Like vLLM's own op, it does not declare the cache as written: functionalisation would copy it.
_OP = register_op(
    f"{OP_NAME}(Tensor hidden_states, str layer, Tensor kv_cache, Tensor q, Tensor? k,"
    " Tensor weights, str scale_format, int max_model_len, *, Tensor(a!) out) -> ()",
    _sparse_attn_indexer,
    mutates="out",
)


class LightningSparseAttnIndexer(SparseAttnIndexer):
    """vLLM's layer; what our ops do not cover runs vLLM's own path.

    Covered: fp8 caches with one scale a key, prefill, decode and speculative decode, also of
    unequal lengths, piecewise and full graphs. Not covered: fp4 caches, candidate blocks, decode
    and prefill context parallelism, sm_100's and ROCm's cache bytes.

    Selections are exact and the same on every tensor-parallel rank: nothing is exchanged.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        parallel = self.dcp_world_size > 1 or self.use_pcp
        special = self.use_fp4_cache or self.candidate_blocks is not None
        one_scale = self.quant_block_size == self.head_dim
        self.covered = covers_platform() and one_scale and not parallel and not special
        fused = sys.modules.get(FUSED_MODULE)
        if fused is not None:  # a layer of it may be what is being built
            fused.sparse_attn_indexer = sparse_attn_indexer  # type: ignore[attr-defined]

    def forward_native(self, hidden_states: Any, q_quant: Any, k: Any, weights: Any) -> Any:
        """Ours, or what vLLM's class does on this platform."""
        if self.covered:
            return self._select(hidden_states, q_quant, k, weights)
        return super().forward_native(hidden_states, q_quant, k, weights)

    def forward_cuda(self, hidden_states: Any, q_quant: Any, k: Any, weights: Any) -> Any:
        """As `forward_native`."""
        if self.covered:
            return self._select(hidden_states, q_quant, k, weights)
        return super().forward_cuda(hidden_states, q_quant, k, weights)

    def forward_cpu(self, hidden_states: Any, q_quant: Any, k: Any, weights: Any) -> Any:
        """As `forward_native`."""
        if self.covered:
            return self._select(hidden_states, q_quant, k, weights)
        return super().forward_cpu(hidden_states, q_quant, k, weights)

    def _select(
        self,
        hidden_states: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor | None,
        weights: torch.Tensor,
    ) -> torch.Tensor:
        _OP(
            hidden_states,
            self.k_cache.prefix,
            self.k_cache.kv_cache,
            q,
            None if self.skip_k_cache_insert else k,
            weights,
            _scale_format(self.scale_fmt),
            self.max_model_len,
            out=self.topk_indices_buffer[:, : self.topk_tokens],
        )
        return self.topk_indices_buffer


def sparse_attn_indexer(
    hidden_states: torch.Tensor,
    k_cache_prefix: Any,
    kv_cache: torch.Tensor,
    q_quant: torch.Tensor,
    q_scale: torch.Tensor | None,
    k: torch.Tensor | None,
    weights: torch.Tensor,
    quant_block_size: int,
    scale_fmt: str | None,
    topk_tokens: int,
    head_dim: int,
    max_model_len: int,
    total_seq_lens: int,
    topk_indices_buffer: torch.Tensor,
    skip_k_cache_insert: bool,
    **options: Any,
) -> torch.Tensor:
    """vLLM's function of this name, for its fused DeepSeek-V3.2 and GLM-5 layers, which call it."""
    parallel = options.get("dcp_world_size", 1) > 1 or options.get("use_pcp", False)
    special = q_scale is not None or options.get("candidate_blocks") is not None
    if not covers_platform() or quant_block_size != head_dim or parallel or special:
        return stock_sparse_attn_indexer(
            hidden_states,
            k_cache_prefix,
            kv_cache,
            q_quant,
            q_scale,
            k,
            weights,
            quant_block_size,
            scale_fmt,
            topk_tokens,
            head_dim,
            max_model_len,
            total_seq_lens,
            topk_indices_buffer,
            skip_k_cache_insert,
            **options,
        )
    _sparse_attn_indexer(
        hidden_states,
        _resolve_layer_name(k_cache_prefix),
        kv_cache,
        q_quant,
        None if skip_k_cache_insert else k,
        weights,
        _scale_format(scale_fmt),
        max_model_len,
        out=topk_indices_buffer[:, :topk_tokens],
    )
    return topk_indices_buffer


def _scale_format(scale_fmt: str | None) -> str:
    return "ue8m0" if scale_fmt == "ue8m0" else "fp32"
