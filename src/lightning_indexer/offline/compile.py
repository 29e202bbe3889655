"""Compiles kernels for a target without its GPU and reads registers, spills and shared memory.

`python -m lightning_indexer.offline.compile --target sm_90` prints one JSON line a kernel.
Jitted functions of a process under TRITON_INTERPRET=1 cannot be compiled: `compile_target`
starts one without it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from .. import offline
from ..kernels.backend import INTERPRET, Target
from .case import TARGETS, CompileCase

_TENSOR_OPS = re.compile(
    r"wgmma\.mma_async[\w.:]*|tcgen05\.mma[\w.:]*|\bmma\.sync[\w.:]*|\bv_s?mfma\w*"
)


@dataclass(frozen=True)
class CompiledKernel:
    """What one case became on one target; `error` is set, and the figures 0, if it did not compile.

    `registers` are those of a thread, `spill_bytes` its stack (AMD: scratch) in memory.
    """

    op: str
    label: str
    target: str
    registers: int = 0
    spill_bytes: int = 0
    shared_bytes: int = 0
    tensor_ops: tuple[str, ...] = ()
    expected_tensor_op: str | None = None
    error: str | None = None


def all_cases(target: Target) -> Iterator[CompileCase]:
    """The cases of every module of this package that has any."""
    for module in pkgutil.iter_modules(offline.__path__):
        cases = getattr(importlib.import_module(f"{offline.__name__}.{module.name}"), "cases", None)
        if cases is not None:
            yield from cases(target)


def compile_case(case: CompileCase, target_name: str) -> CompiledKernel:
    """Compiles `case` for one of TARGETS; compiler errors are returned, not raised."""
    result = CompiledKernel(case.op, case.label, target_name, expected_tensor_op=case.tensor_op)
    try:
        compiled = _triton_compile(case, TARGETS[target_name])
    except Exception as error:  # whatever a compiler pass raises belongs in the report
        return replace(result, error=f"{type(error).__name__}: {error}"[:2000])
    read = _read_cubin if "cubin" in compiled.asm else _read_amdgcn
    registers, spill_bytes = read(compiled.asm)
    code = compiled.asm["ptx" if "ptx" in compiled.asm else "amdgcn"]
    return replace(
        result,
        registers=registers,
        spill_bytes=spill_bytes,
        shared_bytes=compiled.metadata.shared,
        tensor_ops=tuple(sorted(set(_TENSOR_OPS.findall(code)))),
    )


def compile_target(target_name: str) -> list[CompiledKernel]:
    """Compiles all cases for one of TARGETS in a fresh process without the interpreter."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", __spec__.name, "--target", target_name]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    results = [CompiledKernel(**json.loads(line)) for line in done.stdout.splitlines()]
    return [replace(r, tensor_ops=tuple(r.tensor_ops)) for r in results]


def _triton_compile(case: CompileCase, target: Target) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget

    names = case.kernel.arg_names
    constants = case.constexprs
    source = triton.compiler.ASTSource(
        fn=case.kernel,
        signature={n: "constexpr" if n in constants else case.signature[n] for n in names},
        constexprs=constants,
        attrs={(names.index(n),): [["tt.divisibility", 16]] for n in case.divisible},
    )
    warp_size = 64 if target.backend == "hip" else 32
    return triton.compile(
        source,
        target=GPUTarget(target.backend, target.arch, warp_size),
        options={"num_warps": case.num_warps, "num_stages": case.num_stages},
    )


def _read_cubin(asm: Any) -> tuple[int, int]:
    """Registers and stack bytes of the machine code: our kernels need a stack only to spill."""
    import triton.backends.nvidia as nvidia

    tool = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(asm["cubin"])
        command = [str(tool), "--dump-resource-usage", str(cubin)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = dict(re.findall(r"\b(REG|STACK):(\d+)", text))
    return int(usage["REG"]), int(usage["STACK"])


def _read_amdgcn(asm: Any) -> tuple[int, int]:
    """Vector registers, and bytes of scratch or of registers spilled into accumulators."""
    fields = dict(re.findall(r"^\s+\.(\w+):\s+(\d+)\s*$", asm["amdgcn"], flags=re.MULTILINE))
    scratch = int(fields["private_segment_fixed_size"])
    return int(fields["vgpr_count"]), max(scratch, 4 * int(fields["vgpr_spill_count"]))


def main() -> None:
    """Prints one JSON line for each case, optionally of one op only."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", choices=TARGETS, required=True)
    parser.add_argument("--op", help="compile only this op's cases")
    arguments = parser.parse_args()
    if INTERPRET:
        parser.error("unset TRITON_INTERPRET: the interpreter's functions cannot be compiled")
    for case in all_cases(TARGETS[arguments.target]):
        if arguments.op in (None, case.op):
            print(json.dumps(asdict(compile_case(case, arguments.target))), flush=True)


if __name__ == "__main__":
    main()
