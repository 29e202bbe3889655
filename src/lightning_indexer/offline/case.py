"""What an offline compilation takes: a kernel, its argument types and its launch constants."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..kernels.backend import Target

TARGETS = {
    "sm_80": Target("cuda", 80),
    "sm_90": Target("cuda", 90),
    "sm_100": Target("cuda", 100),
    "sm_120": Target("cuda", 120),
    "gfx942": Target("hip", "gfx942"),
}


@dataclass(frozen=True)
class CompileCase:
    """One specialisation of one kernel, as the op launches it.

    `signature` maps each runtime argument to its Triton type ("*fp32", "i32", "i64", …; a tuple
    of types for a tuple) in the kernel's order; `constexprs` holds the rest. `divisible` names
    arguments known to be multiples of 16 (contiguous tensors' strides, aligned pointers), as the
    launcher would find.
    `tensor_op` is part of a tensor-core instruction that must come out ("wgmma", "v_mfma", …).
    """

    op: str
    label: str
    kernel: Any
    signature: dict[str, Any]
    constexprs: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    divisible: tuple[str, ...] = ()
    tensor_op: str | None = None
