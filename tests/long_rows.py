"""Rows longer than a program's list, made to mislead a sample of them."""

import torch

from lightning_indexer.kernels.backend import Target
from lightning_indexer.kernels.topk_plan import plan_topk
from score_rows import NAN, scores

#: A plateau of equal scores holds the k-th place of these.
PLATEAUS = ("all equal", "relu", "few values", "plateau", "plateau after a ramp")
ADVERSARIAL = (
    *PLATEAUS,
    "normal",
    "ascending",
    "descending",
    "periodic",
    "sample lies high",
    "sample lies low",
    "few numbers",
    "one binade",
    "wide range",
)


def sampled_offsets(length: int) -> torch.Tensor:
    """Where the kernel samples a row of that length, by the formula of its documentation."""
    samples = plan_topk(Target("cuda", 90), 132, 4096, length).samples
    stretch = torch.arange(samples)
    within = ((stretch * 40503) & 0xFFFF) * (length // samples) >> 16
    return stretch * length // samples + within


def long_row(kind: str, length: int, k: int) -> torch.Tensor:
    """[1, length] fp32."""
    x = scores(1, length, "normal", seed=7)
    place = torch.arange(length)
    if kind == "all equal":
        x = torch.full_like(x, 0.25)
    elif kind == "relu":
        x = torch.where(place % 20 == 3, x.abs(), 0.0)
    elif kind == "few values":
        x = x.round()
    elif kind == "plateau":  # k // 2 above it, and half of the rest in it
        x[:, ::2] = x.sort(descending=True).values[0, min(k, length // 2) // 2]
    elif kind == "plateau after a ramp":
        x = torch.minimum(place, torch.tensor(length // 3)).float()[None].flip(1)
    elif kind == "ascending":
        x = place.float()[None] + 1e6
    elif kind == "descending":
        x = 1e6 - place.float()[None]
    elif kind == "periodic":
        x += 100.0 * (place % (length // 2048) == 0)
    elif kind in ("sample lies high", "sample lies low"):
        x[:, sampled_offsets(length)] += 100.0 if kind.endswith("high") else -100.0
    elif kind == "few numbers":
        x = torch.where(place % 100 == 3, x, NAN)
    elif kind == "one binade":
        x = 1 + x.abs() * 2.0**-20
    elif kind == "wide range":
        x = x.sign() * 2.0 ** (x * 40).clamp(-140, 120)
    else:
        assert kind == "normal"
    return x
