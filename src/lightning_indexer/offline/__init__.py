"""Compiling every kernel for every target without a GPU, and reading what came out."""
