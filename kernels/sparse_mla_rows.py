"""The 656-byte row of an fp8 MLA cache, seen as ordinary strided tensors.

512 e4m3 values, 4 fp32 scales (one for each 128 values), 64 bf16 RoPE values: what FlashMLA and
vLLM call `fp8_ds_mla`.
"""

from __future__ import annotations

import torch

ROW_BYTES = 656
VALUES = 512
GROUP = 128  # values of one scale
ROPE = 64
_SCALES = slice(VALUES, VALUES + 4 * (VALUES // GROUP))
_ROPE = slice(_SCALES.stop, ROW_BYTES)
_ALIGNMENT = 4  # bytes, of the scales


def check_rows(name: str, rows: torch.Tensor) -> None:
    """Raises unless `rows` is uint8 [slots, 656] whose scales are aligned; see `split_rows`."""
    if rows.dim() != 2 or rows.shape[1] != ROW_BYTES:
        raise ValueError(f"{name} in uint8 must have shape [any, 656], got {list(rows.shape)}")
    if rows.stride(1) != 1 or rows.stride(0) % _ALIGNMENT:
        raise ValueError(
            f"{name} in uint8 must have contiguous rows a multiple of 4 bytes apart,"
            f" got strides {rows.stride()}"
        )


def split_rows(name: str, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views of checked rows: bytes [slots, 512], scales [slots, 4] fp32, RoPE [slots, 64] bf16.

    Called in op bodies only: dynamo cannot trace the storage offset, which is checked here.
    """
    if rows.storage_offset() % _ALIGNMENT:
        raise ValueError(
            f"{name} in uint8 must start at a multiple of 4 bytes, got {rows.storage_offset()}"
        )
    scales, rope = rows[:, _SCALES], rows[:, _ROPE]
    return rows[:, :VALUES], scales.view(torch.float32), rope.view(torch.bfloat16)
