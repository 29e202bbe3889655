"""Guarded memory: poison on both sides of every tensor, looked at byte by byte afterwards."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .layouts import BITS, POISON_BYTE, bits_of, poison, span

GUARD = 512  # bytes on each side; keeps the alignment that torch gives its allocations
#: Each is told of every look at guarded memory: bytes that must be as before, and those changed.
observers: list[Callable[[int, int], None]] = []


class CanaryError(AssertionError):
    """A byte has changed that the call had no business with."""


class Guarded:
    """A tensor between two guards of poisoned bytes; the gaps of a strided one are guards too.

    Attributes:
        tensor: of the asked shape, strides, dtype and device, to hand to a kernel.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        *,
        misalignment: int = 0,
    ) -> None:
        """Poisoned, first element included; `misalignment`: bytes its address is off by."""
        size = dtype.itemsize
        before, inside = GUARD + misalignment, span(shape, strides) * size
        self._memory = torch.empty(before + inside + GUARD, dtype=torch.uint8, device=device)
        self._memory.fill_(POISON_BYTE)
        self._inside = slice(before, before + inside)
        storage = self._memory.untyped_storage()
        # set_, for a view would tell the kernel that it is one.
        bits = torch.empty(0, dtype=BITS[size], device=device)
        self._bits = bits.set_(storage, before // size, shape, strides)
        self.tensor = torch.empty(0, dtype=dtype, device=device)
        self.tensor.set_(storage, before // size, shape, strides)
        self._before: torch.Tensor | None = None

    @classmethod
    def like(cls, x: torch.Tensor, device: torch.device | str | None = None) -> Guarded:
        """Holds a copy of `x`, with its strides and its address's alignment."""
        off = x.data_ptr() % 64 if x.numel() else 0
        strides = tuple(x.stride())
        guarded = cls(tuple(x.shape), strides, x.dtype, device or x.device, misalignment=off)
        guarded._bits.copy_(bits_of(x))
        guarded._before = guarded._memory.clone()
        return guarded

    def check_unchanged(self, name: str) -> None:
        """Raises CanaryError if any byte differs from what `like` put there."""
        assert self._before is not None, "nothing has been put in"
        self._compare(name, self._memory, self._before, self._memory.numel())

    def check_around(self, name: str) -> None:
        """Raises CanaryError if a byte that is no element's has changed; elements may."""
        shown = self._memory.clone()
        elements = torch.empty(0, dtype=self._bits.dtype, device=shown.device)
        bits = self._bits
        elements.set_(shown.untyped_storage(), bits.storage_offset(), bits.shape, bits.stride())
        poison(elements)
        length = self._inside.stop - self._inside.start
        around = self._memory.numel() - min(bits.numel() * bits.element_size(), length)
        self._compare(name, shown, torch.full_like(shown, POISON_BYTE), around)

    def _compare(self, name: str, now: torch.Tensor, then: torch.Tensor, checked: int) -> None:
        changed = (now != then).nonzero().flatten().tolist()
        for observe in observers:
            observe(checked, len(changed))
        if not changed:
            return
        first, inside = changed[0], self._inside
        if first < inside.start:
            nearest = max(c for c in changed if c < inside.start)
            where = f"{inside.start - nearest} before its first element"
        elif first >= inside.stop:
            where = f"{first - inside.stop + 1} past its last element"
        else:
            where = f"{first - inside.start} after the start of its first element"
        raise CanaryError(f"{name}: {len(changed)} bytes written that must not be, at byte {where}")
