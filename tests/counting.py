"""Counts what ran: property examples by op and regime, and named figures as done / right.

Workers of pytest-xdist add theirs to the controller's; `--figures-json=FILE` writes all of them.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

#: Figures, each "what was done / how many of them came out as promised".
FAULTS = "faults injected / caught"
RERUNS = "bitwise reruns / equal"
BATCHES = "batch-invariance comparisons / equal"
CANARIES = "canary bytes checked / unchanged"
POISONED = "poisoned outputs / fully written or left as promised"
AGREEMENT = "implementations compared / agreeing"
FIGURES = (FAULTS, RERUNS, BATCHES, CANARIES, POISONED, AGREEMENT)

#: By (op, regime); by (figure, kind).
EXAMPLES: Counter[tuple[str, str]] = Counter()
DONE: Counter[tuple[str, str]] = Counter()
RIGHT: Counter[tuple[str, str]] = Counter()
COUNTERS = {"examples": EXAMPLES, "done": DONE, "right": RIGHT}

Check = TypeVar("Check", bound=Callable)


def tally(figure: str, kind: str, *, done: int = 1, right: int) -> None:
    """Adds to one of FIGURES; `kind` says of what. Call it whether or not the check passes."""
    assert figure in FIGURES, figure
    DONE[figure, kind] += done
    RIGHT[figure, kind] += right


def tallies(figure: str, kind: str) -> Callable[[Check], Check]:
    """Every call of the check counts as one done, and as right if it returns."""

    def decorate(check: Check) -> Check:
        @functools.wraps(check)
        def run(*args: Any, **kwargs: Any) -> Any:
            tally(figure, kind, right=0)
            result = check(*args, **kwargs)
            tally(figure, kind, done=0, right=1)
            return result

        return run  # type: ignore[return-value]

    return decorate


def counts_examples(op: str) -> Callable[[Check], Check]:
    """Put under `@given`: every execution of the test body counts as one example of `op`."""

    def decorate(test: Check) -> Check:
        @functools.wraps(test)
        def run(*args: Any, **kwargs: Any) -> Any:
            EXAMPLES[op, _regime((*args, *kwargs.values()))] += 1
            return test(*args, **kwargs)

        return run  # type: ignore[return-value]

    return decorate


def _regime(drawn: tuple[object, ...]) -> str:
    """That of the first drawn case that has one: of values, else of rows, else of ids."""
    for field in ("regime", "order"):
        for case in drawn:
            if hasattr(case, field):
                return str(getattr(case, field))
    garbage = [case.garbage for case in drawn if hasattr(case, "garbage")]
    return ("garbage" if garbage[0] else "valid") if garbage else "any"


def count_canaries(checked: int, changed: int) -> None:
    """An observer of guarded memory."""
    tally(CANARIES, "guarded memory", done=checked, right=checked - changed)


def rows() -> dict[str, list[list[Any]]]:
    """The counters as plain lists, [*key, count] each."""
    return {n: [[*key, c] for key, c in sorted(x.items())] for n, x in COUNTERS.items()}


def add(counted: dict[str, list[list[Any]]]) -> None:
    """Adds another process's `rows`."""
    for name, lines in counted.items():
        COUNTERS[name].update({tuple(key): count for *key, count in lines})


def totals(counter: Counter[tuple[str, str]]) -> dict[str, int]:
    """By the first half of the key."""
    found: Counter[str] = Counter()
    for (first, _), count in counter.items():
        found[first] += count
    return dict(sorted(found.items()))
