"""Counts the property examples that ran, by op."""

import functools
from collections import Counter
from collections.abc import Callable

EXAMPLES: Counter[str] = Counter()


def counts_examples(op: str) -> Callable[[Callable], Callable]:
    """Put under `@given`: every execution of the test body counts as one example of `op`."""

    def decorate(test: Callable) -> Callable:
        @functools.wraps(test)
        def run(*args: object, **kwargs: object) -> None:
            EXAMPLES[op] += 1
            test(*args, **kwargs)

        return run

    return decorate
