"""Which functions, loops and branches of the kernels' source a line of it lies in."""

from __future__ import annotations

import ast
import inspect
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from .assembly import Chain, Line


@dataclass(frozen=True)
class Scope:
    """A function, or a loop or branch inside one.

    `kind` is "function", "loop", "then" or "else". `number` counts, from 1 in source order, the
    calls of the function in its caller, the loops, or the `if` statements of the function. Lines
    `first` to `last` are the loop's header (its condition), or the function's or branch's first.
    """

    kind: str
    function: str
    number: int
    file: str
    first: int
    last: int

    def __str__(self) -> str:
        if self.kind == "function":
            return self.function if self.number == 1 else f"{self.function}@{self.number}"
        return f"#{self.number}" if self.kind == "loop" else f":{self.kind}#{self.number}"


#: Scopes from the kernel down to the innermost one.
Scopes = tuple[Scope, ...]


def scopes(chain: Chain) -> Scopes:
    """The scopes around an instruction, through every function inlined on the way to it."""
    return _scopes(chain)


@cache
def _scopes(chain: Chain) -> Scopes:
    found: list[Scope] = []
    caller: tuple[ast.FunctionDef, Line] | None = None
    for line in chain:
        function = _function_at(line)
        if function is None:  # a place that is no source line of ours
            break
        call = 1 if caller is None else _call_number(*caller, function.name)
        lines = (line.file, function.lineno, function.lineno)
        found.append(Scope("function", function.name, call, *lines))
        found.extend(_inner_scopes(function, line))
        caller = (function, line)
    return tuple(found)


def describe(path: Scopes) -> str:
    """The innermost function's name with its loop or branch, and where that is."""
    last = path[-1]
    name = last.function if last.kind == "function" else f"{last.function}{last}"
    return f"{name} at {Path(last.file).name}:{last.first}"


def loops(function: ast.FunctionDef) -> list[ast.For | ast.While]:
    """The loops of a function in source order."""
    return [node for node in _statements(function) if isinstance(node, (ast.For, ast.While))]


def branches(function: ast.FunctionDef) -> list[ast.If]:
    """The `if` statements of a function in source order; an elif is one of its own."""
    return [node for node in _statements(function) if isinstance(node, ast.If)]


def kernel_functions(kernel: Any) -> list[ast.FunctionDef]:
    """The functions of the files that hold a jitted kernel and what it calls, directly or not."""
    files: set[str] = set()
    waiting, seen = [kernel], set()
    while waiting:
        function = waiting.pop()
        if id(function) in seen:
            continue
        seen.add(id(function))
        files.add(str(inspect.getsourcefile(function.fn)))
        names = function.fn.__code__.co_names
        used = (function.fn.__globals__.get(name) for name in names)
        waiting.extend(called for called in used if hasattr(called, "fn"))
    return [function for file in sorted(files) for function in functions_of(file)]


@cache
def functions_of(file: str) -> tuple[ast.FunctionDef, ...]:
    """The functions of a source file; none if it is not to be found."""
    try:
        tree = ast.parse(Path(file).read_text("utf-8"))
    except OSError:
        return ()
    return tuple(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


@cache
def _statements(function: ast.FunctionDef) -> tuple[ast.stmt, ...]:
    found = [node for node in ast.walk(function) if isinstance(node, (ast.For, ast.While, ast.If))]
    return tuple(sorted(found, key=lambda node: (node.lineno, node.col_offset)))


def _inner_scopes(function: ast.FunctionDef, line: Line) -> list[Scope]:
    found: list[Scope] = []
    for number, loop in enumerate(loops(function), 1):
        if _holds([loop], line):
            condition = loop.test if isinstance(loop, ast.While) else loop.iter
            header = (line.file, loop.lineno, condition.end_lineno or loop.lineno)
            found.append(Scope("loop", function.name, number, *header))
    for number, branch in enumerate(branches(function), 1):
        for kind, body in (("then", branch.body), ("else", branch.orelse)):
            if _holds(body, line):
                first = body[0].lineno
                found.append(Scope(kind, function.name, number, line.file, first, first))
    return sorted(found, key=lambda scope: (scope.first, scope.kind != "loop"))


def _holds(body: list[Any], line: Line) -> bool:
    return bool(body) and body[0].lineno <= line.number <= (body[-1].end_lineno or 0)


def _call_number(caller: ast.FunctionDef, line: Line, name: str) -> int:
    for number, call in enumerate(_calls(caller, name), 1):
        if call.lineno <= line.number <= (call.end_lineno or 0):
            return number
    return 1


@cache
def _calls(caller: ast.FunctionDef, name: str) -> tuple[ast.Call, ...]:
    calls = [node for node in ast.walk(caller) if isinstance(node, ast.Call)]
    found = [call for call in calls if ast.unparse(call.func).rpartition(".")[2] == name]
    return tuple(sorted(found, key=lambda call: (call.lineno, call.col_offset)))


@cache
def _function_at(line: Line) -> ast.FunctionDef | None:
    inside = [
        function
        for function in functions_of(line.file)
        if function.lineno <= line.number <= (function.end_lineno or 0)
    ]
    return max(inside, key=lambda function: function.lineno, default=None)
