"""All kernels compiled for a target, once for every test file that looks at them."""

from functools import cache

from lightning_indexer.offline.pool import Compiled, compile_all


@cache
def compiled_for(target: str) -> list[Compiled]:
    """What the package's cache holds, or else compiled now; other processes wait meanwhile."""
    return compile_all([target])
