"""Inputs that the tests of `prepare_index_q` and `prepare_index_k` share."""

from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
STYLES = ("half_split", "interleaved")
REGIMES = ("normal", "wide", "tiny", "zero", "special")
ODD = (float("nan"), -float("nan"), float("inf"), float("-inf"), -0.0, 1e-40)


@dataclass(frozen=True)
class Rotation:
    """RoPE and transform of one call, and its tables and positions."""

    rope_style: str
    rope_first: bool
    hadamard: bool
    half: int  # pairs rotated
    known: int  # positions in the tables
    positions: str  # int32, int64, or "none": a row of the tables for each row

    def options(self) -> dict:
        names = ("rope_style", "rope_first", "hadamard")
        return {name: getattr(self, name) for name in names}

    def tables(self, rows: int, strided: bool, generator: torch.Generator) -> tuple:
        """Positions, some outside the tables or −1, cos and sin (no angle's: any factor goes)."""
        known = rows if self.positions == "none" else self.known
        cos, sin = (draw((known, self.half), torch.float32, strided, generator) for _ in "cs")
        if self.positions == "none":
            return None, cos, sin
        dtype = getattr(torch, self.positions)
        positions = torch.randint(-1, known + 2, (rows, 2), generator=generator, dtype=dtype)
        return positions[:, 1] if strided else positions[:, 1].contiguous(), cos, sin


def rotations(head_dim: int) -> st.SearchStrategy[Rotation]:
    """What rows of `head_dim` elements can be put through."""
    return st.builds(
        Rotation,
        rope_style=st.sampled_from(STYLES if head_dim % 2 == 0 else STYLES[:1]),
        rope_first=st.booleans(),
        hadamard=st.booleans() if head_dim & (head_dim - 1) == 0 else st.just(False),
        half=st.integers(0, head_dim // 2),
        known=st.sampled_from([0, 1, 7, 7, 7]),
        positions=st.sampled_from(["int32", "int64", "none"]),
    )


def draw(
    shape: tuple[int, ...], dtype: torch.dtype, strided: bool, generator: torch.Generator
) -> torch.Tensor:
    """Normal values; strided ones are every other element of reversed axes, at an offset."""
    if not strided:
        return torch.randn(shape, generator=generator).to(dtype)
    backing = torch.randn([2 * n + 1 for n in reversed(shape)], generator=generator).to(dtype)
    return backing.permute(*reversed(range(len(shape))))[(slice(1, None, 2),) * len(shape)]


def in_regime(x: torch.Tensor, regime: str, generator: torch.Generator) -> torch.Tensor:
    """`x` changed in place to values of a kind."""
    if regime == "wide":
        x *= torch.exp2(torch.randint(-14, 12, x.shape, generator=generator).float()).to(x.dtype)
    elif regime == "tiny":
        x *= 2.0**-126 if x.dtype != torch.float16 else 2.0**-20
    elif regime == "zero":
        x *= 0.0
    elif regime == "special":
        odd = torch.randint(0, 80, x.shape, generator=generator)
        for code, value in enumerate(ODD):
            x[odd == code] = value
    return x


def same(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether all bits are equal, but for those of NaNs."""
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        return False
    if not actual.is_floating_point():
        return torch.equal(actual, expected)
    nan = actual.isnan()
    if not torch.equal(nan, expected.isnan()):
        return False
    bits = {2: torch.int16, 4: torch.int32}[actual.element_size()]
    plain = (x.masked_fill(nan, 0.0).contiguous().view(bits) for x in (actual, expected))
    return torch.equal(*plain)


PLAIN = Rotation("half_split", True, False, 4, 12, "int64")
TURNED = replace(PLAIN, hadamard=True)
