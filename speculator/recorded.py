"""A graph runner for any device: records the dispatched ops and replays them without Python."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .runner import CaptureError, CapturingRunner, Step


@dataclass
class _Call:
    op: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    fresh: list[torch.Tensor]  # outputs with memory of their own, refilled in place by a replay

    def replay(self) -> None:
        result = self.op(*self.args, **self.kwargs)
        if self.fresh:
            for out, new in zip(self.fresh, _tensors(result), strict=True):
                out.copy_(new)


class _Recording:
    def __init__(self) -> None:
        self.calls: list[_Call] = []

    def replay(self) -> None:
        for call in self.calls:
            call.replay()

    def reset(self) -> None:
        self.calls.clear()


class _Recorder(TorchDispatchMode):
    def __init__(self, calls: list[_Call]) -> None:
        super().__init__()
        self._calls = calls

    def __torch_dispatch__(
        self,
        func: Any,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if _needs_values(func, args):
            raise CaptureError(f"{func} depends on device values and cannot be captured")
        result = func(*args, **kwargs)
        returns = func._schema.returns
        aliases = [r.alias_info for r in returns]
        is_view = bool(aliases) and all(a is not None and not a.is_write for a in aliases)
        is_empty = func.overloadpacket in _UNINITIALISED
        if not is_view and not is_empty:
            writes_inputs = any(a is not None for a in aliases)
            fresh = [] if writes_inputs else _tensors(result)
            self._calls.append(_Call(func, args, kwargs, fresh))
        return result


def _needs_values(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether executing `func` reads device values back, be it for a shape."""
    if func.overloadpacket in _INDEXING:  # with integers the shape is known: only masks count them
        masks = (torch.bool, torch.uint8)
        return any(index is not None and index.dtype in masks for index in args[1])
    tags = func.tags
    return torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags


_INDEXING = (torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_)

_UNINITIALISED = (
    torch.ops.aten.empty,
    torch.ops.aten.empty_like,
    torch.ops.aten.empty_strided,
    torch.ops.aten.new_empty,
    torch.ops.aten.new_empty_strided,
)


class RecordedRunner(CapturingRunner):
    """Captures steps as lists of dispatched ops on their tensors, and replays those.

    It has a CUDA graph's semantics on any device: a flag read in Python is baked in, tensors keep
    their addresses, padded rows run, nothing in a model's `forward` executes on replay, and a
    step that reads device values cannot be captured (except that `tolist` and `numpy` of a CPU
    tensor dispatch no op, and go unnoticed). A key without a graph runs eagerly.
    """

    def _record(self, step: Step) -> _Recording:
        recording = _Recording()
        with _Recorder(recording.calls):
            step()
        return recording


def _tensors(result: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
