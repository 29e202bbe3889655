"""How often the kernel loads a row: counted in the interpreter, which performs every load."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import numpy as np
import pytest
import torch

from lightning_indexer.kernels.topk import topk_indices
from long_rows import ADVERSARIAL, PLATEAUS, long_row

pytestmark = pytest.mark.interpreter

LENGTH = 20_000
#: A sample of 2048 scores and the keys of at most 4096 candidates come on top of the reads.
ASIDE = (2048 + 4096) / LENGTH


@contextmanager
def counting_loads(x: torch.Tensor) -> Iterator[list[int]]:
    """The list's only entry grows by each element of `x` that a kernel loads."""
    from triton.runtime.interpreter import InterpreterBuilder

    loaded, load = [0], InterpreterBuilder.create_masked_load
    first, last = x.data_ptr(), x.data_ptr() + x.numel() * x.element_size()

    def counted(self: object, ptrs: object, mask: object, *args: object) -> object:
        inside = (ptrs.data >= first) & (ptrs.data < last) & mask.data
        loaded[0] += int(np.count_nonzero(inside))
        return load(self, ptrs, mask, *args)

    with patch.object(InterpreterBuilder, "create_masked_load", counted):
        yield loaded


def reads(kind: str, k: int) -> float:
    x = long_row(kind, LENGTH, k)
    with counting_loads(x) as loaded:
        topk_indices(x, k)
    return loaded[0] / LENGTH


@pytest.mark.parametrize("k", [1, 500, 2048, 2400, 9000, 19_990])
@pytest.mark.parametrize("kind", ADVERSARIAL)
def test_row_is_read_once_as_a_rule_twice_for_a_plateau_and_never_six_times(
    kind: str, k: int
) -> None:
    usual = kind in ("normal", "ascending", "descending", "periodic", "one binade") and k < 4096
    limit = 1 if usual else 2 if kind in PLATEAUS else 5
    assert reads(kind, k) <= limit + ASIDE


def test_every_read_of_a_row_is_counted() -> None:
    assert reads("sample lies high", 2048) > 2
