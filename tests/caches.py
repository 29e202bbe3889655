"""The kit's caches, by the name under which the tests of cache ops know them."""

from lightning_indexer.testing.caches import FLOATS, QUANTISED, Pool, make_pool

__all__ = ["FLOATS", "QUANTISED", "Pool", "make_pool"]
