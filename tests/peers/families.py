"""All peers, in the order of the tables."""

from . import (
    torch_selection,
    transformers_attention,
    transformers_indexers,
    vllm_attention,
    vllm_indices,
    vllm_scores,
)

PEERS = (
    *torch_selection.PEERS,
    *transformers_indexers.PEERS,
    *transformers_attention.PEERS,
    *vllm_indices.PEERS,
    *vllm_scores.PEERS,
    *vllm_attention.PEERS,
)
