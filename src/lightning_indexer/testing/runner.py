"""Runs a property on drawn cases and keeps the smallest that fails."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .extra import hypothesis, st
from .report import Failure, Outcome

#: Shrinking stops after so many seconds; the smallest failing case until then is reported.
SHRINK_SECONDS = 10.0


@dataclass(frozen=True)
class Property:
    """A statement about a kernel.

    Attributes:
        name: what it states.
        cases: draws the cases it is tried on.
        check: raises on a case where it does not hold.
    """

    name: str
    cases: st.SearchStrategy
    check: Callable[[Any], None]


class _Trial:
    """The test body: counts, remembers failing cases, and stops shrinking when time is up."""

    def __init__(self, check: Callable[[Any], None]) -> None:
        self.check, self.count = check, 0
        self.failed: dict[object, Exception] = {}
        self.last: object = None
        self.until = float("inf")

    def __call__(self, case: object) -> None:
        if case in self.failed:
            self._fail(case, self.failed[case])
        if time.monotonic() > self.until:
            return  # only cases known to fail still do: the search ends with the smallest of them
        self.count += 1
        try:
            self.check(case)
        except Exception as error:
            if not self.failed:
                self.until = time.monotonic() + SHRINK_SECONDS
            self._fail(case, error)

    def _fail(self, case: object, error: Exception) -> None:
        self.failed[case], self.last = error, case
        raise error


def run_property(prop: Property, examples: int) -> Outcome:
    """Tries `prop` on that many cases, always the same ones; shrinks the first that fails."""
    trial = _Trial(prop.check)

    @hypothesis.settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        report_multiple_bugs=False,
        print_blob=False,
        verbosity=hypothesis.Verbosity.quiet,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=(hypothesis.Phase.generate, hypothesis.Phase.shrink),
    )
    @hypothesis.given(case=prop.cases)
    def search(case: object) -> None:
        trial(case)

    try:
        search()
    except Exception:
        if not trial.failed:
            raise  # a fault of ours: drawing a case went wrong
        reason = _reason(trial.failed[trial.last])
        return Outcome(prop.name, trial.count, Failure(trial.last, reason))
    return Outcome(prop.name, trial.count)


def _reason(error: Exception) -> str:
    """The check's words; or the kernel's own error, said to be one."""
    words = str(error) or type(error).__name__
    if isinstance(error, AssertionError):
        return words
    return f"{type(error).__name__} raised: {words}"
