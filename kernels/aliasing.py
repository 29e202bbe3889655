"""Which tensors share memory, told from addresses and strides alone."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from math import gcd

import torch


def check_apart(name: str, written: torch.Tensor, others: Iterable[tuple[str, object]]) -> None:
    """Raises ValueError if what an op writes overlaps itself or anything else it is given.

    Tensors of different storages are taken to be apart.
    """
    if not written.is_contiguous():
        check_no_self_overlap(name, written)
    storage = written.untyped_storage().data_ptr()
    for other_name, other in others:
        for x in other if isinstance(other, (list, tuple)) else (other,):
            if not isinstance(x, torch.Tensor) or x.untyped_storage().data_ptr() != storage:
                continue
            if x.numel() == 0 or not spans_meet(written, x):  # no bytes of no elements meet any
                continue
            if not _in_other_columns(written, x):
                raise ValueError(
                    f"{name} must share no memory with {other_name}, got {list(written.shape)} with"
                    f" strides {written.stride()} over {list(x.shape)} with strides {x.stride()}"
                )


def check_no_self_overlap(name: str, x: torch.Tensor) -> None:
    """Raises ValueError unless each element of `x` has an address of its own."""
    axes = sorted((s, n) for n, s in zip(x.shape, x.stride(), strict=True) if n > 1)
    reach = 0
    for stride, size in axes:
        if stride <= reach:
            raise ValueError(f"{name} must not hold overlapping elements, got strides {x.stride()}")
        reach += stride * (size - 1)


def distinct_buffers(buffers: list[torch.Tensor]) -> list[torch.Tensor]:
    """Drops exact repeats and empty buffers; raises ValueError where any two overlap in part."""
    kept: list[torch.Tensor] = []
    for buffer in buffers:
        if buffer.numel() == 0:
            continue
        check_no_self_overlap("buffers", buffer)
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


def _in_other_columns(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors lie in columns of their own of lines of one length, in bytes."""
    for (a_line, a_width), (b_line, b_width) in product(_lines(a), _lines(b)):
        line = gcd(a_line, b_line)
        offset = (b.data_ptr() - a.data_ptr()) % line if line else 0
        if a_width <= offset and offset + b_width <= line:
            return True
    return False


def _lines(x: torch.Tensor) -> list[tuple[int, int]]:
    """`x` as lines of its greatest stride, and as a part of one line of any length (0).

    Each is the length of a line and what is used of it, in bytes.
    """
    axes = sorted((s, n) for n, s in zip(x.shape, x.stride(), strict=True) if n > 1)
    spans = [s * (n - 1) for s, n in axes]
    stride = axes[-1][0] if axes else 0
    size = x.element_size()
    return [(stride * size, (sum(spans[:-1]) + 1) * size), (0, (sum(spans) + 1) * size)]


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
