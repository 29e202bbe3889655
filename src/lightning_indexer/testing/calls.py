"""Calls a kernel on guarded copies of its inputs, and looks at every byte around them after."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from .allocations import guarded_allocations
from .canary import Guarded
from .layouts import geometry

Guards = dict[str, Guarded]


def guarded_call(
    fn: Callable[..., Any],
    positional: Mapping[str, Any],
    keywords: Mapping[str, Any] | None = None,
    *,
    device: str = "cpu",
    writes: frozenset[str] = frozenset(),
) -> Any:
    """What `fn(*positional, **keywords)` returns, on the CPU; tensors it writes are copied back.

    Tensors, and lists of them, are passed as guarded copies of the same strides and alignment on
    `device`. Afterwards their bytes must be as before, but for the elements of those in `writes`;
    so must the guards around what torch allocated during the call.

    Raises:
        CanaryError: naming the tensor and the byte.
    """
    guards: Guards = {}
    args = [_guarded(name, x, device, guards) for name, x in positional.items()]
    kwargs = {name: _guarded(name, x, device, guards) for name, x in (keywords or {}).items()}
    with guarded_allocations() as scratch:
        result = fn(*args, **kwargs)
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize(device)
    for name, guard in guards.items():
        if name.partition("[")[0] in writes:
            guard.check_around(name)
        else:
            guard.check_unchanged(name)
    for guard in scratch:
        shape = list(guard.tensor.shape)
        guard.check_around(f"memory of shape {shape} that the kernel allocated")
    for name, x in [*positional.items(), *(keywords or {}).items()]:
        if name in writes:
            _copy_back(name, x, guards)
    return _on_cpu(result)


def call_for_result(
    fn: Callable[..., Any],
    positional: Mapping[str, Any],
    keywords: Mapping[str, Any] | None = None,
    *,
    out: tuple[tuple[int, ...], torch.dtype] | None,
    layout: str = "contiguous",
    device: str = "cpu",
) -> Any:
    """`guarded_call`, with `out=` of that shape and dtype in poisoned memory if it is given."""
    if out is None:
        return guarded_call(fn, positional, keywords, device=device)
    shape, dtype = out
    strides, _ = geometry(shape, layout)
    held = Guarded(shape, strides, dtype).tensor
    kwargs = dict(keywords or {}) | {"out": held}
    guarded_call(fn, positional, kwargs, device=device, writes=frozenset({"out"}))
    return held


def _guarded(name: str, x: Any, device: str, guards: Guards) -> Any:
    if isinstance(x, list):
        for i, item in enumerate(x):  # a tensor that is listed twice stays one tensor
            first = next(j for j, other in enumerate(x) if other is item)
            if first < i:
                guards[f"{name}[{i}]"] = guards[f"{name}[{first}]"]
            else:
                _guarded(f"{name}[{i}]", item, device, guards)
        return [guards[f"{name}[{i}]"].tensor for i in range(len(x))]
    if not isinstance(x, torch.Tensor):
        return x
    guards[name] = Guarded.like(x, device)
    return guards[name].tensor


def _copy_back(name: str, x: Any, guards: Guards) -> None:
    if isinstance(x, list):
        for i, item in enumerate(x):
            item.copy_(guards[f"{name}[{i}]"].tensor)
    else:
        x.copy_(guards[name].tensor)


def _on_cpu(result: Any) -> Any:
    """A copy that later calls cannot reach."""
    if isinstance(result, torch.Tensor):
        return result.detach().cpu().clone()
    if isinstance(result, (tuple, list)):
        return tuple(_on_cpu(x) for x in result)
    return result
