"""The committed result, from which a run goes on that has no session of its own."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from sins.sin import ROOT

from .mutants import Mutant
from .runner import Verdict

FILE = Path(__file__).with_name("results.jsonl")
#: A verdict in the file, by operator and occurrence.
LETTERS = {"failed": "f", "import": "i", "crashed": "c", "hung": "h", "survived": "S"}
NOT_RUN = "-"


def recorded(
    mutants: Sequence[Mutant], texts: Mapping[str, str], path: Path = FILE
) -> Iterator[tuple[Mutant, Verdict]]:
    """The verdicts on mutants of modules that are today what they were at the verdicts' commit."""
    _, *rows = map(json.loads, path.read_text().splitlines())
    rows = [row for row in rows if row["file"] in texts]
    unchanged = {r["file"]: r for r in rows if _text_at(r["commit"], r["file"]) == texts[r["file"]]}
    hows = {letter: how for how, letter in LETTERS.items()}
    for mutant in mutants:
        row = unchanged.get(mutant.file, {})
        letter = row.get(mutant.operator, "")[mutant.occurrence :][:1]
        if letter in hows:
            yield mutant, Verdict(hows[letter], commit=row["commit"])


def _text_at(commit: str, file: str) -> str | None:
    """None if there is no such file, or no such commit in this clone."""
    command = ["git", "show", f"{commit}:{file}"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return None if run.returncode else run.stdout
