"""`python -m lightning_indexer` is the command `lightning-indexer`."""

from .cli import app

app()
