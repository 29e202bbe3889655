"""Triton's interpreter, put right where it computes otherwise than a GPU.

Unpatched (3.6 to 3.9), it multiplies the bit patterns of bf16 in `tl.dot`, cuts bits off in casts
to bf16 and fp8 instead of rounding, reads the NaN of e4m3 as ±480, and refuses masks that met a
Python bool. Peers are judged by what their code means, so casts and operands go through torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any
from unittest import mock

import numpy as np
import torch

_BITS = {1: (torch.uint8, np.uint8), 2: (torch.int16, np.int16), 4: (torch.int32, np.int32)}


@contextmanager
def bool_masks() -> Iterator[None]:
    """Until it ends, masks that a Python bool has made integers are masks again."""
    from triton.runtime import interpreter

    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle

    def masked(original: Callable[..., Any], place: int) -> Callable[..., Any]:
        def run(self: Any, *args: Any) -> Any:
            mask = handle(args[place].data.astype(bool), args[place].dtype)
            return original(self, *args[:place], mask, *args[place + 1 :])

        return run

    with mock.patch.multiple(
        builder,
        create_masked_load=masked(builder.create_masked_load, 1),
        create_masked_store=masked(builder.create_masked_store, 2),
    ):
        yield


@contextmanager
def repaired_interpreter() -> Iterator[None]:
    """Until it ends, casts and products of bf16 and fp8 are torch's, masks bools."""
    import triton.language as tl
    from triton.runtime import interpreter

    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    held = {
        tl.bfloat16: (torch.bfloat16, np.uint16),
        tl.float8e4nv: (torch.float8_e4m3fn, np.uint8),
        tl.float8e5: (torch.float8_e5m2, np.uint8),
        tl.float16: (torch.float16, np.float16),
        tl.float32: (torch.float32, np.float32),
    }
    narrow = (tl.bfloat16, tl.float8e4nv, tl.float8e5)

    def cast(x: Any, dtype: Any) -> Any:
        data = np.ascontiguousarray(x.data)
        bits = torch.from_numpy(data.view(_BITS[data.itemsize][1]))
        target, holder = held[dtype]
        result = bits.view(held[x.dtype.scalar][0]).float().to(target)
        return handle(result.view(_BITS[result.element_size()][0]).numpy().view(holder), dtype)

    def casting(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(self: Any, x: Any, dtype: Any, *rest: Any) -> Any:
            source, target = x.dtype.scalar, dtype.scalar
            if {source, target} <= held.keys() and (source in narrow or target in narrow):
                return cast(x, target)
            return original(self, x, dtype, *rest)

        return run

    def dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        wide = (cast(x, tl.float32) if x.dtype.scalar in narrow else x for x in (a, b))
        return create_dot(self, *wide, *rest)

    create_dot = builder.create_dot
    with (
        np.errstate(all="ignore"),
        mock.patch.multiple(
            builder,
            cast_impl=casting(builder.cast_impl),
            create_fp_to_fp=casting(builder.create_fp_to_fp),
            create_dot=dot,
        ),
        bool_masks(),
    ):
        yield


def interpreted(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn`, whose kernels run in the repaired interpreter."""

    @wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        with repaired_interpreter():
            return fn(*args, **kwargs)

    return run
