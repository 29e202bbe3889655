"""The test kit's own dependencies, asked for where they are needed and no earlier."""

try:
    import hypothesis
    from hypothesis import strategies as st
except ImportError as error:
    raise ImportError(
        "the conformance suites need hypothesis: pip install 'lightning-indexer[testing]'"
    ) from error

__all__ = ["hypothesis", "st"]
