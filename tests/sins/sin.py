"""One sin: read from its file, and committed."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BACKENDS = ("cpu", "interpreter")
FIELDS = {"what", "file", "backend", "tests"}


@dataclass(frozen=True)
class Sin:
    """Lines `old` of `file` become `new`, and at least one of `tests` must fail then."""

    name: str
    what: str
    file: str
    backend: str
    tests: tuple[str, ...]
    old: str
    new: str

    def commit(self, source: str) -> str:
        """`source`, the text of `file`, with the sin in it."""
        sinful, count = re.subn(f"^{re.escape(self.old)}", lambda _: self.new, source, flags=re.M)
        if count != 1:
            raise ValueError(f"{self.name}: its lines must occur once in {self.file}, got {count}")
        return sinful


def read_sin(path: Path) -> Sin:
    """The sin of a file; its name is the file's."""
    head, _, body = path.read_text().partition("\n\n")
    fields = dict(line.split(": ", 1) for line in head.splitlines())
    if fields.keys() != FIELDS:
        raise ValueError(f"{path.name}: fields must be {sorted(FIELDS)}, got {sorted(fields)}")
    lines = body.splitlines()
    unknown = [line for line in lines if line[:1] not in ("", " ", "-", "+")]
    if unknown:
        raise ValueError(f"{path.name}: a line must begin with a blank, - or +, got {unknown[0]!r}")
    return Sin(
        name=path.stem,
        what=fields["what"],
        file=fields["file"],
        backend=fields["backend"],
        tests=tuple(fields["tests"].split()),
        old=_text(line for line in lines if line[:1] != "+"),
        new=_text(line for line in lines if line[:1] != "-"),
    )


def read_sins() -> list[Sin]:
    """All of them, by folder and name."""
    return [read_sin(path) for path in sorted(Path(__file__).parent.glob("*/*.diff"))]


def _text(lines: Iterable[str]) -> str:
    return "".join(f"{line[1:]}\n" for line in lines)
