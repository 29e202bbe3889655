"""What an offline compilation takes: a kernel, its argument types, launch constants and work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
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
class Work:
    """One launch at a stated shape: what a program does, and how often each of its loops runs.

    A program does `units` units of work (`unit` names one: "query x key", "element", …), the
    launch has `programs` of them. A unit moves `bytes` bytes between programs and memory, as the
    programs load and store them, and takes `flops` operations of the matrix units (multiplication
    and addition counted apart). `shape` holds the sizes of the whole launch; `reads` says how
    often a top-k program reads its row.

    `trips` maps loops to their iterations each time they are entered: "function" names the only
    loop of a function, "function#2" its second one in source order, "caller/function" that of a
    function inlined in `caller`, "function@2" that of the second call in the calling function.
    `skipped` names what this launch does not execute: a function, with the same paths, or a branch
    of its second `if` ("function:then#2", "function:else#2").
    """

    unit: str
    shape: Mapping[str, int | str]
    units: float
    programs: int
    bytes: float
    flops: float = 0.0
    trips: Mapping[str, float] = field(default_factory=dict)
    skipped: tuple[str, ...] = ()
    reads: float | None = None


@dataclass(frozen=True)
class CompileCase:
    """One specialisation of one kernel, as the op launches it.

    `signature` maps each runtime argument to its Triton type ("*fp32", "i32", "i64", …; a tuple
    of types for a tuple) in the kernel's order; `constexprs` holds the rest. `divisible` names
    arguments known to be multiples of 16 (contiguous tensors' strides, aligned pointers), as the
    launcher would find.
    `max_registers` limits those of a thread, on NVIDIA. Without `fp_fusion` no compiler may turn a
    product and a sum into one operation.
    `tensor_op` is part of a tensor-core instruction that must come out ("wgmma", "v_mfma", …).
    `dtype` is what the arithmetic is done on (bf16, fp16, fp32, fp8, or int32 where there is none);
    `default` whether an op launches this without being asked to. `work` has an entry for each
    launch worth a row of the report.
    """

    op: str
    label: str
    kernel: Any
    signature: dict[str, Any]
    constexprs: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    max_registers: int | None = None
    fp_fusion: bool = True
    divisible: tuple[str, ...] = ()
    tensor_op: str | None = None
    dtype: str = "int32"
    default: bool = True
    work: tuple[Work, ...] = field(kw_only=True)
