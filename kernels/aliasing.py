"""Which of several int32 matrices share memory, told from addresses and strides alone."""

from __future__ import annotations

from math import gcd

import torch


def distinct_buffers(buffers: list[torch.Tensor]) -> list[torch.Tensor]:
    """Drops exact repeats and empty buffers; raises ValueError where any two overlap in part."""
    kept: list[torch.Tensor] = []
    for buffer in buffers:
        if buffer.numel() == 0:
            continue
        _check_no_self_overlap(buffer)
        repeated = False
        for other in kept:
            if _placement(buffer) == _placement(other):
                repeated = True
            elif spans_meet(buffer, other) and _share_elements(buffer, other):
                raise ValueError(
                    "buffers must be identical or share no memory, got a partial overlap of"
                    f" {list(buffer.shape)} with strides {buffer.stride()} and"
                    f" {list(other.shape)} with strides {other.stride()}"
                )
        if not repeated:
            kept.append(buffer)
    return kept


def spans_meet(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the byte ranges from first to last element of two non-empty tensors intersect."""
    (a_first, a_end), (b_first, b_end) = _span(a), _span(b)
    return a_first < b_end and b_first < a_end


def _placement(x: torch.Tensor) -> tuple[int, ...]:
    """Address and layout; the stride of an axis of one element means nothing."""
    strides = (s for n, s in zip(x.shape, x.stride(), strict=True) if n > 1)
    return (x.data_ptr(), *x.shape, *strides)


def _span(x: torch.Tensor) -> tuple[int, int]:
    """First byte addressed and the one after the last."""
    extent = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) + 1
    return x.data_ptr(), x.data_ptr() + extent * x.element_size()


def _check_no_self_overlap(x: torch.Tensor) -> None:
    axes = sorted((s, n) for n, s in zip(x.shape, x.stride(), strict=True) if n > 1)
    reach = 0
    for stride, size in axes:
        if stride <= reach:
            raise ValueError(f"buffers must not overlap themselves, got strides {x.stride()}")
        reach += stride * (size - 1)


def _share_elements(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two matrices whose spans intersect have an element in common."""
    distance = (b.data_ptr() - a.data_ptr()) // a.element_size()
    period = gcd(a.stride(0), b.stride(0))
    if a.stride(1) == b.stride(1) == 1 and period:
        # Column slices of one matrix: a covers [0, Wa) and b [offset, offset + Wb), mod period.
        offset = distance % period
        if a.shape[1] <= offset and offset + b.shape[1] <= period:
            return False
    return bool(torch.isin(_offsets(b) + distance, _offsets(a)).any())


def _offsets(x: torch.Tensor) -> torch.Tensor:
    rows, columns = (torch.arange(n) * s for n, s in zip(x.shape, x.stride(), strict=True))
    return rows[:, None] + columns
