"""A small MTP draft on vLLM's forward context: our indexer, vLLM's cache layer, mean attention."""

import torch
from torch import nn
from vllm.forward_context import get_forward_context
from vllm.model_executor.models.deepseek_v2 import DeepseekV32IndexerCache
from vllm.v1.attention.backends.mla.indexer import DeepseekV32IndexerMetadata
from vllm_engine import HEAD_DIM, HF_CONFIG, LAYER, MAX_TOKENS, NUM_PAGES, PAGE, TOPK

import lightning_indexer as li
from lightning_indexer.adapters.vllm_rows import ragged_decodes

HIDDEN = HF_CONFIG["hidden_size"]


def requests_of_rows(metadata: DeepseekV32IndexerMetadata) -> torch.Tensor:
    """The line of metadata.block_table of each token, [tokens] int32."""
    parts = []
    if metadata.num_decodes:
        each = metadata.decode.per_req_decode_lens
        unused = each.new_zeros(each.shape[0], 1)
        parts.append(ragged_decodes(unused, each, metadata.num_decode_tokens)[1])
    for chunk in metadata.prefill.chunks if metadata.num_prefills else ():
        first = metadata.num_decodes  # tests have one chunk: all prefills
        parts.append(first + chunk.token_to_seq[chunk.cu_seqlen_ks.long()])
    return torch.cat(parts).to(torch.int32)


class Predictor(nn.Module):
    """hidden' = tanh(x + mean of the selected tokens' values), x = embedding + projected hidden."""

    def __init__(self, cache_config: object, seed: int) -> None:
        super().__init__()
        config = li.IndexerConfig.from_hf(HF_CONFIG)
        self.buffer = li.TopkIndicesBuffer(MAX_TOKENS, TOPK)
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(HF_CONFIG["vocab_size"], HIDDEN)
        self.project = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.compress = nn.Linear(HIDDEN, HF_CONFIG["q_lora_rank"], bias=False)
        self.value = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.head = nn.Linear(HIDDEN, HF_CONFIG["vocab_size"], bias=False)
        self.indexer = li.LightningIndexer(config, self.buffer)
        self.k_cache = DeepseekV32IndexerCache(HEAD_DIM + 4, torch.uint8, LAYER, cache_config)
        self.k_cache.bind_kv_cache(torch.zeros(NUM_PAGES, 1, PAGE, HEAD_DIM + 4, dtype=torch.uint8))
        self.cache = li.IndexKCache(NUM_PAGES, HEAD_DIM, page_size=PAGE, scale_format="ue8m0")
        self.cache.data = self.k_cache.kv_cache
        self.values = torch.zeros(NUM_PAGES * PAGE, HIDDEN)
        self.log: list[tuple] = []
        self.step0_rows: torch.Tensor | None = None

    def inputs(self, input_ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return self.embedding(input_ids.long()) + self.project(hidden)

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor
    ) -> torch.Tensor:
        context = get_forward_context()
        metadata, slots = context.attn_metadata[LAYER], context.slot_mapping[LAYER]
        tokens = input_ids.shape[0]
        self.log.append(("forward", tokens, self.indexer.skip_topk))
        x, requests = self.inputs(input_ids, hidden), requests_of_rows(metadata)
        table = metadata.block_table
        rows = self.indexer(
            x,
            self.compress(x),
            positions,
            cache=self.cache,
            slot_mapping=slots[:tokens],
            block_table=table,
            row_to_request=requests,
            context_lens=(positions + 1).to(torch.int32),
            max_context_len=table.shape[1] * PAGE,
        )
        if not self.indexer.skip_topk:
            self.step0_rows = rows.clone()
        self.values[slots[:tokens]] = self.value(x)
        chosen = li.indices_to_slots(rows, table, requests, PAGE)
        return attend(x, self.values, chosen)


def attend(x: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    kept = (slots >= 0).unsqueeze(-1)
    total = (values[slots.clamp(min=0).long()] * kept).sum(1)
    return torch.tanh(x + total / kept.sum(1).clamp(min=1))


class Draft(nn.Module):
    """What vLLM's speculator holds: `model`, forward and compute_logits."""

    def __init__(self, cache_config: object, seed: int) -> None:
        super().__init__()
        self.model = Predictor(cache_config, seed)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert inputs_embeds is None
        return self.model(input_ids, positions, hidden_states)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.model.head(hidden)
