"""The names by which a case speaks of loops, functions and branches of a kernel's source."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from .source import Scopes, branches, describe, loops

_NAME = re.compile(
    r"(?P<functions>\w+(?:@\d+)?(?:/\w+(?:@\d+)?)*)(?:#(?P<loop>\d+)|:(?P<kind>then|else)#(?P<if>\d+))?"
)


@dataclass(frozen=True)
class Place:
    """A name, taken apart: functions from the outer to the inner, and a part of the last."""

    name: str
    functions: tuple[tuple[str, int | None], ...]
    kind: str
    number: int | None

    @property
    def depth(self) -> int:
        """How much the name says: the more, the sooner it is preferred."""
        return sum(1 if call is None else 2 for _, call in self.functions)

    def ends(self, path: Scopes) -> bool:
        """Whether the innermost scope of `path` is this place."""
        if not path or path[-1].kind != self.kind or path[-1].function != self.functions[-1][0]:
            return False
        if self.kind != "function" and self.number not in (None, path[-1].number):
            return False
        called = [(s.function, s.number) for s in path if s.kind == "function"]
        if not _fits(self.functions[-1], called.pop()):
            return False
        for function in reversed(self.functions[:-1]):
            while called and not _fits(function, called[-1]):
                called.pop()
            if not called:
                return False
            called.pop()
        return True

    def holds(self, path: Scopes) -> bool:
        """Whether some scope of `path` is this place."""
        return any(self.ends(path[: i + 1]) for i in range(len(path)))


def loop_place(name: str) -> Place:
    """A loop by its name: "function", "function#2", "caller/function@2#1"."""
    found = _match(name)
    if found["kind"]:
        raise ValueError(f"trips: {name!r} names a branch, not a loop")
    number = int(found["loop"]) if found["loop"] else None
    return Place(name, _functions(found["functions"]), "loop", number)


def skipped_place(name: str) -> Place:
    """What is not executed: "function", "caller/function@2", "function:else#1"."""
    found = _match(name)
    if found["loop"]:
        raise ValueError(f"skipped: {name!r} names a loop; give it no trips instead")
    number = int(found["if"]) if found["if"] else None
    return Place(name, _functions(found["functions"]), found["kind"] or "function", number)


def check_places(places: Iterable[Place], functions: Sequence[ast.FunctionDef]) -> None:
    """Raises a ValueError for a place that is not in the source, or not a single one."""
    by_name = {function.name: function for function in functions}
    for place in places:
        for name, _ in place.functions:
            if name not in by_name:
                raise ValueError(f"{place.name!r}: the kernel calls no function {name}")
        function = by_name[place.functions[-1][0]]
        if place.kind == "function":
            continue
        parts = loops(function) if place.kind == "loop" else branches(function)
        what = "loops" if place.kind == "loop" else "if statements"
        if place.number is None and len(parts) != 1:
            raise ValueError(f"{place.name!r}: {function.name} has {len(parts)} {what}, say which")
        if place.number is not None and not 1 <= place.number <= len(parts):
            raise ValueError(f"{place.name!r}: {function.name} has {len(parts)} {what}")


def trips_of(path: Scopes, trips: Mapping[Place, float]) -> float:
    """Iterations of the loop at the end of `path`, by the name that says most.

    Raises a ValueError where no name fits.
    """
    fitting = [place for place in trips if place.ends(path)]
    if not fitting:
        raise ValueError(f"the case states no trips for the loop {describe(path)}")
    return trips[max(fitting, key=lambda place: place.depth)]


def _fits(function: tuple[str, int | None], call: tuple[str, int]) -> bool:
    return function[0] == call[0] and function[1] in (None, call[1])


def _match(name: str) -> re.Match[str]:
    found = _NAME.fullmatch(name)
    if found is None:
        raise ValueError(f"{name!r} is no place like 'caller/function@2#1' or 'function:else#1'")
    return found


def _functions(text: str) -> tuple[tuple[str, int | None], ...]:
    parts = (part.partition("@") for part in text.split("/"))
    return tuple((name, int(call) if call else None) for name, _, call in parts)
