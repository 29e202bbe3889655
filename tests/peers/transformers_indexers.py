"""The indexers of transformers' DeepseekV32 and GlmMoeDsa: real modules, projections taken out.

Queries come in as `q_resid`, head weights as hidden states and keys through the cache, as in
decoding; without rotary dimensions nothing rotates. What remains is the module's own scoring,
mask and selection.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from lightning_indexer.testing import MqaLogitsContract, TopkContract

from .peer import Peer, Probe
from .torch_selection import AGAIN, TIES, stricter

MODULES = {
    "DeepseekV32": "transformers.models.deepseek_v32.modeling_deepseek_v32",
    "GlmMoeDsa": "transformers.models.glm_moe_dsa.modeling_glm_moe_dsa",
}


class Keys:
    """A cache that holds the keys already."""

    def __init__(self, keys: torch.Tensor) -> None:
        self.keys = keys

    def update_indexer(self, _new: torch.Tensor, _layer: int) -> torch.Tensor:
        return self.keys.unsqueeze(0)


class _Given(nn.Module):
    """A projection that hands on what it is given; its weight says in which dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class _NoKey(nn.Module):
    """A projection to a key that nobody looks at."""

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.new_zeros((*x.shape[:-1], self.head_dim))


@lru_cache(maxsize=64)
def indexer(family: str, heads: int, head_dim: int) -> Any:
    """The family's indexer without projections, norm and rotary dimensions."""
    config = SimpleNamespace(
        hidden_size=1,
        index_n_heads=heads,
        index_head_dim=head_dim,
        qk_rope_head_dim=0,
        index_topk=1,
        q_lora_rank=1,
    )
    module = getattr(import_module(MODULES[family]), f"{family}Indexer")(config, 0)
    module.wq_b, module.weights_proj, module.k_norm = _Given(), _Given(), nn.Identity()
    module.wk = _NoKey(head_dim)
    return module


class _Scores(TorchFunctionMode):
    """Keeps what `Tensor.topk` is called on."""

    seen: torch.Tensor

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.topk:
            self.seen = args[0]
        return func(*args, **(kwargs or {}))


def _visible(
    shape: tuple[int, int], starts: torch.Tensor | None, ends: torch.Tensor | None
) -> torch.Tensor:
    places, seen = torch.arange(shape[1]), torch.ones(shape, dtype=torch.bool)
    if starts is not None:
        seen &= places >= starts[:, None]
    if ends is not None:
        seen &= places < ends[:, None]
    return seen


def _run(
    module: Any, q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor, seen: torch.Tensor
) -> torch.Tensor:
    nothing = q.new_zeros((1, q.shape[0], 0))
    chosen = module(
        weights.unsqueeze(0),
        q.flatten(1).unsqueeze(0),
        (nothing, nothing),
        seen.unsqueeze(0),
        None,
        cache=Keys(k),
    )
    return chosen.squeeze(0)


def scores_of(family: str) -> Callable[..., torch.Tensor]:
    """The scores that the indexer selects from.

    Its factor (H·D)^-0.5 is a power of two for the heads and dims drawn, and taken back exactly.
    """

    def scores(q, k, weights, row_starts, row_ends):
        _, heads, dim = q.shape
        seen = _visible((q.shape[0], k.shape[0]), row_starts, row_ends)
        with _Scores() as watch:
            _run(indexer(family, heads, dim), q, k, weights * math.sqrt(heads * dim), seen)
        return watch.seen.squeeze(0)

    scores.__name__ = f"{family}Indexer_scores"
    return scores


def selection_of(family: str) -> Callable[..., torch.Tensor]:
    """The indexer's choice from given scores.

    Key s is the s-th unit vector. Of four heads one holds max(x, 0) and one max(−x, 0), so that the
    weighted sum is x itself; the factors D^-0.5 and H^-0.5 are set to 1, and taken back exactly.
    """

    def select(
        logits: torch.Tensor,
        k: int,
        row_starts: torch.Tensor | None = None,
        row_ends: torch.Tensor | None = None,
    ) -> torch.Tensor:
        rows, length = logits.shape
        zeros = torch.zeros_like(logits)
        q = torch.stack([logits, -logits, zeros, zeros], dim=1)
        weights = torch.tensor([2.0, -2.0, 0.0, 0.0]).expand(rows, 4)
        module = indexer(family, 4, length)
        module.index_topk, module.softmax_scale = k, 1.0
        keys = torch.eye(length, dtype=logits.dtype)
        return _run(module, q, keys, weights, _visible((rows, length), row_starts, row_ends))

    select.__name__ = f"{family}Indexer"
    return select


SELECTION = TopkContract(
    order="any",
    tie_rule="any",
    nan="absent",
    neg_inf="absent",
    pos_inf=False,
    padding=None,
    windows=("none",),
    deterministic=False,
    empty_sizes=False,
    max_length=300,
)
SHORT = replace(
    SELECTION,
    padding=-1,
    k_past_length=False,
    windows=("ends", "both"),
    positions="absolute",
)
SCORES = MqaLogitsContract(
    dtypes=("fp32", "bf16", "fp16"),
    scaled=(False,),
    batch_invariant=False,
    special_values=False,
    heads=(1, 4, 16, 64),
    head_dims=(16, 64),
    empty_sizes=False,
)


def _peers(family: str, rope: str) -> tuple[Peer, Peer]:
    source = f"docstring of `{family}Indexer.forward`, {MODULES[family].replace('.', '/')}.py"
    scores = Peer(
        name=f"{family}Indexer: scores",
        package="transformers",
        source=source,
        promises="Σ_h weight·D^-0.5·q·k in fp32, hidden tokens masked; judged with the ReLU that"
        f" the code has, and −inf where a boolean mask hides; without the {rope} rotary part",
        op="mqa_logits",
        load=lambda: scores_of(family),
        contract=SCORES,
        probes=(
            Probe(
                "a score's bits depend on its query and key alone",
                replace(SCORES, batch_invariant=True),
                ("split over two calls", "move with"),
            ),
            Probe(
                "NaN and infinity in a key reach its scores, and no others",
                replace(SCORES, special_values=True),
                ("scores nan", "scores infinite"),
            ),
        ),
    )
    selection = Peer(
        name=f"{family}Indexer: selection",
        package="transformers",
        source=source,
        promises="int32 indices of the top k tokens; order, ties, NaN and rows of fewer than k"
        " visible tokens are not mentioned",
        op="topk",
        load=lambda: selection_of(family),
        contract=SELECTION,
        probes=(
            *stricter(SELECTION, TIES, "ascending positions", "best first", AGAIN),
            Probe("−1 in rows with fewer than k visible keys", SHORT, ("of normal", "all equal")),
            *stricter(SELECTION, "k > L: −1 past the row"),
        ),
    )
    return scores, selection


PEERS = (*_peers("DeepseekV32", "half-split"), *_peers("GlmMoeDsa", "interleaved"))
