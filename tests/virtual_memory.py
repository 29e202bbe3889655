"""Tensors whose elements lie billions apart, on memory that is mapped but hardly ever backed."""

import mmap
import sys

import pytest
import torch

MAP_NORESERVE = 0x4000  # Linux's number; Python names it from 3.13 on
#: Bytes mapped before a tensor and after it. An offset that wrapped around to a negative int32, of
#: eight bytes each at most, reads zeros there and fails the test, instead of ending the process.
MARGIN = 2**34

DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="maps memory as Linux does")


def far_apart(x: torch.Tensor, axis: int, reach: int) -> torch.Tensor:
    """A copy of `x` whose last element along `axis` lies at least `reach` elements from the first.

    The other axes are packed. The stride is a multiple of 64.
    """
    size = x.shape[axis]
    strides = list(x.transpose(0, axis).contiguous().transpose(0, axis).stride())
    strides[axis] = (reach // (size - 1) // 64 + 1) * 64
    span = sum((n - 1) * s for n, s in zip(x.shape, strides, strict=True)) + 1
    return hardly_backed(span, x.dtype, x.device).as_strided(x.shape, strides).copy_(x)


def hardly_backed(count: int, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """[count] zeros on a CPU. A GPU backs what it maps: there they are allocated and not set."""
    margin = MARGIN // dtype.itemsize
    total = 2 * margin + count
    if torch.device(device).type == "cuda":
        return torch.empty(total, dtype=dtype, device=device)[margin:-margin]
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    mapped = mmap.mmap(-1, total * dtype.itemsize, flags=flags)
    mapped.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(mapped, dtype=dtype)[margin:-margin]
