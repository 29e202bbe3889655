"""The score, and the survivors with what was changed."""

from __future__ import annotations

import difflib
import json
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from rich.console import Console
from rich.table import Table

from sins.sin import ROOT

from .explain import REASONS, Explanation
from .mutants import DROPPED, FOLDERS, Mutant, count_dropped
from .record import LETTERS, NOT_RUN
from .runner import KILLED, Verdict

LEAST = 0.9


@dataclass(frozen=True)
class Result:
    """Verdicts on mutants of the modules with these texts."""

    mutants: Sequence[Mutant]
    verdicts: Mapping[Mutant, Verdict]
    explained: Mapping[Mutant, Explanation]
    texts: Mapping[str, str]

    @property
    def survivors(self) -> list[Mutant]:
        return [m for m, verdict in self.verdicts.items() if not verdict.killed]

    @property
    def unexplained(self) -> list[Mutant]:
        return [m for m in self.survivors if m not in self.explained]

    @property
    def killed(self) -> dict[str, int]:
        return dict(Counter(v.how for v in self.verdicts.values() if v.killed))

    @property
    def score(self) -> float:
        return sum(self.killed.values()) / max(len(self.verdicts), 1)

    @property
    def reasons(self) -> dict[str, int]:
        """Survivors by reason."""
        return dict(
            Counter(e.reason for m in self.survivors if (e := self.explained.get(m))).most_common()
        )

    def change(self, mutant: Mutant) -> str:
        """The lines that differ, as a patch has them."""
        text = self.texts[mutant.file]
        lines = difflib.ndiff(text.splitlines(), mutant.source(text).splitlines())
        return "\n".join(line for line in lines if line[:1] in "+-")

    def write(self, path: Path) -> None:
        """One line a module: a letter a mutant, in the order of its operator's occurrences.

        With the commit of its verdicts, which is an earlier one where they were taken from there.
        """
        dirty = "+" if _git(f"status --porcelain {' '.join(FOLDERS)}") else ""
        commit = _git("rev-parse HEAD") + dirty
        judged_at = {m.file: v.commit for m, v in self.verdicts.items() if v.commit}
        rows = [
            {"file": file, "commit": judged_at.get(file, commit), **self._letters(file)}
            for file in self.texts
        ]
        head = {
            "commit": commit,
            "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M"),
            "mutants": len(self.verdicts),
            "score": round(self.score, 4),
            "killed": self.killed,
            "survived": len(self.survivors),
            "survivors_by_reason": self.reasons,
            "unexplained": len(self.unexplained),
            "not_run": count_dropped(list(self.mutants)),
            "letters": {letter: how for how, letter in LETTERS.items()} | {NOT_RUN: "not run"},
        }
        path.write_text("".join(f"{json.dumps(row)}\n" for row in [head, *rows]))

    def _letters(self, file: str) -> dict[str, str]:
        letters: dict[str, str] = {}
        for mutant in self.mutants:
            if mutant.file == file:
                verdict = self.verdicts.get(mutant)
                letter = LETTERS[verdict.how] if verdict else NOT_RUN
                letters[mutant.operator] = letters.get(mutant.operator, "") + letter
        return letters


def report(
    result: Result, guilty: set[tuple[str, str]], missing: set[tuple[str, str]], changes: bool
) -> int:
    """Prints the score; returns the exit code."""
    console = Console()
    console.print(_table(result))
    for mutant in result.survivors:
        explanation = result.explained.get(mutant)
        if explanation is None or changes:
            why = f"{explanation.reason}: {explanation.why}" if explanation else "NOT EXPLAINED"
            text = f"{mutant.place}: {why}\n{result.change(mutant)}"
            console.print(text, markup=False, highlight=False)
    for reason, count in result.reasons.items():
        console.print(f"{count} survived, {reason}: {REASONS[reason]}")
    for why, count in count_dropped(list(result.mutants)).items():
        console.print(f"{count} of all were not run, {why}: {DROPPED[why]}")
    for backend, test in sorted(guilty):
        console.print(f"[bold red]fails without any mutant too ({backend}):[/] {test}")
    if missing:
        console.print(f"{len(missing)} tests of the map are gone: run --map")
    hows = ", ".join(f"{count} {how}" for how, count in result.killed.items())
    console.print(
        f"{sum(result.killed.values())} of {len(result.verdicts)} mutants killed ({hows}):"
        f" {result.score:.1%}; {len(result.unexplained)} survivors are not explained"
    )
    return int(bool(guilty or result.unexplained) or result.score < LEAST)


def _table(result: Result) -> Table:
    table = Table(
        "module", "mutants", "killed", "survived", "not explained", title="Mutation score"
    )
    for file in result.texts:
        mine = {m: v for m, v in result.verdicts.items() if m.file == file}
        if mine:
            killed = sum(v.how in KILLED for v in mine.values())
            unexplained = sum(m.file == file for m in result.unexplained)
            table.add_row(
                file, str(len(mine)), str(killed), str(len(mine) - killed), str(unexplained or "")
            )
    return table


def _git(command: str) -> str:
    run = subprocess.run(["git", *command.split()], cwd=ROOT, capture_output=True, text=True)
    return run.stdout.strip()
