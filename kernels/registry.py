"""Registers out-variant ops under `torch.ops.lightning_indexer`.

`Library.define/impl` costs 2 µs a call and imports no dynamo (`custom_op`: 10 µs). An op mutates
its `out` argument(s) and returns None; its fake implementation is therefore empty.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

#: Ops are `torch.ops.<this>.<name>`. A copy for Hugging Face kernels has another value here: two
#: copies of the package in one process would collide in torch's registry otherwise.
NAMESPACE = "lightning_indexer"
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")


def register_op(schema: str, impl: Callable[..., None], *, mutates: str) -> Any:
    """Defines `schema` ("name(args) -> ()") with `impl` for CPU and CUDA/HIP tensors.

    `mutates` names the keyword-only or first positional argument (a tensor or a list of tensors)
    that the op writes. Its version counter moves with every call: a Triton launch is invisible
    to autograd and to `TopkIndicesBuffer`, which both tell from it that a tensor was written.

    Returns the op overload.
    """
    name = schema.partition("(")[0]

    def run(*args: Any, **kwargs: Any) -> None:
        impl(*args, **kwargs)
        written = kwargs[mutates] if mutates in kwargs else args[0]
        torch.autograd.graph.increment_version(written)

    _LIBRARY.define(schema)
    for key in ("CPU", "CUDA"):
        _LIBRARY.impl(name, run, key)
    torch.library.register_fake(f"{NAMESPACE}::{name}", _fake, lib=_LIBRARY)
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def _fake(*_args: Any, **_kwargs: Any) -> None:
    """An op that returns nothing has nothing to infer."""
