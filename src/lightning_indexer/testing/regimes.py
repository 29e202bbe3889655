"""What kernels meet, and what breaks them: score rows and operand values by regime."""

from __future__ import annotations

from collections.abc import Callable

import torch

INF, NAN = float("inf"), float("nan")
FP8 = torch.float8_e4m3fn
#: Integers by an element's size, to look at its bits.
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def score_rows(
    regime: str, rows: int, length: int, k: int, dtype: torch.dtype, seed: int
) -> torch.Tensor:
    """[rows, length] scores of a regime out of SCORE_REGIMES, for a selection of k."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, length, generator=g)
    return SCORE_REGIMES[regime](x, k, dtype, g).to(dtype)


def _rounded(x: torch.Tensor, k: int, dtype: torch.dtype, g: torch.Generator) -> torch.Tensor:
    """A few distinct values: ties at every boundary."""
    return x.round()


def _all_equal(x: torch.Tensor, k: int, dtype: torch.dtype, g: torch.Generator) -> torch.Tensor:
    return x[:, :1].expand_as(x) if x.numel() else x


def _ascending(x: torch.Tensor, k: int, dtype: torch.dtype, g: torch.Generator) -> torch.Tensor:
    return x.sort(dim=1).values


def _descending(x: torch.Tensor, k: int, dtype: torch.dtype, g: torch.Generator) -> torch.Tensor:
    return x.sort(dim=1, descending=True).values


def _spikes(x: torch.Tensor, k: int, dtype: torch.dtype, g: torch.Generator) -> torch.Tensor:
    """One great score among zeros."""
    rows, length = x.shape
    x = torch.zeros_like(x)
    if length:
        x[torch.arange(rows), torch.randint(length, (rows,), generator=g)] = 1e4
    return x


def _relu(x: torch.Tensor, k: int, dtype: torch.dtype, g: torch.Generator) -> torch.Tensor:
    """Three scores in four exactly 0, of either sign."""
    return x.clamp(min=0) * torch.where(torch.rand(x.shape, generator=g) < 0.5, -0.0, 1)


def _subnormal(x: torch.Tensor, k: int, dtype: torch.dtype, g: torch.Generator) -> torch.Tensor:
    return x * torch.finfo(dtype).tiny * 2.0**-3


def _ulp_apart(x: torch.Tensor, k: int, dtype: torch.dtype, g: torch.Generator) -> torch.Tensor:
    """k // 2 great scores; the others, the k-th among them, within one ulp of one value."""
    base = (0.5 + torch.rand(len(x), 1, generator=g)).to(dtype)
    bits = base.view(BITS[dtype.itemsize])
    near = (bits + torch.randint(-1, 2, x.shape, generator=g)).to(bits.dtype).view(dtype)
    return torch.where(x.argsort(dim=1).argsort(dim=1) < k // 2, 4 * base, near)


def _close(x: torch.Tensor, k: int, dtype: torch.dtype, g: torch.Generator) -> torch.Tensor:
    """All within one bin of a coarse histogram."""
    return 1 + x.abs() * 2.0**-20


def _sprinkled(
    x: torch.Tensor, specials: list[float], share: float, g: torch.Generator
) -> torch.Tensor:
    pick = torch.randint(len(specials), x.shape, generator=g)
    rare = torch.rand(x.shape, generator=g) < share
    return torch.where(rare, torch.tensor(specials)[pick], x)


def _infinite(x: torch.Tensor, k: int, dtype: torch.dtype, g: torch.Generator) -> torch.Tensor:
    return _sprinkled(x, [INF, -INF], 0.4, g)


def _nan(x: torch.Tensor, k: int, dtype: torch.dtype, g: torch.Generator) -> torch.Tensor:
    """NaN of both signs between the numbers."""
    return _sprinkled(x, [NAN, -NAN], 0.4, g)


def _special(x: torch.Tensor, k: int, dtype: torch.dtype, g: torch.Generator) -> torch.Tensor:
    """NaN of both signs, −inf and +inf between the numbers."""
    return _sprinkled(x, [NAN, -NAN, -INF, INF], 0.4, g)


def _nothing(x: torch.Tensor, k: int, dtype: torch.dtype, g: torch.Generator) -> torch.Tensor:
    """NaN and −inf alone."""
    return _sprinkled(x, [NAN, -NAN, -INF], 2, g)


ScoreRegime = Callable[[torch.Tensor, int, torch.dtype, torch.Generator], torch.Tensor]
#: From normal scores [rows, length], k, the dtype they will have and a generator.
SCORE_REGIMES: dict[str, ScoreRegime] = {
    "normal": lambda x, k, dtype, g: x,
    "rounded": _rounded,
    "all equal": _all_equal,
    "ascending": _ascending,
    "descending": _descending,
    "spikes": _spikes,
    "relu": _relu,
    "subnormal": _subnormal,
    "ulp apart": _ulp_apart,
    "close": _close,
    "infinite": _infinite,
    "nan": _nan,
    "special": _special,
    "nothing": _nothing,
}
NAN_SCORES = frozenset({"nan", "special", "nothing"})
NEG_INF_SCORES = frozenset({"infinite", "special", "nothing"})
POS_INF_SCORES = frozenset({"infinite", "special"})


def values(
    shape: tuple[int, ...], dtype: torch.dtype, regime: str, generator: torch.Generator
) -> torch.Tensor:
    """Operand values of a regime out of VALUE_REGIMES, in the range of every dtype."""
    x = torch.randn(shape, generator=generator)
    return VALUE_REGIMES[regime](x, dtype, generator).to(dtype)


def _ties(x: torch.Tensor, dtype: torch.dtype, g: torch.Generator) -> torch.Tensor:
    """−1, 0 and 1: sums are exact in any order, most scores equal, many of them 0."""
    return torch.randint(-1, 2, x.shape, generator=g).float()


def _spread(x: torch.Tensor, dtype: torch.dtype, g: torch.Generator) -> torch.Tensor:
    """Magnitudes over thirteen binades, the greatest within e4m3's range."""
    return x * torch.exp2(torch.randint(-6, 7, x.shape, generator=g).float())


def _value_spikes(x: torch.Tensor, dtype: torch.dtype, g: torch.Generator) -> torch.Tensor:
    """One great element in ten, zeros between."""
    return torch.where(torch.rand(x.shape, generator=g) < 0.1, 256.0 * x.sign(), 0.0)


def _signed_zeros(x: torch.Tensor, dtype: torch.dtype, g: torch.Generator) -> torch.Tensor:
    return _ties(x, dtype, g) * torch.where(x < 0, -0.0, 1.0)


def _value_subnormal(x: torch.Tensor, dtype: torch.dtype, g: torch.Generator) -> torch.Tensor:
    """Below the least normal number of the dtype."""
    return x * (2.0**-9 if dtype == FP8 else torch.finfo(dtype).tiny * 2.0**-3)


def _fp8_extremes(x: torch.Tensor, dtype: torch.dtype, g: torch.Generator) -> torch.Tensor:
    """The greatest and the least that e4m3 holds, of both signs."""
    ends = torch.tensor([448.0, -448.0, 2.0**-9, -(2.0**-9), 0.0, -0.0])
    return ends[torch.randint(len(ends), x.shape, generator=g)]


def _value_nan(x: torch.Tensor, dtype: torch.dtype, g: torch.Generator) -> torch.Tensor:
    return _sprinkled(x, [NAN, -NAN], 0.02, g)


def _value_infinite(x: torch.Tensor, dtype: torch.dtype, g: torch.Generator) -> torch.Tensor:
    """±inf now and then; e4m3 has none."""
    return x if dtype == FP8 else _sprinkled(x, [INF, -INF], 0.02, g)


ValueRegime = Callable[[torch.Tensor, torch.dtype, torch.Generator], torch.Tensor]
#: From normal values, the dtype they will have and a generator.
VALUE_REGIMES: dict[str, ValueRegime] = {
    "normal": lambda x, dtype, g: x,
    "ties": _ties,
    "spread": _spread,
    "spikes": _value_spikes,
    "signed zeros": _signed_zeros,
    "subnormal": _value_subnormal,
    "fp8 extremes": _fp8_extremes,
    "zero scale": lambda x, dtype, g: x,  # the case sets the keys' scales to 0
    "infinite": _value_infinite,
    "nan": _value_nan,
}
SPECIAL_VALUES = frozenset({"infinite", "nan"})
