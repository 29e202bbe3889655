"""Exact, deterministic sparse-attention indexer: scoring, top-k, and index sharing for MTP drafts."""
