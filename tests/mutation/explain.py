"""Survivors that no test can kill, or none here, each with the reason: `survivors/*.toml`.

    [[mutant]]
    file = "kernels/*"
    at = "strict=True"
    operators = ["ReplaceTrueWithFalse"]
    reason = "guard"
    why = "both have one entry a request by construction"

`file` may be a pattern. `line` is a whole source line without its indentation; `at` is a part of
one that the changed place lies in; `function` is all of a function. Without `operators` all mutants
of the place are meant; `nth` (from 0) is one of those of the same operator in the line.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from .mutants import Mutant
from .places import Places

try:
    import tomllib
except ImportError:  # Python 3.10, where pytest brings it
    import tomli as tomllib

FOLDER = Path(__file__).with_name("survivors")
REASONS = {
    "equivalent": "the same values for every input that the code can get",
    "speed": "another schedule, tile or allocation, the same values",
    "message": "the text of an error or of a report",
    "guard": "a second line of defence: what it refuses is not reached, or refused before",
    "gpu": "code that runs on a GPU only, where its tests are",
    "platform": "code for a platform or a version of a library that is not this one",
}
FIELDS = {"file": str, "line": str, "at": str, "function": str, "operators": list, "nth": int}
FIELDS |= {"reason": str, "why": str}


@dataclass(frozen=True)
class Explanation:
    """Why some mutants may survive."""

    file: str
    reason: str
    why: str
    line: str = ""
    at: str = ""
    function: str = ""
    operators: tuple[str, ...] = ()
    nth: int | None = None

    def fits(self, mutant: Mutant, function: str, line: str, nth: int) -> bool:
        """Whether it explains a mutant of `line` of `function`, the nth of its operator there."""
        return (
            fnmatchcase(mutant.file, self.file)
            and self.line in ("", line.strip())
            and self.function in ("", function)
            and (not self.at or mutant.start[1] in _columns(self.at, line))
            and (not self.operators or mutant.operator in self.operators)
            and self.nth in (None, nth)
        )


def _columns(part: str, line: str) -> Iterator[int]:
    """The columns of all places where `part` lies in `line`."""
    first = line.find(part)
    while first >= 0:
        yield from range(first, first + len(part))
        first = line.find(part, first + 1)


def read_explanations(folder: Path = FOLDER) -> list[Explanation]:
    """All of them; raises ValueError for one of another form."""
    paths = sorted(folder.glob("*.toml"))
    tables = [(path.name, tomllib.loads(path.read_text())) for path in paths]
    return [_explanation(entry, name) for name, table in tables for entry in table["mutant"]]


def _explanation(entry: dict[str, Any], name: str) -> Explanation:
    wrong = [key for key, value in entry.items() if not isinstance(value, FIELDS.get(key, ()))]
    missing = [key for key in ("file", "reason", "why") if not entry.get(key)]
    missing += [] if {"line", "at", "function"} & entry.keys() else ["line, at or function"]
    if wrong or missing or entry["reason"] not in REASONS:
        known = ", ".join(REASONS)
        raise ValueError(f"{name}: {entry}: wrong {wrong}, missing {missing}; reasons: {known}")
    return Explanation(**{**entry, "operators": tuple(entry.get("operators", ()))})


def explain(
    mutants: Iterable[Mutant], explanations: Iterable[Explanation], texts: Mapping[str, str]
) -> dict[Mutant, Explanation]:
    """The first explanation of each mutant that has one; `mutants` are all of their files."""
    return {mutant: e[0] for mutant, e in explanations_of(mutants, explanations, texts) if e}


def explanations_of(
    mutants: Iterable[Mutant], explanations: Iterable[Explanation], texts: Mapping[str, str]
) -> Iterator[tuple[Mutant, list[Explanation]]]:
    """All that fit each mutant, in their order."""
    lines = {file: text.splitlines() for file, text in texts.items()}
    places = {file: Places(text) for file, text in texts.items()}
    explanations = list(explanations)
    counts: dict[tuple[str, int, str], int] = {}
    for mutant in mutants:
        place = (mutant.file, mutant.line, mutant.operator)
        nth = counts[place] = counts.get(place, -1) + 1
        line = lines[mutant.file][mutant.line - 1]
        function = places[mutant.file].of_mutant(mutant.start).partition("+")[0]
        yield mutant, [e for e in explanations if e.fits(mutant, function, line, nth)]
