"""Real vLLM objects on a CPU: a config, block tables, metadata builders, an MTP speculator."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from vllm.config import (
    CacheConfig,
    CompilationConfig,
    DeviceConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.config.compilation import CUDAGraphMode
from vllm.distributed import parallel_state
from vllm.platforms import current_platform
from vllm.utils import torch_utils
from vllm.v1.attention.backends.mla.indexer import DeepseekV32IndexerMetadata
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MLAAttentionSpec
from vllm.v1.worker.gpu import buffer_utils
from vllm.v1.worker.gpu.attn_utils import build_attn_metadata
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers
from vllm.v1.worker.utils import AttentionGroup

CPU = torch.device("cpu")
LAYER = "model.layers.2.self_attn.indexer.k_cache"
PAGE, HEAD_DIM, TOPK = 64, 128, 12
MAX_REQS, MAX_TOKENS, MAX_MODEL_LEN = 6, 96, 256
PAGES_A_LINE = MAX_MODEL_LEN // PAGE
NUM_PAGES = 1 + MAX_REQS * PAGES_A_LINE
HF_CONFIG = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
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
    "max_position_embeddings": MAX_MODEL_LEN,
    "index_topk": TOPK,
    "index_head_dim": HEAD_DIM,
    "index_n_heads": 16,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
    "index_share_for_mtp_iteration": True,
    "rope_theta": 10000.0,
    "torch_dtype": "float32",
}


def give_the_platform_a_cpu(patch: Any) -> None:
    """Answers that vLLM's platform for a machine without accelerator does not have.

    Everything else of vLLM is as installed.
    """
    patch.setattr(current_platform, "device_type", "cpu")
    patch.setattr(type(current_platform), "num_compute_units", classmethod(lambda *_: 1))
    patch.setattr(buffer_utils, "is_uva_available", lambda: False)
    patch.setattr(torch_utils, "PIN_MEMORY", False)


def engine_config(folder: Path, draft_tokens: int, **options: Any) -> VllmConfig:
    """vLLM's configuration of a tiny DeepSeek-V3.2 with an MTP draft; `options` of its config."""
    (folder / "config.json").write_text(json.dumps(HF_CONFIG))
    model = ModelConfig(
        model=str(folder), skip_tokenizer_init=True, dtype="float32", enforce_eager=True
    )
    parallel = ParallelConfig()
    speculative = SpeculativeConfig(
        method="mtp",
        num_speculative_tokens=draft_tokens,
        model=str(folder),
        target_model_config=model,
        target_parallel_config=parallel,
    )
    return VllmConfig(
        model_config=model,
        speculative_config=speculative,
        parallel_config=parallel,
        device_config=DeviceConfig(device="cpu"),
        cache_config=CacheConfig(block_size=PAGE),
        compilation_config=CompilationConfig(**options),
        scheduler_config=SchedulerConfig(
            max_num_seqs=MAX_REQS,
            max_num_batched_tokens=MAX_TOKENS,
            max_model_len=MAX_MODEL_LEN,
            is_encoder_decoder=False,
        ),
    )


def cache_spec() -> MLAAttentionSpec:
    return MLAAttentionSpec(
        block_size=PAGE,
        num_kv_heads=1,
        max_tp_shards=1,
        head_size=HEAD_DIM + 4,
        dtype=torch.uint8,
    )


def cache_config() -> KVCacheConfig:
    group = KVCacheGroupSpec(layer_names=[LAYER], kv_cache_spec=cache_spec())
    return KVCacheConfig(num_blocks=NUM_PAGES, kv_cache_tensors=[], kv_cache_groups=[group])


def block_tables(lengths: list[int], draft_tokens: int, g: torch.Generator) -> BlockTables:
    """vLLM's tables with random pages (0 is its null block) for each request and its drafts."""
    tables = BlockTables([PAGE], MAX_REQS, MAX_TOKENS, [PAGES_A_LINE], CPU)
    free = (1 + torch.randperm(NUM_PAGES - 1, generator=g)).tolist()
    for request, length in enumerate(lengths):
        count = -(-min(length + draft_tokens, MAX_MODEL_LEN) // PAGE)
        tables.append_block_ids(request, ([free.pop() for _ in range(count)],), overwrite=True)
    tables.apply_staged_writes()
    return tables


def slot(tables: BlockTables, request: int, position: int) -> int:
    """Where a token's key lies, by the book."""
    page = int(tables.block_tables[0].gpu[request, position // PAGE])
    return page * PAGE + position % PAGE


def input_batch(lengths: list[int], scheduled: list[int], ids: torch.Tensor) -> InputBatch:
    """A step of vLLM: request r runs its last scheduled[r] of lengths[r] tokens."""
    requests, tokens = len(lengths), sum(scheduled)
    starts = np.concatenate([[0], np.cumsum(scheduled)]).astype(np.int32)
    spans = zip(lengths, scheduled, strict=True)
    positions = torch.cat([torch.arange(n - q, n) for n, q in spans])
    batch = InputBatch.make_dummy(requests, tokens, InputBuffers(MAX_REQS, MAX_TOKENS, CPU))
    batch.num_scheduled_tokens = np.array(scheduled, dtype=np.int32)
    batch.query_start_loc_np = starts
    batch.query_start_loc = torch.from_numpy(starts.copy())
    batch.seq_lens = torch.tensor(lengths, dtype=torch.int32)
    batch.seq_lens_cpu_upper_bound = batch.seq_lens.clone()
    batch.input_ids, batch.positions = ids.to(torch.int32), positions
    batch.idx_mapping = torch.arange(requests, dtype=torch.int32)
    return batch


def step_metadata(
    groups: list[list[AttentionGroup]], batch: InputBatch, tables: BlockTables
) -> tuple[dict[str, DeepseekV32IndexerMetadata], dict[str, torch.Tensor]]:
    """What vLLM's runner hands a model for a step: metadata and slots by layer."""
    requests, tokens = batch.num_reqs, batch.num_tokens
    lines = tables.gather_block_tables(batch.idx_mapping, requests)
    slots = tables.compute_slot_mappings(
        batch.idx_mapping, batch.query_start_loc, batch.positions, tokens
    )
    metadata = build_attn_metadata(
        attn_groups=groups,
        num_reqs=requests,
        num_tokens=tokens,
        query_start_loc_gpu=batch.query_start_loc,
        query_start_loc_cpu=torch.from_numpy(batch.query_start_loc_np),
        max_query_len=int(batch.num_scheduled_tokens.max()),
        seq_lens=batch.seq_lens,
        max_seq_len=int(batch.seq_lens.max()),
        block_tables=lines,
        slot_mappings=slots,
        kv_cache_config=cache_config(),
        seq_lens_cpu_upper_bound=batch.seq_lens_cpu_upper_bound,
        positions=batch.positions,
        is_prefilling=torch.zeros(requests, dtype=torch.bool),
    )
    return metadata, {LAYER: slots[0].clone()}


def one_process_group(folder: Path) -> None:
    """vLLM's parallel state for a world of one; once a process."""
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.init_distributed_environment(1, 0, f"file://{folder / 'store'}", 0, "gloo")
        parallel_state.initialize_model_parallel(1, 1)


def load_draft(speculator: Any, make: Callable[[], torch.nn.Module]) -> None:
    """vLLM's `load_model`; a module made here takes the place of what its loader reads."""
    name = "vllm.v1.worker.gpu.spec_decode.mtp.speculator.load_eagle_model"
    with mock.patch(name, lambda *_: make()):
        speculator.load_model(torch.nn.Module())


def attach(speculator: Any, tables: BlockTables) -> None:
    """vLLM's attention groups, builders, tables and graph managers (none captures)."""
    buffers = InputBuffers(MAX_REQS, MAX_TOKENS, CPU)
    speculator.set_attn(SimpleNamespace(), cache_config(), tables, buffers, [])
    speculator.init_cudagraph_manager(CUDAGraphMode.NONE)
