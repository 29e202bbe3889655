"""How draft tokens are chosen: greedily, or drawn from probabilities that verification needs."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..kernels.checks import check_tensor
from .config import SpeculatorConfig
from .sampling import Purpose, SamplingParams, draw_tokens, token_probabilities, uniform_at


class DraftSampler:
    """Chooses tokens from a draft's logits, in tensors of fixed address that graphs may hold.

    Attributes:
        sampling: whether tokens are drawn now; decided in Python, so a graph has it baked in.
        modes: the values that `sampling` can have.
        draft_probs: [max_num_reqs, K, V] float64: what draft k of request r was drawn from; None
            without the config's vocab_size.
    """

    def __init__(self, config: SpeculatorConfig) -> None:
        self.sampling = False
        self.modes: tuple[bool, ...] = (False,)
        self.draft_probs: torch.Tensor | None = None
        if config.vocab_size is None:
            return
        self.modes = (False, True)
        reqs, vocab, device = config.max_num_reqs, config.vocab_size, config.device
        self._params = SamplingParams(
            torch.zeros(reqs, dtype=torch.float32, device=device),
            torch.ones(reqs, dtype=torch.float32, device=device),
            torch.zeros(reqs, dtype=torch.int64, device=device),
        )
        self._step_probs = torch.zeros((reqs, vocab), dtype=torch.float64, device=device)
        self.draft_probs = self._step_probs.new_zeros((reqs, config.num_speculative_steps, vocab))

    def begin(self, params: SamplingParams | None) -> None:
        """A round of requests with these parameters, or a greedy one."""
        self.sampling = params is not None
        if params is not None:
            reqs = params.num_reqs
            self._params.temperature[:reqs] = params.temperature
            self._params.top_p[:reqs] = params.top_p
            self._params.seed[:reqs] = params.seed

    def each_mode(self) -> Iterator[bool]:
        """Sets `sampling` to each of `modes` in turn."""
        for sampling in self.modes:
            self.sampling = sampling
            yield sampling

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What `choose` and `keep` read and write in this round."""
        if self.draft_probs is None or not self.sampling:
            return ()
        params = self._params
        drawing = (params.temperature, params.top_p, params.seed)
        return *drawing, self._step_probs, self.draft_probs

    def choose(self, logits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[R] int64: the tokens that follow rows at positions [R] with logits [R, V].

        A draft's row holds the token after its position, and its output is the one after that.
        """
        if not self.sampling:
            return logits.argmax(dim=-1)
        reqs = logits.shape[0]
        check_tensor("the draft's logits", logits, shape=(reqs, self._step_probs.shape[1]))
        params = self._params.rows(slice(reqs))
        probs = token_probabilities(logits, params)
        self._step_probs[:reqs] = probs
        return draw_tokens(probs, uniform_at(params.seed, positions + 2, Purpose.DRAFT))

    def keep(self, step: int, num_reqs: int) -> None:
        """Files what was just drawn from under `step`, a number that a graph would bake in."""
        if self.draft_probs is not None and self.sampling:
            self.draft_probs[:num_reqs, step] = self._step_probs[:num_reqs]
