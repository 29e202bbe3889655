"""NVIDIA machine code: assembled from Triton's PTX, disassembled, and its resources read."""

from __future__ import annotations

import re
import struct
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .assembly import Instruction, parse_sass

#: Makes a cubin of PTX, with the options the kernel was compiled with.
Assemble = Callable[[str], bytes]


def resource_usage(asm: Any) -> tuple[int, int]:
    """Registers of a thread, and its stack bytes: our kernels need a stack only to spill."""
    text = _run("cuobjdump", asm["cubin"], "-res-usage")
    usage = dict(re.findall(r"\b(REG|STACK):(\d+)", text))
    return int(usage["REG"]), int(usage["STACK"])


def disassemble(cubin: bytes) -> list[Instruction]:
    """The instructions with the source lines they come from."""
    return parse_sass(_run("nvdisasm", cubin, "-c", "-gi"))


def located(asm: Any, assemble: Assemble) -> bytes:
    """The compiled kernel's cubin, with right source lines.

    Triton numbers the lines of inline assembly as if they were source lines: a load of a few
    registers appears to come from lines further down.

    Raises:
        ValueError: the assembler gave other code the second time, so lines cannot be told.
    """
    cubin = assemble(_without_lines_of_inline_assembly(asm["ptx"]))
    if _code(cubin) != _code(asm["cubin"]):
        raise ValueError("assembling the same PTX again gave other machine code")
    return cubin


def rolled(asm: Any, assemble: Assemble) -> bytes:
    """The same kernel, of which the assembler unrolls no loop."""
    ptx = _without_lines_of_inline_assembly(asm["ptx"])
    pragma = r'\1\n.pragma "nounroll";'
    return assemble(re.sub(r"^(\.address_size.*)$", pragma, ptx, count=1, flags=re.MULTILINE))


def _without_lines_of_inline_assembly(ptx: str) -> str:
    kept, inside = [], False
    for line in ptx.splitlines():
        if "// begin inline asm" in line or "// end inline asm" in line:
            inside = "begin" in line
        if not (inside and line.lstrip().startswith(".loc")):
            kept.append(line)
    return "\n".join(kept) + "\n"


def _run(tool: str, cubin: bytes, *options: str) -> str:
    import triton.backends.nvidia as nvidia

    path = Path(nvidia.__file__).parent / "bin" / tool
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(path), *options, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _code(cubin: bytes) -> list[bytes]:
    """The bytes of the ELF file's executable sections."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, number = struct.unpack_from("<HH", cubin, 0x3A)
    found = []
    for i in range(number):
        flags, _, offset, length = struct.unpack_from("<QQQQ", cubin, table + i * size + 8)
        if flags & 4:  # SHF_EXECINSTR
            found.append(cubin[offset : offset + length])
    return found
