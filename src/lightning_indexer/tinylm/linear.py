"""Row-independent arithmetic: everything is computed in blocks of one fixed number of rows.

A matrix product of 1 row and of 8 rows differ in bits, and so do reductions and vector tails of
different lengths. Padding every batch with zero rows to whole blocks, and computing each block on
its own, makes a row's result independent of what else is in the batch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

BLOCK_ROWS = 8  # a decode step of up to 8 rows is one block; times any even width a whole vector


def in_row_blocks(compute: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
    """`compute` over leading blocks of BLOCK_ROWS rows, the last one padded with zero rows.

    Args:
        compute: maps tensors of BLOCK_ROWS rows each to one of as many rows, row by row.
        inputs: [T, ...] each, the same T ≥ 0.

    Returns:
        [T, ...], row t with bits that depend on row t of the inputs alone.
    """
    rows = inputs[0].shape[0]
    blocks = max(1, -(-rows // BLOCK_ROWS))
    padded = [_pad_rows(tensor, blocks * BLOCK_ROWS - rows) for tensor in inputs]
    if blocks == 1:
        return compute(*padded)[:rows]
    split = [tensor.split(BLOCK_ROWS) for tensor in padded]
    return torch.cat([compute(*block) for block in zip(*split, strict=True)])[:rows]


class RowBlockLinear(nn.Linear):
    """A linear layer whose rows do not influence each other's bits; a plain one in training."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, in] (in training [..., in]) → [T, out]."""
        if self.training:
            return super().forward(x)
        return in_row_blocks(super().forward, x)


def _pad_rows(tensor: torch.Tensor, missing: int) -> torch.Tensor:
    if missing:
        return F.pad(tensor, (0, 0) * (tensor.dim() - 1) + (0, missing))
    return tensor.contiguous()  # a stride must not choose another kernel either
