"""The attention of transformers' DeepseekV32 and GlmMoeDsa: real modules, projections taken out.

Latent keys come through the cache and are expanded to keys and values by copying; the selection is
given in place of the indexer's. What remains is the mask made of it, and the attention.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from importlib import import_module
from typing import Any

import torch
from torch import nn

from lightning_indexer.testing import SparseAttentionContract

from .peer import Peer, Probe
from .transformers_indexers import MODULES


class _Latents:
    """A cache that holds the latents already."""

    def __init__(self, kv: torch.Tensor) -> None:
        self.kv = kv[None, None]

    def update(self, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return self.kv, self.kv[..., :0]


class _Chosen(nn.Module):
    """Stands where the indexer does, and has chosen already."""

    def __init__(self) -> None:
        super().__init__()
        self.indices = torch.empty(0)

    def forward(self, *_: Any, **__: Any) -> torch.Tensor:
        return self.indices.unsqueeze(0)


class _Expand(nn.Module):
    """Every head's key is the latent itself, its value the first elements."""

    def __init__(self, heads: int, v_dim: int) -> None:
        super().__init__()
        self.heads, self.v_dim = heads, v_dim

    def forward(self, latent: torch.Tensor) -> torch.Tensor:
        return torch.cat([latent, latent[..., : self.v_dim]], dim=-1).repeat(1, 1, 1, self.heads)


class _NewLatent(nn.Module):
    """A projection to a latent that nobody looks at."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.new_zeros((*x.shape[:-1], self.size))


@lru_cache(maxsize=64)
def attention(family: str, implementation: str, heads: int, dim: int, v_dim: int) -> Any:
    """The family's attention without projections and rotary dimensions."""
    module = import_module(MODULES[family])
    config = getattr(module, f"{family}Config")(
        hidden_size=16,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        q_lora_rank=16,
        kv_lora_rank=dim,
        qk_rope_head_dim=2,
        qk_nope_head_dim=dim,
        v_head_dim=v_dim,
        index_n_heads=1,
        index_head_dim=4,
        num_hidden_layers=1,
        attn_implementation=implementation,
    )
    layer = getattr(module, f"{family}Attention")(config, 0).eval()
    layer.qk_rope_head_dim, layer.qk_head_dim = 0, dim
    for name in ("q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_layernorm", "o_proj"):
        setattr(layer, name, nn.Identity())
    layer.kv_a_proj_with_mqa, layer.kv_b_proj = _NewLatent(dim), _Expand(heads, v_dim)
    layer.indexer = _Chosen()
    return layer


def attention_of(family: str, implementation: str) -> Callable[..., torch.Tensor]:
    """Its output, every slot visible but for the selection."""

    def attend(
        q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor, scale: float, v_dim: int
    ) -> torch.Tensor:
        rows, heads, dim = q.shape
        layer = attention(family, implementation, heads, dim, v_dim)
        layer.scaling, layer.indexer.indices = scale, indices
        nothing = q.new_zeros((1, rows, 0))
        visible = torch.ones(1, 1, rows, len(kv), dtype=torch.bool)
        if implementation == "eager":
            visible = torch.zeros(1, 1, rows, len(kv), dtype=q.dtype)
        with torch.no_grad():
            out = layer(q.flatten(1)[None], (nothing, nothing), visible, cache=_Latents(kv))[0]
        return out.view(rows, heads, v_dim)

    attend.__name__ = f"{family}Attention_{implementation}"
    return attend


ATTENTION = SparseAttentionContract(
    caches=("floats",),
    dims=((16, 16), (24, 16), (40, 32), (96, 64)),
    dtypes=(torch.float32,),
    lse=False,
    empty_rows=False,
    garbage=False,
    repeats=False,
    unlisted="finite",
    empty_sizes=False,
)


def _peer(family: str, implementation: str) -> Peer:
    return Peer(
        name=f"{family}Attention: {implementation}",
        package="transformers",
        source=f"`{family}Attention.forward`, {MODULES[family].replace('.', '/')}.py",
        promises="softmax attention under a mask of the selected indices, which are tokens of the"
        " row; keys that are not selected take part with weight 0",
        op="sparse_attention",
        load=lambda: attention_of(family, implementation),
        contract=ATTENTION,
        probes=(
            Probe("−1 is skipped", replace(ATTENTION, empty_rows=True), ("with normal",)),
            Probe(
                "what is not selected is not read",
                replace(ATTENTION, unlisted="special"),
                ("with normal",),
            ),
            Probe(
                "an index listed twice counts twice",
                replace(ATTENTION, repeats=True),
                ("with normal",),
            ),
        ),
    )


PEERS = (
    _peer("DeepseekV32", "eager"),
    _peer("DeepseekV32", "sdpa"),
    _peer("GlmMoeDsa", "eager"),
    _peer("GlmMoeDsa", "sdpa"),
)
