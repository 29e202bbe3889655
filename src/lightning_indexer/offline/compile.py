"""Compiles a kernel for a target without its GPU, and reads what came out.

Jitted functions of a process under TRITON_INTERPRET=1 cannot be compiled: see pool.py.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from .. import offline
from ..kernels.backend import Target
from . import cubin
from .assembly import parse_amdgcn
from .attribution import attribute
from .case import TARGETS, CompileCase
from .count import Count, count
from .places import check_places, loop_place, skipped_place
from .source import kernel_functions

_TENSOR_OPS = re.compile(
    r"wgmma\.mma_async[\w.:]*|tcgen05\.mma[\w.:]*|\bmma\.sync[\w.:]*|\bv_s?mfma\w*"
)


@dataclass(frozen=True)
class CompiledKernel:
    """What one case became on one target; `error` is set, and the figures 0, if it did not compile.

    `registers` are those of a thread, `spill_bytes` its stack (AMD: scratch) in memory, `warps`
    those of a program. `counts` has an entry for each of the case's works, or `uncounted` says why
    not.
    """

    op: str
    label: str
    target: str
    registers: int = 0
    spill_bytes: int = 0
    shared_bytes: int = 0
    warps: int = 0
    tensor_ops: tuple[str, ...] = ()
    expected_tensor_op: str | None = None
    counts: tuple[Count, ...] = ()
    uncounted: str | None = None
    error: str | None = None


def all_cases(target: Target) -> Iterator[CompileCase]:
    """The cases of every module of this package that has any."""
    for module in pkgutil.iter_modules(offline.__path__):
        cases = getattr(importlib.import_module(f"{offline.__name__}.{module.name}"), "cases", None)
        if cases is not None:
            yield from cases(target)


def warp_size(target: Target) -> int:
    """Threads of a warp."""
    return 64 if target.backend == "hip" else 32


def compile_case(case: CompileCase, target_name: str) -> CompiledKernel:
    """Compiles `case` for one of TARGETS; errors are returned, not raised.

    Whatever a compiler pass raises belongs in the report, and so does a case that does not say how
    often a loop runs, or speaks of a loop there is not.
    """
    result = CompiledKernel(case.op, case.label, target_name, expected_tensor_op=case.tensor_op)
    try:
        compiled, assemble = _triton_compile(case, TARGETS[target_name])
    except Exception as error:
        return replace(result, error=f"{type(error).__name__}: {error}"[:2000])
    asm = compiled.asm
    read = cubin.resource_usage if "cubin" in asm else _read_amdgcn
    registers, spill_bytes = read(asm)
    result = replace(
        result,
        registers=registers,
        spill_bytes=spill_bytes,
        shared_bytes=compiled.metadata.shared,
        warps=compiled.metadata.num_warps,
        tensor_ops=tuple(sorted(set(_TENSOR_OPS.findall(asm.get("ptx") or asm["amdgcn"])))),
    )
    try:
        return replace(result, counts=_counts(case, compiled, assemble))
    except ValueError as error:
        return replace(result, uncounted=str(error))


def _counts(case: CompileCase, compiled: Any, assemble: Any) -> tuple[Count, ...]:
    functions = kernel_functions(case.kernel)
    for work in case.work:
        check_places(map(loop_place, work.trips), functions)
        check_places(map(skipped_place, work.skipped), functions)
    if not case.work:
        return ()
    iterations = None
    if "cubin" not in compiled.asm:
        code = attribute(parse_amdgcn(compiled.asm["amdgcn"]))
    else:
        code = attribute(cubin.disassemble(cubin.located(compiled.asm, assemble)))
        if code.flow.loops:
            rolled = attribute(cubin.disassemble(cubin.rolled(compiled.asm, assemble)))
            iterations = rolled.smallest_bodies()
    return tuple(count(code, work, iterations) for work in case.work)


def _triton_compile(case: CompileCase, target: Target) -> tuple[Any, Any]:
    """The compiled kernel, and a function from PTX to a cubin with the same options."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend

    names = case.kernel.arg_names
    constants = case.constexprs
    source = triton.compiler.ASTSource(
        fn=case.kernel,
        signature={n: "constexpr" if n in constants else case.signature[n] for n in names},
        constexprs=constants,
        attrs={(names.index(n),): [["tt.divisibility", 16]] for n in case.divisible},
    )
    gpu = GPUTarget(target.backend, target.arch, warp_size(target))
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages}
    if not case.fp_fusion:
        options["enable_fp_fusion"] = False
    if case.max_registers is not None:
        options["maxnreg"] = case.max_registers
    compiled = triton.compile(source, target=gpu, options=options)
    backend = make_backend(gpu)

    def assemble(ptx: str) -> Any:
        return backend.make_cubin(ptx, {}, backend.parse_options(options), target.arch)

    return compiled, assemble


def _read_amdgcn(asm: Any) -> tuple[int, int]:
    """Vector registers, and bytes of scratch or of registers spilled into accumulators."""
    fields = dict(re.findall(r"^\s+\.(\w+):\s+(\d+)\s*$", asm["amdgcn"], flags=re.MULTILINE))
    scratch = int(fields["private_segment_fixed_size"])
    return int(fields["vgpr_count"]), max(scratch, 4 * int(fields["vgpr_spill_count"]))
