"""The paged cache of latent key-value rows."""

from __future__ import annotations

import torch

from ..kernels.checks import check_int

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class LatentCache:
    """One latent row of every token, in pages of S: what `sparse_mla_attention` takes as kv.

    Args:
        num_pages: P.
        width: of a row, kv_lora_rank + qk_rope_head_dim.
        page_size: S.
        dtype: bf16, fp16 or fp32.
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
        if dtype not in DTYPES:
            raise TypeError(f"dtype must be bfloat16, float16 or float32, got {dtype}")
        # The last row takes what slot −1 would have written: a write needs no shape that depends
        # on values, so graphs may hold it. Nothing ever reads that row.
        rows = num_pages * page_size + 1
        self._rows = torch.zeros((rows, width), dtype=dtype, device=device)

    @property
    def rows(self) -> torch.Tensor:
        """[P·S, width]: the row of every slot."""
        return self._rows[:-1]

    def write(self, latent: torch.Tensor, slots: torch.Tensor) -> None:
        """Stores latent [n, width] at flat slots [n]; slot −1 is skipped."""
        spare = self._rows.shape[0] - 1
        at = torch.where(slots < 0, spare, slots.to(torch.int64))
        self._rows.index_copy_(0, at, latent.to(self._rows.dtype))

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """Everything a runtime must save and restore with a page."""
        return {"latent": self.rows}
