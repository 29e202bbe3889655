"""The paged cache of latent key-value rows."""

from __future__ import annotations

import torch

from ..kernels.checks import check_int
from ..kernels.sparse_mla_rows import ROPE, ROW_BYTES, VALUES
from ..kernels.write_mla_kv import write_mla_kv

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


class LatentCache:
    """One latent row of every token, in pages of S: what `sparse_mla_attention` takes as kv.

    Args:
        num_pages: P.
        width: of a row, kv_lora_rank + qk_rope_head_dim.
        page_size: S.
        dtype: bf16, fp16 or fp32; or torch.float8_e4m3fn for the 656-byte rows of FlashMLA and
            vLLM, whose width is 512 + 64.
        device: where the rows live.
    """

    def __init__(
        self,
        num_pages: int,
        width: int,
        *,
        page_size: int = 64,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
    ) -> None:
        check_int("num_pages", num_pages, minimum=1)
        check_int("width", width, minimum=1)
        self.page_size = check_int("page_size", page_size, minimum=1)
        self.quantized = dtype == torch.float8_e4m3fn
        if self.quantized:
            if width != VALUES + ROPE:
                raise ValueError(f"width must be {VALUES + ROPE} for float8_e4m3fn, got {width}")
            dtype, width = torch.uint8, ROW_BYTES
        elif dtype not in FLOATS:
            raise TypeError(
                f"dtype must be bfloat16, float16, float32 or float8_e4m3fn, got {dtype}"
            )
        # The last row takes what slot −1 would have written: a write needs no shape that depends
        # on values, so graphs may hold it. Nothing ever reads that row.
        rows = num_pages * page_size + 1
        self._rows = torch.zeros((rows, width), dtype=dtype, device=device)

    @property
    def rows(self) -> torch.Tensor:
        """[P·S, width], or uint8 [P·S, 656]: the row of every slot."""
        return self._rows[:-1]

    def write(self, latent: torch.Tensor, slots: torch.Tensor) -> None:
        """Stores latent [n, width] at flat slots [n]; slot −1 is skipped."""
        if self.quantized:
            write_mla_kv(self.rows, latent, slots)
            return
        spare = self._rows.shape[0] - 1
        at = torch.where(slots < 0, spare, slots.to(torch.int64))
        self._rows.index_copy_(0, at, latent.to(self._rows.dtype))

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """Everything a runtime must save and restore with a page (scales lie inside the rows)."""
        return {"latent": self.rows}
