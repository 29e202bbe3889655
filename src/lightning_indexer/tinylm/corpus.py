"""Training text: the language reference that ships inside CPython."""

from __future__ import annotations

import hashlib
import sys
from dataclasses import dataclass

import torch

HELD_OUT = 20  # the last 1/20 of the text is for validation only


@dataclass(frozen=True)
class Corpus:
    """Bytes to learn from and bytes to be judged by.

    Attributes:
        train: [n] uint8.
        held_out: [m] uint8, the text's tail.
        source: where the text is from.
        sha256: of the whole text, recorded with the weights.
    """

    train: torch.Tensor
    held_out: torch.Tensor
    source: str
    sha256: str


def python_topics() -> Corpus:
    """`pydoc_data.topics`, about 460 KB of English; its bytes vary with CPython's version."""
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[name] for name in sorted(topics))
    version = ".".join(map(str, sys.version_info[:3]))
    return split_text(text, source=f"pydoc_data.topics of CPython {version}")


def split_text(text: str, *, source: str) -> Corpus:
    """A corpus of `text` as UTF-8 bytes."""
    raw = text.encode()
    data = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    held_out = len(raw) // HELD_OUT
    return Corpus(data[:-held_out], data[-held_out:], source, hashlib.sha256(raw).hexdigest())


def windows(data: torch.Tensor, starts: torch.Tensor, length: int) -> torch.Tensor:
    """int64 [n, length] bytes of `data` from each of starts [n]."""
    return data[starts.unsqueeze(1) + torch.arange(length)].to(torch.int64)
