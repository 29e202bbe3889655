"""Speculative decoding with a shared selection: batches, hooks, runners and verification."""
