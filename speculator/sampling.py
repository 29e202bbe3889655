"""Random numbers, token probabilities and draws that depend on a request alone.

Integers do what floating point would do differently in another batch or on another device: sums,
the top-p cut and the inverse distribution function are exact, so their order never matters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch

from ..kernels.checks import check_tensor

#: Widest vocabulary: the sum of that many weights, each at most 2^40, is exact in int64.
MAX_VOCAB = 2**22
_WEIGHT_BITS = 40
_DRAW_BITS = 62

_GAMMA = 0x9E3779B97F4A7C15


class Purpose(IntEnum):
    """What a random number decides; numbers of different purposes are independent."""

    DRAFT = 0
    ACCEPT = 1
    TARGET = 2


@dataclass(frozen=True)
class SamplingParams:
    """How each request samples; row r is request r's.

    Attributes:
        temperature: [R] float32 logits are divided by; anything not above 0 is greedy.
        top_p: [R] float32: the fewest most probable tokens that reach this share are kept, at
            least one; 1 or more keeps all.
        seed: [R] int64, any value; equal seeds give equal random numbers.
    """

    temperature: torch.Tensor
    top_p: torch.Tensor
    seed: torch.Tensor

    def __post_init__(self) -> None:
        rows = tuple(check_tensor("seed", self.seed, dtype=torch.int64, shape=(None,)).shape)
        for name in ("temperature", "top_p"):
            value = getattr(self, name)
            check_tensor(name, value, dtype=torch.float32, shape=rows, device=self.seed.device)

    @classmethod
    def of(
        cls,
        seeds: Sequence[int],
        *,
        temperature: float | Sequence[float] = 1.0,
        top_p: float | Sequence[float] = 1.0,
        device: torch.device | str | None = None,
    ) -> SamplingParams:
        """Parameters from numbers, one for each seed or one for all.

        Raises:
            ValueError: for a temperature below 0, a top_p outside (0, 1], or too few or many.
        """
        temperatures = [float(t) for t in _each("temperature", temperature, len(seeds))]
        shares = [float(p) for p in _each("top_p", top_p, len(seeds))]
        for t in temperatures:
            if not 0 <= t < float("inf"):
                raise ValueError(f"temperature must be finite and at least 0, got {t}")
        for p in shares:
            if not 0 < p <= 1:
                raise ValueError(f"top_p must be in (0, 1], got {p}")
        return cls(
            torch.tensor(temperatures, dtype=torch.float32, device=device),
            torch.tensor(shares, dtype=torch.float32, device=device),
            torch.tensor([_signed(s) for s in seeds], dtype=torch.int64, device=device),
        )

    @property
    def num_reqs(self) -> int:
        """R."""
        return self.seed.shape[0]

    def rows(self, index: slice | torch.Tensor) -> SamplingParams:
        """The parameters of some requests: views of a slice, copies by row numbers."""
        return SamplingParams(self.temperature[index], self.top_p[index], self.seed[index])

    def repeat_each(self, times: int) -> SamplingParams:
        """Every row `times` times, for requests that have `times` rows of logits each."""
        return SamplingParams(
            self.temperature.repeat_interleave(times),
            self.top_p.repeat_interleave(times),
            self.seed.repeat_interleave(times),
        )


def uniform_at(seed: torch.Tensor, position: torch.Tensor, purpose: Purpose) -> torch.Tensor:
    """Uniform numbers in (0, 1), a function of their arguments and of nothing else.

        h = mix(mix(mix((seed + 1)·γ) + (purpose + 1)·γ) + (position + 1)·γ)  modulo 2^64
        u = (⌊h / 2^12⌋ + 1/2) / 2^52

    Args:
        seed: int64 of any shape.
        position: int64 that broadcasts with it: the place in its sequence of the token that the
            number decides.
        purpose: what it decides.

    Returns:
        float64 of the broadcast shape.

    Guarantees: the same bits on every device, alone or in a batch, in any order; no state.

    Source: `mix` and γ are those of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom
    number generators, OOPSLA 2014); a stream is SplitMix64 from a hash of seed and purpose.
    """
    mixed = _mix64((seed + 1) * _signed(_GAMMA))
    mixed = _mix64(mixed + _signed((int(purpose) + 1) * _GAMMA))
    mixed = _mix64(mixed + (position + 1) * _signed(_GAMMA))
    return (_shift_right(mixed, 12).to(torch.float64) + 0.5) * 2.0**-52


def token_probabilities(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """What each row samples from.

        w[v] = ⌊2^40 · exp((logits[v] − max) / temperature)⌋, 0 outside the top-p set
        p[v] = w[v] / Σ w;  temperature 0: 1 at argmax(logits), the first of equals, 0 elsewhere

    Tokens of equal weight enter the top-p set by smaller id first.

    Args:
        logits: [R, V] floating point, V ≤ 2^22. −inf and NaN count as the least finite number,
            +inf as the greatest.
        params: of the R rows.

    Returns:
        [R, V] float64. What lies 40 bits below the greatest probability is 0.

    Raises:
        ValueError: on mismatching shapes, or a vocabulary that is empty or too wide.

    Guarantees: for given logits a row has the same bits in every batch and on every device; no
    synchronisation.
    """
    vocab = check_tensor("logits", logits, shape=(params.num_reqs, None)).shape[1]
    if not 1 <= vocab <= MAX_VOCAB:
        raise ValueError(f"logits must have 1 to {MAX_VOCAB} columns, got {vocab}")
    sampled = (params.temperature > 0).unsqueeze(1)
    scale = torch.where(sampled, params.temperature.to(torch.float64).unsqueeze(1), 1.0)
    finite = logits.to(torch.float64).nan_to_num(nan=torch.finfo(torch.float64).min)
    weights = _exp_weights((finite - finite.amax(1, keepdim=True)) / scale)
    weights = _cut_to_top_p(weights, params.top_p)
    total = weights.sum(1, keepdim=True).to(torch.float64)
    first_best = torch.arange(vocab, device=logits.device) == logits.argmax(1, keepdim=True)
    return torch.where(sampled, weights.to(torch.float64) / total, first_best.to(torch.float64))


def draw_tokens(probs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """The token at which a row's running sum exceeds `uniform` of its whole.

    Args:
        probs: [R, V] float64 ≥ 0, not necessarily normalised: a row's sum is at most 1, up to
            rounding.
        uniform: [R] float64 in (0, 1).

    Returns:
        [R] int64, in [0, V) whatever the row.

    Guarantees: never a token of probability 0, unless the row has no other; a token's chance is
    its share of the row to within 2^-52; the same bits in every batch and on every device.
    """
    running = (probs * 2.0**_DRAW_BITS).to(torch.int64).cumsum(1)
    total = running[:, -1:]
    # At most 1 − 2^-53 of the whole: below it however the product is rounded.
    place = (uniform.unsqueeze(1) * total.to(torch.float64)).to(torch.int64)
    token = torch.searchsorted(running, place, right=True).squeeze(1)
    return token.clamp_max(probs.shape[1] - 1)


def _mix64(z: torch.Tensor) -> torch.Tensor:
    z = (z ^ _shift_right(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shift_right(z, 27)) * _signed(0x94D049BB133111EB)
    return z ^ _shift_right(z, 31)


def _shift_right(z: torch.Tensor, bits: int) -> torch.Tensor:
    """A logical shift; int64's own repeats the sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    """`value` modulo 2^64 as an int64."""
    return (value + 2**63) % 2**64 - 2**63


def _powers_of_ln2() -> list[float]:
    """The series of 2^f, highest power first; 2^-47 off for |f| ≤ 1/2."""
    terms = [1.0]
    for k in range(1, 12):
        terms.append(terms[-1] * 0.6931471805599453 / k)
    return terms[::-1]


_SERIES = _powers_of_ln2()


def _exp_weights(x: torch.Tensor) -> torch.Tensor:
    """⌊2^40 · exp(x)⌋ of x ≤ 0, int64.

    From additions and products alone, each rounded by IEEE 754 the same everywhere: the bits of
    `torch.exp` depend on the device, and on a CPU may depend on the place in the tensor.
    """
    bits = (x * 1.4426950408889634).clamp_min(-62)  # log2(e)
    whole = bits.round()
    fraction = bits - whole
    power = torch.full_like(fraction, _SERIES[0])
    for term in _SERIES[1:]:
        power.mul_(fraction).add_(term)
    return (power * 2.0**_WEIGHT_BITS).to(torch.int64) >> (-whole).to(torch.int64)


def _cut_to_top_p(weights: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Zero for what the top-p set leaves out."""
    total = weights.sum(1)
    share = (top_p.to(torch.float64) * total.to(torch.float64)).ceil().to(torch.int64)
    need = torch.where(top_p < 1, share.clamp_min(1), total).unsqueeze(1)
    descending, order = weights.sort(dim=1, descending=True, stable=True)
    before = descending.cumsum(1) - descending
    kept = torch.where(before < need, descending, 0)
    return torch.zeros_like(weights).scatter_(1, order, kept)


def _each(name: str, value: float | Sequence[float], count: int) -> Sequence[float]:
    values = [value] * count if isinstance(value, (int, float)) else value
    if len(values) != count:
        raise ValueError(f"{name} must have {count} entries, one for each seed, got {len(values)}")
    return values
