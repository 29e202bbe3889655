"""The rounds that the compile report assumes of a long row, against those the interpreter takes."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from lightning_indexer.kernels import topk_bracket, topk_finish
from lightning_indexer.kernels.topk import topk_indices
from lightning_indexer.offline.topk import ROUNDS, K

pytestmark = pytest.mark.interpreter


def score_row(length: int, kind: str, generator: torch.Generator) -> torch.Tensor:
    """Σ_h w·relu(q·k) of random queries, keys and weights: [1, length]."""
    q = torch.randn(64, 128, generator=generator)
    weights = torch.randn(64, generator=generator)
    k = torch.randn(length, 128, generator=generator)
    return torch.relu(k @ q.T) @ (weights.abs() if kind == "positive" else weights)[None].T


def _rounds(keys: np.ndarray, least: int, most: int, lo: int) -> int:
    """How often the bisection of `find_key` looks at the keys."""
    hi, rounds = int(keys.max()), 0
    while lo < hi:
        middle = hi - (hi - lo >> 1)
        reaching = int((keys >= middle).sum())
        lo = middle if reaching >= least else lo
        hi = hi if reaching > most else middle if reaching >= least else middle - 1
        rounds += 1
    return rounds


@contextmanager
def watching(module: Any, name: str, seen: list[Any], look: Any) -> Iterator[None]:
    function = getattr(module, name)

    def watched(*args: Any) -> Any:
        seen.append(look(*[arg.handle.data if hasattr(arg, "handle") else arg for arg in args]))
        return function(*args)

    with patch.object(module, name, watched):
        yield


def look_at_search(keys: np.ndarray, least: Any, most: Any, lo: Any) -> int:
    return _rounds(keys.astype(np.int64), *(int(np.asarray(n).item()) for n in (least, most, lo)))


def look_at_words(address: np.ndarray, n: Any, *_: Any) -> tuple[float, int]:
    """Most flags of a word, averaged over the words popped together; flags in all."""
    n_words = -(-int(np.asarray(n).item()) // 32)
    words = (ctypes.c_uint32 * n_words).from_address(int(np.asarray(address).item()))
    flags = np.unpackbits(np.frombuffer(words, np.uint8)).reshape(n_words, 32).sum(1)
    return float(np.mean([flags[i : i + 1024].max() for i in range(0, n_words, 1024)])), flags.sum()


@pytest.mark.parametrize("length, kind", [key for key in ROUNDS if key[0] < 1 << 18])
def test_rounds_of_the_report_are_those_of_a_run(length: int, kind: str) -> None:
    sampled: list[int] = []
    chosen: list[int] = []
    popped: list[tuple[float, int]] = []
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        x = score_row(length, kind, generator).T
        with (
            watching(topk_bracket, "find_key", sampled, look_at_search),
            watching(topk_finish, "find_key", chosen, look_at_search),
            watching(topk_finish, "pop_words", popped, look_at_words),
        ):
            topk_indices(x, K)
    most, listed = np.mean(popped or [(0, 0)], 0)
    seen = np.mean(sampled or [0]), np.mean(chosen), most, listed
    stated = np.array(ROUNDS[length, kind])
    assert (np.array(seen) <= 1.15 * stated).all() and (np.array(seen) >= 0.7 * stated).all(), seen
