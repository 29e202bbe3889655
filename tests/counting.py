"""Counts what ran, for the end of the session: property examples by op, and faults by step."""

import functools
from collections import Counter
from collections.abc import Callable

EXAMPLES: Counter[str] = Counter()
#: Faults that were raised inside a step, and those of them whose recovery was then asserted.
INJECTED: Counter[str] = Counter()
RECOVERED: Counter[str] = Counter()

COUNTERS = {"examples": EXAMPLES, "injected": INJECTED, "recovered": RECOVERED}


def counts_examples(op: str) -> Callable[[Callable], Callable]:
    """Put under `@given`: every execution of the test body counts as one example of `op`."""

    def decorate(test: Callable) -> Callable:
        @functools.wraps(test)
        def run(*args: object, **kwargs: object) -> None:
            EXAMPLES[op] += 1
            test(*args, **kwargs)

        return run

    return decorate
