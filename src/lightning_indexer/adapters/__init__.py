"""Adapters for other runtimes, one module a runtime; nothing here imports a runtime by itself."""
