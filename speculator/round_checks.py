"""Checks of what `propose` is given, all made before anything runs."""

from __future__ import annotations

import torch

from ..kernels.checks import INDEX_DTYPES, check_int, check_tensor
from .config import SpeculatorConfig
from .sampling import SamplingParams
from .step_batch import StepBatch


def check_round(
    config: SpeculatorConfig,
    target: StepBatch,
    num_rejected: torch.Tensor,
    next_tokens: torch.Tensor,
    *,
    steps: int | None,
    caps: torch.Tensor | None,
    sampling: SamplingParams | None,
) -> int:
    """Returns the round's K; raises ValueError or TypeError for a round that cannot be served."""
    most = config.num_speculative_steps
    steps = most if steps is None else check_int("num_speculative_steps", steps, minimum=0)
    for name, got, limit in (
        ("num_speculative_steps", steps, most),
        ("target.num_reqs", target.num_reqs, config.max_num_reqs),
        ("target.num_tokens", target.num_tokens, config.max_num_tokens),
    ):
        if got > limit:
            raise ValueError(f"{name} must be at most {limit}, got {got}")
    if target.page_size != config.page_size:
        raise ValueError(f"target.page_size must be {config.page_size}, got {target.page_size}")
    check_tensor(
        "target.hidden", target.hidden, shape=(target.num_tokens_padded, config.hidden_size)
    )
    reqs = (target.num_reqs,)
    check_tensor("num_rejected", num_rejected, shape=reqs)
    check_tensor("next_tokens", next_tokens, shape=reqs)
    if caps is not None:
        check_tensor("caps", caps, dtype=INDEX_DTYPES, shape=reqs)
    if sampling is not None:
        if config.vocab_size is None:
            raise ValueError("sampling needs the config's vocab_size, got None")
        check_tensor("sampling.seed", sampling.seed, shape=reqs)
    return steps
