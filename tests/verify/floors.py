"""What the figures must be; each miss is a sentence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from counting import FIGURES

from .figures import branch_share, examples_of, figure_of
from .plan import BACKENDS, FULL

EXAMPLES = 20_000
MUTANTS_KILLED = 0.90
BRANCHES = 0.95
MINUTES = 40


def misses(result: dict[str, Any]) -> list[str]:
    """Every promise that the figures break. Of a quick run, floors on counts are not asked."""
    found = [*_wrong(result), *_survivors(result)]
    return found + ([*_too_few(result)] if result["plan"] == FULL.name else [])


def _wrong(result: dict[str, Any]) -> Iterator[str]:
    """What came out otherwise than promised, and what was not counted at all."""
    for backend, outcome in result["tests"].items():
        for name in outcome["failed"]:
            yield f"{backend} pass: {name} failed"
        if not outcome["passed"]:
            yield f"{backend} pass: no test passed"
    for figure in FIGURES:
        done, right = figure_of(result, figure)
        if right != done:
            kinds = {
                k
                for k, by in result["figures"][figure].items()
                if any(d != r for d, r in by.values())
            }
            yield f"{figure}: {done} / {right} ({', '.join(sorted(kinds))})"
        if not done:
            yield f"{figure}: nothing was counted"


def _survivors(result: dict[str, Any]) -> Iterator[str]:
    sins, mutation = result["sins"], result["mutation"]
    for name in sins["accepted"]:
        yield f"sin accepted: {name}"
    if not sins["innocent_pass"]:
        yield "without any sin, the tests that reject them do not pass"
    if not mutation["innocent_pass"]:
        yield "without any mutant, the tests that kill them do not pass"
    if mutation["unexplained"]:
        yield f"{mutation['unexplained']} mutants survive and nobody says why"


def _too_few(result: dict[str, Any]) -> Iterator[str]:
    missing = [b for b in BACKENDS if b not in result["tests"]]
    if missing:
        yield f"no pass of the suite on: {', '.join(missing)}"
    if examples_of(result) < EXAMPLES:
        yield f"{examples_of(result)} property examples, fewer than {EXAMPLES}"
    killed, run = (result["mutation"][key] for key in ("killed", "run"))
    if run < FULL.mutants:
        yield f"{run} mutants run, fewer than {FULL.mutants}"
    if killed < MUTANTS_KILLED * run:
        yield f"{killed} of {run} mutants killed, under {MUTANTS_KILLED:.0%}"
    minutes = sum(result["seconds"].values()) / 60
    if minutes > MINUTES:
        yield f"{minutes:.0f} minutes, more than {MINUTES}"
    share = branch_share(result["coverage"])
    if share < BRANCHES:
        yield f"{share:.1%} of the branches run, under {BRANCHES:.0%}"
