"""DeepSeek-V3.2 modules of transformers, stock and patched, in turn, with the memory each takes.

"indexer" is DeepseekV32Indexer: projections, RoPE, cache, scores, selection. "attention" is
DeepseekV32Attention, its indexer included. Both continue a cached context by T rows, with random
weights in the shapes of the real model; "narrow" has a smaller hidden size and q_lora_rank, so that
the projections, which are not ours, weigh little. Needs transformers >= 5.24. The answers are
compared first: if they differ by more than rounding explains, nothing is timed and the exit code
is 1.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from harness import Bench, parse_arguments
from lightning_indexer.adapters import transformers as li_transformers
from lightning_indexer.adapters.transformers_indexer import queries_keys_weights
from lightning_indexer.kernels.mqa_logits import mqa_logits
from peak_memory import peak_bytes

try:
    from transformers import DeepseekV32Config, DynamicCache
    from transformers.models.deepseek_v32 import modeling_deepseek_v32 as modeling
except ModuleNotFoundError:  # the other benches of this folder need no client
    print("bench_transformers: left out, transformers is not installed")
    sys.exit(0)

REAL: dict[str, Any] = {}  # DeepSeek-V3.2's, the defaults of its configuration
NARROW = {"hidden_size": 1024, "q_lora_rank": 256}
SMALL = {
    "hidden_size": 256,
    "q_lora_rank": 128,
    "index_n_heads": 16,
    "index_head_dim": 64,
    "index_topk": 128,
    "kv_lora_rank": 64,
    "qk_rope_head_dim": 32,
}


@dataclass(frozen=True)
class Case:
    """The last T of L positions of one sequence, in one attention layer."""

    rows: int
    length: int
    heads: int  # of the attention
    widths: str = "real"

    def __str__(self) -> str:
        config = self.config()
        sizes = f"H={config.index_n_heads} D={config.index_head_dim} k={config.index_topk}"
        return f"{self.widths} T={self.rows} L={self.length} {sizes} Hq={self.heads}"

    def config(self) -> DeepseekV32Config:
        """Of one layer."""
        sizes = {"real": REAL, "narrow": NARROW, "small": SMALL}[self.widths]
        config = DeepseekV32Config(num_hidden_layers=1, num_attention_heads=self.heads, **sizes)
        config._attn_implementation = "sdpa"
        return config

    def inputs(self, seed: int, device: torch.device) -> Inputs:
        """Normal hidden states, on a cached context of normal keys."""
        torch.manual_seed(seed)
        with torch.device(device), torch.no_grad():
            return Inputs(self)


class Inputs:
    """The module, and what a call of it or of its indexer takes."""

    def __init__(self, case: Case) -> None:
        config = self.config = case.config()
        self.attention = modeling.DeepseekV32Attention(config, 0).requires_grad_(False).eval()
        past = case.length - case.rows
        self.latent = torch.randn(1, 1, past, config.kv_lora_rank)
        self.rope = torch.randn(1, 1, past, config.qk_rope_head_dim)
        self.index_keys = torch.randn(1, past, config.index_head_dim)
        hidden = torch.randn(1, case.rows, config.hidden_size)
        positions = torch.arange(past, case.length)
        rotary = modeling.DeepseekV32RotaryEmbedding(config)
        self.call = {
            "hidden_states": hidden,
            "position_embeddings": rotary(hidden, position_ids=positions[None]),
            "position_ids": positions[None],
        }
        self.mask = torch.arange(case.length) <= positions[:, None]  # [T, L]
        self.q_resid = self.attention.q_a_layernorm(self.attention.q_a_proj(hidden))

    def cache(self) -> DynamicCache:
        """The cached context, as a forward pass finds it."""
        cache = DynamicCache(config=self.config)
        cache.update_indexer(self.index_keys, 0)
        cache.update(self.latent, self.rope, 0)
        return cache


@torch.no_grad()
def run(x: Inputs, what: str, patched: bool) -> torch.Tensor:
    """The indices [1, T, k] or outputs [1, T, hidden]; patching takes about 0.1 ms."""
    if patched:
        li_transformers.patch(x.attention, attention=what == "attention")
    try:
        if what == "attention":
            return x.attention(**x.call, attention_mask=x.mask[None, None], cache=x.cache())[0]
        own = {"q_resid": x.q_resid, "attention_mask": x.mask[None]}
        return x.attention.indexer(**x.call, **own, cache=x.cache())
    finally:
        if patched:
            li_transformers.unpatch(x.attention)


def calls(what: str) -> dict[str, partial[torch.Tensor]]:
    return {
        "ours": partial(run, what=what, patched=True),
        "transformers": partial(run, what=what, patched=False),
    }


@torch.no_grad()
def check(x: Inputs) -> None:
    """Raises AssertionError if stock left out a clearly better key, or outputs differ."""
    indices = {name: call(x)[0].long() for name, call in calls("indexer").items()}
    embeddings = x.call["position_embeddings"]
    q, k, weights = queries_keys_weights(
        x.attention.indexer, x.call["hidden_states"], x.q_resid, embeddings, "half_split"
    )
    q, k, weights = q[0], torch.cat([x.index_keys, k], dim=1)[0], weights[0]
    ends = x.mask.sum(1, dtype=torch.int32)
    windows = torch.zeros_like(ends), ends
    scores = mqa_logits(q, k, weights, *windows)
    bound = mqa_logits(q.abs(), k.abs(), weights.abs(), *windows).clamp(min=0)
    bound *= 2 * 2.0**-24 * (q.shape[1] + q.shape[2] + 3)
    least = scores.gather(1, indices["ours"]).amin(1, keepdim=True)
    slack = scores - least + 2 * bound
    assert (slack.gather(1, indices["transformers"]) >= 0).all(), "the selections differ"
    same = (indices["ours"].sort(1).values == indices["transformers"].sort(1).values).all(1)
    assert same.any(), "no row selects the same"
    ours, stock = (call(x)[0] for call in calls("attention").values())
    error = (ours - stock)[same].abs().amax()
    assert error <= 1e-5 * stock.abs().amax(), f"outputs differ by {error}"


def verdict(case: str, ratio: float, peaks: dict[str, int | None]) -> str:
    own, stock = peaks["ours"], peaks["transformers"]
    memory = "not measured" if not own or not stock else f"1/{stock / own:.1f}"
    return f"{case}: {ratio:.2f} times faster than transformers, peak memory {memory} of its"


def main() -> int:
    bench = Bench("transformers", parse_arguments(__doc__))
    if bench.quick:
        small = Case(64, 1024, 4, "small")
        runs = (("indexer", small), ("attention", small))
    else:
        real, narrow = Case(512, 8192, 128), Case(512, 8192, 1, "narrow")
        runs = (("indexer", real), ("indexer", narrow), ("attention", real))
    lines = []
    for what, case in runs:
        sets = bench.input_sets(lambda seed, case=case: case.inputs(seed, bench.device))
        try:
            check(sets[0])
        except AssertionError as error:
            print(f"{case}: not timed: {error}", file=sys.stderr)
            return 1
        peaks = {
            name: peak_bytes(call, case.inputs, bench.device) for name, call in calls(what).items()
        }
        name = f"{what} {case}"
        ratios = bench.race(name, calls(what), sets, peaks)
        lines.append(verdict(name, ratios["transformers"], peaks))
    bench.finish()
    print(*lines, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
