"""Guards around the scratch that a kernel asks of torch while it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .canary import Guarded

_DIRTY = ("empty", "empty_like", "empty_strided")
_FILLED = ("zeros", "zeros_like", "ones", "ones_like", "full", "full_like")
_NEW_DIRTY = ("new_empty", "new_empty_strided")
_NEW_FILLED = ("new_zeros", "new_ones", "new_full")


@contextmanager
def guarded_allocations() -> Iterator[list[Guarded]]:
    """Until it ends, `torch.empty` and its kin return guarded memory, and dirty where they may.

    Yields the list of what they returned. Memory that compiled code allocates past Python is not
    seen.
    """
    handed_out: list[Guarded] = []
    at_work = False  # what makes guarded memory allocates, too

    def guarding(allocate: Callable[..., torch.Tensor], filled: bool) -> Callable:
        def run(*args: Any, **kwargs: Any) -> torch.Tensor:
            nonlocal at_work
            if torch.compiler.is_compiling():  # what is traced allocates past Python
                return allocate(*args, **kwargs)
            plain = allocate(*args, **kwargs)
            if at_work or not _can_guard(plain) or kwargs.get("out") is not None:
                return plain
            at_work = True
            try:
                if filled:
                    guarded = Guarded.like(plain)
                else:
                    shape, strides = tuple(plain.shape), tuple(plain.stride())
                    guarded = Guarded(shape, strides, plain.dtype, plain.device)
            finally:
                at_work = False
            handed_out.append(guarded)
            return guarded.tensor

        return run

    own = [
        (owner, name, vars(owner).get(name), guarding(getattr(owner, name), filled))
        for owner, names, filled in (
            (torch, _DIRTY, False),
            (torch, _FILLED, True),
            (torch.Tensor, _NEW_DIRTY, False),
            (torch.Tensor, _NEW_FILLED, True),
        )
        for name in names
    ]
    try:
        for owner, name, _, replaced in own:
            setattr(owner, name, replaced)
        yield handed_out
    finally:
        for owner, name, original, _ in own:
            if original is None:
                delattr(owner, name)  # it is inherited
            else:
                setattr(owner, name, original)


def _can_guard(x: torch.Tensor) -> bool:
    plain = type(x) is torch.Tensor and x.layout == torch.strided and not x.requires_grad
    return plain and x.device.type != "meta" and x.numel() > 0 and not x.dtype.is_complex
