"""Puts a mutated function into a package that has been imported: its code object is exchanged.

That is much quicker than an import. It does not reach what runs when a module is imported:
constants, defaults, decorators. `patch` says whether it could.
"""

from __future__ import annotations

import linecache
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType, FunctionType, ModuleType
from typing import Any


@dataclass(frozen=True)
class Change:
    """The code of one function, whose path leads through classes."""

    path: tuple[str, ...]
    new: CodeType


def changes(old: str, new: str, filename: str) -> list[Change] | None:
    """The functions whose code differs; None if something outside functions differs."""
    before, after = (compile(text, filename, "exec", dont_inherit=True) for text in (old, new))
    return _changes(before, after, ())


def patch(module: ModuleType, old: str, new: str) -> bool:
    """Makes `module`, imported from the text `old`, behave as `new`; False if it cannot."""
    filename = str(module.__file__)
    found = changes(old, new, filename)
    if found is None:
        return False
    functions = [_function(module, change.path) for change in found]
    if not all(functions):
        return False
    for change, function in zip(found, functions, strict=True):
        function.__code__ = change.new
    serve_lines(filename, new)
    return True


def serve_lines(filename: str, text: str) -> None:
    """Has linecache, through which Triton's interpreter reads a source, give `text`."""
    lines = text.splitlines(keepends=True)
    linecache.cache[filename] = (len(text), None, lines, filename)  # without a time: it is kept


def _changes(before: CodeType, after: CodeType, path: tuple[str, ...]) -> list[Change] | None:
    """Those inside a module or the body of a class."""
    found: list[Change] = []
    old, new = list(_inner(before)), list(_inner(after))
    if len(old) != len(new) or _without_inner(before) != _without_inner(after):
        return None
    for a, b in zip(old, new, strict=True):
        if a == b:
            continue
        if a.co_flags & 0x2:  # CO_NEWLOCALS: a function, not the body of a class
            found.append(Change((*path, a.co_name), b))
            continue
        inside = _changes(a, b, (*path, a.co_name))
        if inside is None:
            return None
        found += inside
    return found


def _inner(code: CodeType) -> Iterator[CodeType]:
    return (c for c in code.co_consts if isinstance(c, CodeType))


def _without_inner(code: CodeType) -> tuple[Any, ...]:
    constants = tuple((type(c), c) for c in code.co_consts if not isinstance(c, CodeType))
    return code.co_code, code.co_names, repr(constants)


def _function(module: ModuleType, path: tuple[str, ...]) -> FunctionType | None:
    """The function of that path, below what decorators have made of it."""
    scope: Any = vars(module)
    for name in path[:-1]:
        scope = vars(scope[name])
    found = scope.get(path[-1])
    while found is not None and not isinstance(found, FunctionType):
        if hasattr(found, "cache_clear"):
            found.cache_clear()
        if hasattr(found, "rewritten_fn"):  # what Triton's interpreter has made of functions
            found.rewritten_fn.clear()
        inner = ("__wrapped__", "fget", "__func__", "fn")  # cache, property, methods, triton.jit
        found = next((f for name in inner if (f := getattr(found, name, None))), None)
    while isinstance(found, FunctionType) and hasattr(found, "__wrapped__"):
        found = found.__wrapped__
    known = isinstance(found, FunctionType) and found.__code__.co_name == path[-1]
    return found if known else None
