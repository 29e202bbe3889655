"""What a conformance suite found: a row a property, and the smallest failing case of each."""

from __future__ import annotations

from dataclasses import dataclass


class ConformanceError(AssertionError):
    """A kernel does not keep its promises; the message is the report."""


@dataclass(frozen=True)
class Failure:
    """The smallest case found on which a property does not hold.

    Attributes:
        case: shrunk; its repr is Python.
        reason: what was expected there and what came.
    """

    case: object
    reason: str

    def __str__(self) -> str:
        """Reason, then case."""
        return f"{self.reason}\n    smallest failing case: {self.case!r}"


@dataclass(frozen=True)
class Outcome:
    """One property: how many cases ran, and how it failed if it did."""

    name: str
    cases: int
    failure: Failure | None = None


@dataclass(frozen=True)
class ConformanceReport:
    """A kernel's outcomes, property by property; `str()` is a table."""

    kernel: str
    op: str
    outcomes: tuple[Outcome, ...]

    @property
    def failures(self) -> tuple[Outcome, ...]:
        """The properties that do not hold."""
        return tuple(o for o in self.outcomes if o.failure is not None)

    @property
    def cases(self) -> int:
        """Cases run in all, those tried while shrinking included."""
        return sum(o.cases for o in self.outcomes)

    def raise_if_failed(self) -> ConformanceReport:
        """Raises ConformanceError with the report if a property does not hold; else the report."""
        if self.failures:
            raise ConformanceError(str(self))
        return self

    def __str__(self) -> str:
        """A header, a line a property, then every failure."""
        verdict = f"{len(self.failures)} of {len(self.outcomes)} properties fail"
        if not self.failures:
            verdict = f"all {len(self.outcomes)} properties hold"
        lines = [f"{self.kernel} as {self.op}: {verdict}, {self.cases} cases"]
        for outcome in self.outcomes:
            state = "ok" if outcome.failure is None else "FAILED"
            lines.append(f"  {outcome.name:48} {outcome.cases:6}  {state}")
        for outcome in self.failures:
            lines.append(f"{outcome.name}:\n  {outcome.failure}")
        return "\n".join(lines)
