"""Machine code as text → instructions with the source lines they come from.

Reads `nvdisasm -c -gi` (SASS) and Triton's amdgcn. Only what counting needs is kept: the
instruction's name, where control may go, and the chain of source lines through inlined functions.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Line:
    """A line of a source file."""

    file: str
    number: int


#: The kernel's line first, then the lines inside the functions inlined there.
Chain = tuple[Line, ...]


@dataclass
class Instruction:
    """One instruction, or a label: `name` is empty then, and `targets` holds the label.

    `flow` is "next", "branch" (goes on or to one of `targets`), "jump", "call" or "end".
    """

    name: str
    chain: Chain = ()
    flow: str = "next"
    targets: tuple[str, ...] = ()


_SASS_LOCATION = re.compile(
    r'//## File "(?P<file>[^"]+)", line (?P<line>\d+)(?P<inlined> inlined at )?'
)
_SASS_LABEL = re.compile(r"^(\.L_x_\d+|\$[\w$]+):")
_SASS_INSTRUCTION = re.compile(
    r"^\s+(?:\{\s*)?/\*[0-9a-f]{4,}\*/\s+(?:\{\s*)?(?P<text>[^;/]*?)\s*;"
)
_SASS_TARGETS = re.compile(r"(?<![\w.])(?:\.L_x_\d+|\$[\w$]+)")

_SASS_JUMPS = ("BRA", "JMP", "UBRA", "BRX", "JMX", "CALL")


def parse_sass(text: str) -> list[Instruction]:
    """Instructions of a disassembled cubin; NOPs, which only fill up, are left out."""
    parsed: list[Instruction] = []
    chain: Chain = ()
    inner: list[Line] = []  # a chain is written one line a frame, innermost first
    for line in text.splitlines():
        if found := _SASS_LOCATION.search(line):
            inner.append(Line(found["file"], int(found["line"])))
            if not found["inlined"]:
                chain, inner = tuple(reversed(inner)), []
        elif found := _SASS_LABEL.match(line):
            parsed.append(Instruction("", targets=(found[1],)))
        elif found := _SASS_INSTRUCTION.match(line):
            instruction = _sass_instruction(found["text"], chain)
            if instruction.name.split(".")[0] != "NOP":
                parsed.append(instruction)
    return parsed


def _sass_instruction(text: str, chain: Chain) -> Instruction:
    guard, _, rest = text.partition(" ")
    guarded = guard.startswith("@")
    body = rest.strip() if guarded else text
    name, _, operands = body.partition(" ")
    goes_on = guarded or re.match(r"\s*!?U?P\d", operands) is not None
    kind = name.split(".")[0]
    targets = tuple(_SASS_TARGETS.findall(operands)) if kind in _SASS_JUMPS else ()
    flow = "next"
    if kind == "CALL" and "$" in operands:
        flow = "call"
    elif kind in _SASS_JUMPS and not name.startswith("BRA.DIV"):
        # BRA.DIV is for diverged warps: ours never are. A CALL of a label does not return.
        flow = "branch" if goes_on and kind not in ("BRX", "JMX") else "jump"
    elif kind in ("EXIT", "RET") and not goes_on:
        flow = "end"
    return Instruction(name, chain, flow, targets)


_AMD_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+(?:"([^"]*)"\s+)?"([^"]+)"')
_AMD_LOCATION = re.compile(r"^\s*\.loc\s+(\d+)\s+(\d+)\s+\d+[^;]*(?:;(.*))?$")
_AMD_CALLER = re.compile(r"@\[ ([^\s:]+):(\d+):\d+")
_AMD_LABEL = re.compile(r"^(\.?LBB\d+_\d+):")
_AMD_INSTRUCTION = re.compile(
    r"^\s+(?P<name>(?:[sv]|ds|global|buffer|flat|scratch)_\w+)(?P<operands>[^;]*)"
)


def parse_amdgcn(text: str) -> list[Instruction]:
    """Instructions of Triton's amdgcn text; NOPs are left out."""
    parsed: list[Instruction] = []
    files: dict[int, str] = {}
    chain: Chain = ()
    for line in text.splitlines():
        if found := _AMD_FILE.match(line):
            files[int(found[1])] = f"{found[2]}/{found[3]}" if found[2] else found[3]
        elif found := _AMD_LOCATION.match(line):
            chain = _amd_chain(files, int(found[1]), int(found[2]), found[3] or "")
        elif found := _AMD_LABEL.match(line):
            parsed.append(Instruction("", targets=(found[1],)))
        elif (found := _AMD_INSTRUCTION.match(line)) and not found["name"].endswith("_nop"):
            parsed.append(_amd_instruction(found["name"], found["operands"].strip(), chain))
    return parsed


def _amd_chain(files: dict[int, str], file: int, number: int, comment: str) -> Chain:
    if number == 0:
        return ()
    by_name = {path.rpartition("/")[2]: path for path in files.values()}
    callers = [Line(by_name.get(name, name), int(at)) for name, at in _AMD_CALLER.findall(comment)]
    return (*reversed(callers), Line(files[file], number))


def _amd_instruction(name: str, operands: str, chain: Chain) -> Instruction:
    flow = "next"
    if name.startswith("s_cbranch"):
        flow = "branch"
    elif name == "s_branch":
        flow = "jump"
    elif name == "s_endpgm":
        flow = "end"
    elif name in ("s_setpc_b64", "s_swappc_b64"):
        raise ValueError(f"cannot follow the indirect branch {name} {operands}")
    targets = (operands,) if flow in ("branch", "jump") else ()
    return Instruction(name, chain, flow, targets)
