"""Argument checks, all made before anything is launched or written.

A message names the argument, what it got and what it needs. A wrong type or dtype is a
TypeError, anything else a ValueError.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

INDEX_DTYPES = (torch.int32, torch.int64)


def check_tensor(
    name: str,
    value: object,
    *,
    dtype: torch.dtype | Sequence[torch.dtype] | None = None,
    shape: Sequence[int | None] | None = None,
    device: torch.device | None = None,
) -> torch.Tensor:
    """Returns `value` if it is a tensor of that dtype, shape (None: any size) and device."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")
    if dtype is not None:
        allowed = (dtype,) if isinstance(dtype, torch.dtype) else tuple(dtype)
        if value.dtype not in allowed:
            need = " or ".join(str(d).removeprefix("torch.") for d in allowed)
            raise TypeError(f"{name} must be {need}, got {value.dtype}")
    if shape is not None:
        same_rank = value.dim() == len(shape)
        if not same_rank or any(
            need is not None and got != need for got, need in zip(value.shape, shape, strict=True)
        ):
            need = ", ".join("any" if s is None else str(s) for s in shape)
            raise ValueError(f"{name} must have shape [{need}], got {list(value.shape)}")
    if device is not None and value.device != device:
        raise ValueError(f"{name} must be on {device}, got {value.device}")
    return value


def check_int(name: str, value: object, *, minimum: int) -> int:
    """Returns `value` if it is an int of at least `minimum`."""
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}")
    if value < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {value}")
    return value  # type: ignore[return-value]


def check_out(
    out: object,
    *,
    dtype: torch.dtype | Sequence[torch.dtype],
    shape: Sequence[int],
    device: torch.device,
) -> torch.Tensor:
    """Returns `out` if the op may write its result there."""
    return check_tensor("out", out, dtype=dtype, shape=shape, device=device)


def content_checks(tensor: torch.Tensor) -> bool:
    """Whether device contents (ids, lengths, table entries) are to be verified in this call.

    Asked inside op bodies, so that a captured or compiled graph never freezes the answer.
    Reading contents synchronises, which a capture forbids.
    """
    if os.environ.get("LIGHTNING_INDEXER_CHECK") != "1":
        return False
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def check_range(name: str, value: torch.Tensor, low: int, high: int) -> None:
    """Content check: raises ValueError unless low ≤ value < high everywhere."""
    value = value.long()  # an int32 tensor would wrap a bound beyond int32
    bad = (value < low) | (value >= high)
    if bool(bad.any()):
        raise ValueError(
            f"{name} must be in [{low}, {high}), got {int(value[bad][0])}"
            f" ({int(bad.sum())} such values)"
        )
