"""Registers out-variant ops under `torch.ops.lightning_indexer`.

`Library.define/impl` costs 2 µs a call and imports no dynamo (`custom_op`: 10 µs). An op mutates
its `out` argument(s) and returns None; its fake implementation is therefore empty.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .aliasing import check_apart

#: Ops are `torch.ops.<this>.<name>`. A copy for Hugging Face kernels has another value here: two
#: copies of the package in one process would collide in torch's registry otherwise.
NAMESPACE = "lightning_indexer"
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")


def register_op(
    schema: str,
    impl: Callable[..., None],
    *,
    mutates: str,
    parts: Sequence[str] | None = None,
    checks_aliasing: bool = True,
) -> Any:
    """Defines `schema` ("name(args) -> ()") with `impl` for CPU and CUDA/HIP tensors.

    `mutates` names the keyword-only or first positional argument (a tensor or a list of tensors)
    that the op writes. Its version counter moves with every call: a Triton launch is invisible
    to autograd and to `TopkIndicesBuffer`, which both tell from it that a tensor was written.

    Before anything runs it is refused memory that it shares with another argument, or with itself:
    its programs write in any order (an op with `checks_aliasing=False` sees to that alone). `parts`
    are the names in messages of a list's tensors.

    Returns the op overload.
    """
    name = schema.partition("(")[0]
    names = [a.name for a in torch._C.parse_schema(schema).arguments]
    others = [(i, n) for i, n in enumerate(names) if n != mutates]

    def check(written: Any, args: tuple[Any, ...]) -> None:
        given = [(n, args[i]) for i, n in others if i < len(args)]
        if isinstance(written, torch.Tensor):
            check_apart(mutates, written, given)
            return
        for i, (part, tensor) in enumerate(
            zip(parts or [mutates] * len(written), written, strict=True)
        ):
            check_apart(part, tensor, [*given, (mutates, written[:i])])

    def run(*args: Any, **kwargs: Any) -> None:
        written = kwargs[mutates] if mutates in kwargs else args[0]
        if checks_aliasing:
            check(written, args)
        impl(*args, **kwargs)
        torch.autograd.graph.increment_version(written)

    _LIBRARY.define(schema)
    for key in ("CPU", "CUDA"):
        _LIBRARY.impl(name, run, key)
    torch.library.register_fake(f"{NAMESPACE}::{name}", _fake, lib=_LIBRARY)
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def _fake(*_args: Any, **_kwargs: Any) -> None:
    """An op that returns nothing has nothing to infer."""
