"""The limits that a speculator is built for."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..kernels.checks import check_int


@dataclass(frozen=True, kw_only=True)
class SpeculatorConfig:
    """Limits of a speculator; tensors are allocated for them once.

    Args:
        num_speculative_steps: K, draft tokens a round (0 is allowed).
        max_num_reqs: most requests in a round.
        max_num_tokens: most target rows in a round.
        max_model_len: positions a sequence may have.
        hidden_size: width of the target's and the draft's hidden states.
        page_size: S, tokens a cache page.
        prefill_sizes: padded row counts of step 0, ascending; none pads nothing.
        decode_sizes: padded request counts of the later steps, ascending.
        fused_steps: round lengths K whose decode steps 1..K−1 run as one graph (as one between
            refreshes), ascending; rounds with an observer take theirs one by one.
        vocab_size: the draft's vocabulary, to draft by sampling; without it drafting is greedy,
            and no probabilities [max_num_reqs, K, vocab_size] are allocated.
        dtype: of hidden states.
        device: where the draft runs.
    """

    num_speculative_steps: int
    max_num_reqs: int
    max_num_tokens: int
    max_model_len: int
    hidden_size: int
    page_size: int = 64
    prefill_sizes: tuple[int, ...] = ()
    decode_sizes: tuple[int, ...] = ()
    fused_steps: tuple[int, ...] = ()
    vocab_size: int | None = None
    dtype: torch.dtype = torch.float32
    device: torch.device | str | None = None

    def __post_init__(self) -> None:
        check_int("num_speculative_steps", self.num_speculative_steps, minimum=0)
        for name in ("max_num_reqs", "max_num_tokens", "max_model_len", "hidden_size", "page_size"):
            check_int(name, getattr(self, name), minimum=1)
        if self.vocab_size is not None:
            check_int("vocab_size", self.vocab_size, minimum=1)
        for name, least, limit in (
            ("prefill_sizes", 1, self.max_num_tokens),
            ("decode_sizes", 1, self.max_num_reqs),
            ("fused_steps", 2, self.num_speculative_steps),
        ):
            sizes = getattr(self, name)
            outside = any(not least <= size <= limit for size in sizes)
            if outside or list(sizes) != sorted(set(sizes)):
                raise ValueError(f"{name} must ascend within [{least}, {limit}], got {sizes}")
