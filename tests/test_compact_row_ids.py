"""Row ids that lie in the buffer they move, when it is wider than one program's slice."""

import pytest
import torch

from lightning_indexer.kernels.compact import compact_topk_indices, slice_shape
from lightning_indexer.testing import reference

HEIGHT, SLICES = 5, 3


@pytest.mark.parametrize("n", [1, 4, HEIGHT])
@pytest.mark.parametrize("slice_of_ids", range(SLICES))
def test_every_slice_goes_by_the_row_ids_of_before(slice_of_ids: int, n: int) -> None:
    _, width = slice_shape(n)
    g = torch.Generator().manual_seed(n)
    buffer = torch.randint(100, (HEIGHT, SLICES * width), dtype=torch.int32, generator=g)
    rows = buffer[:n, slice_of_ids * width]
    rows.copy_(torch.arange(n, 0, -1) % HEIGHT)
    expected = reference.compact_topk_indices(buffer, rows)
    compact_topk_indices(buffer, rows)
    assert torch.equal(buffer, expected)
