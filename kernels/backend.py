"""Where an op runs: Triton on a GPU or in the interpreter, vectorised PyTorch on any other CPU.

Kernel files import `triton` and `tl` from here, so that they still import on a platform without
Triton (the jitted functions then merely cannot be launched).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

try:
    import triton
    import triton.language as tl

    HAS_TRITON = True
except ImportError:  # macOS, Windows: the CPU path needs none of it
    HAS_TRITON = False

    class _Missing:
        """Stands in for the names that kernel files touch while they are imported."""

        constexpr = int

        @staticmethod
        def jit(fn: Any = None, **_: Any) -> Any:
            return (lambda f: f) if fn is None else fn

        @staticmethod
        def cdiv(a: int, b: int) -> int:
            return -(-a // b)

        @staticmethod
        def next_power_of_2(n: int) -> int:
            return 1 << max(n - 1, 0).bit_length()

    triton = tl = _Missing()

#: True when this package's kernels were decorated under TRITON_INTERPRET=1.
INTERPRET: bool = HAS_TRITON and bool(triton.knobs.runtime.interpret)


@dataclass(frozen=True)
class Target:
    """What a kernel is compiled for: `("cuda", 90)`, `("hip", "gfx942")` or the interpreter."""

    backend: str
    arch: int | str

    @property
    def has_fp8_dot(self) -> bool:
        """Whether `tl.dot` takes e4m3fn operands natively (else kernels decode the bytes)."""
        return self.backend == "cuda" and int(self.arch) >= 89


def use_triton(tensor: torch.Tensor) -> bool:
    """Whether an op on `tensor` launches its Triton kernel."""
    return tensor.is_cuda or (INTERPRET and tensor.device.type == "cpu")


@cache
def _device_target(index: int) -> Target:
    if torch.version.hip is not None:
        return Target("hip", torch.cuda.get_device_properties(index).gcnArchName.split(":")[0])
    major, minor = torch.cuda.get_device_capability(index)
    return Target("cuda", major * 10 + minor)


def target_of(device: torch.device) -> Target:
    """The compile target of `device` (a CPU tensor's is the interpreter)."""
    if device.type != "cuda":
        return Target("interpreter", "cpu")
    index = device.index if device.index is not None else torch.cuda.current_device()
    return _device_target(index)


@cache
def _device_multiprocessors(index: int) -> int:
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


def multiprocessors(device: torch.device) -> int:
    """How many programs `device` runs side by side, at least (the interpreter: one)."""
    if device.type != "cuda":
        return 1
    index = device.index if device.index is not None else torch.cuda.current_device()
    return _device_multiprocessors(index)


def on_device_of(tensor: torch.Tensor) -> AbstractContextManager[Any]:
    """Makes `tensor`'s device current, so that a launch goes to its current stream."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()
