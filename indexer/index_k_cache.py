"""The paged cache of index keys."""

from __future__ import annotations

import torch

from ..kernels.cache_layout import FLOAT_CACHES, SCALE_BYTES
from ..kernels.checks import check_int
from ..kernels.read_index_k import read_index_k
from ..kernels.write_index_k import write_index_k


class IndexKCache:
    """Index keys of every token, in pages of S.

    Quantised (the default): uint8 [P, S, 1, D+4], e4m3 values then fp32 scales, the bytes that
    DeepGEMM, vLLM and SGLang use on NVIDIA. Or plain bf16, fp16 or fp32 [P, S, D].

    Args:
        num_pages: P.
        head_dim: D.
        page_size: S.
        dtype: torch.float8_e4m3fn (quantised), or torch.bfloat16, float16, float32.
        scale_format: "fp32", or "ue8m0" for power-of-two scales.
        device: where the pages live.
    """

    def __init__(
        self,
        num_pages: int,
        head_dim: int,
        *,
        page_size: int = 64,
        dtype: torch.dtype = torch.float8_e4m3fn,
        scale_format: str = "fp32",
        device: torch.device | str | None = None,
    ) -> None:
        check_int("num_pages", num_pages, minimum=1)
        check_int("head_dim", head_dim, minimum=1)
        self.page_size = check_int("page_size", page_size, minimum=1)
        self.head_dim = head_dim
        self.scale_format = scale_format
        if dtype == torch.float8_e4m3fn:
            shape: tuple[int, ...] = (num_pages, page_size, 1, head_dim + SCALE_BYTES)
            self.data = torch.zeros(shape, dtype=torch.uint8, device=device)
        elif dtype in FLOAT_CACHES:
            self.data = torch.zeros((num_pages, page_size, head_dim), dtype=dtype, device=device)
        else:
            raise TypeError(
                f"dtype must be float8_e4m3fn, bfloat16, float16 or float32, got {dtype}"
            )

    @property
    def quantized(self) -> bool:
        """Whether keys are e4m3 with a scale."""
        return self.data.dtype == torch.uint8

    def write(self, k: torch.Tensor, slots: torch.Tensor) -> None:
        """Inserts keys k [n, D] at flat slots [n]; slot −1 is skipped."""
        write_index_k(self.data, k, slots, page_size=self.page_size, scale_format=self.scale_format)

    def read(
        self, block_table: torch.Tensor, context_lens: torch.Tensor, *, total: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Keys [ΣL, D] and scales [ΣL] of each request's first context_lens tokens, in order."""
        return read_index_k(
            self.data,
            block_table,
            context_lens,
            page_size=self.page_size,
            head_dim=self.head_dim,
            total=total,
        )

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """Everything a runtime must save and restore with a page (scales lie inside the pages)."""
        return {"index_k": self.data}
