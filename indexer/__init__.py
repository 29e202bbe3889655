"""The indexer: configuration, layer plan, shared buffer, paged caches and the module."""
