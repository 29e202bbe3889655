"""Oracles and helpers for testing kernels, ours or anybody's."""
