"""The bytes of a paged index-K cache, seen as ordinary strided tensors.

A quantised page of S tokens is block-planar: bytes [0, S·D) hold e4m3 values at t·D + d, bytes
[S·D, S·D + 4·S) the fp32 scales at S·D + 4·t. Runtimes declare it [P, S, 1, D+4] uint8, which is
only a nominal view: values and scale of a token do not lie side by side. (Layout: DeepGEMM's
`fp8_paged_mqa_logits`, vLLM and SGLang on NVIDIA.)
"""

from __future__ import annotations

import torch

FLOAT_CACHES = (torch.bfloat16, torch.float16, torch.float32)
SCALE_BYTES = 4


def check_cache(cache: object, page_size: int, head_dim: int) -> None:
    """Raises unless `cache` can hold pages of `page_size` tokens of width `head_dim`.

    Accepts uint8 [P, S, 1, D+4], [P, S, D+4] and [P, bytes ≥ S·(D+4)] (pages may be strided, a
    page itself is contiguous), and bf16, fp16 or fp32 [P, S, D] of any strides.
    """
    if not isinstance(cache, torch.Tensor):
        raise TypeError(f"cache must be a tensor, got {type(cache).__name__}")
    shape, width = tuple(cache.shape), head_dim + SCALE_BYTES
    if cache.dtype in FLOAT_CACHES:
        if shape[1:] != (page_size, head_dim):
            raise ValueError(
                f"cache must have shape [P, page_size, D] = [any, {page_size}, {head_dim}],"
                f" got {list(shape)}"
            )
        return
    if cache.dtype != torch.uint8:
        raise TypeError(f"cache must be uint8, bfloat16, float16 or float32, got {cache.dtype}")
    nominal = shape[1:] in ((page_size, 1, width), (page_size, width))
    flat = len(shape) == 2 and shape[1] >= page_size * width
    if not (nominal or flat):
        raise ValueError(
            f"cache must have shape [P, {page_size}, 1, {width}], [P, {page_size}, {width}] or"
            f" [P, bytes ≥ {page_size * width}], got {list(shape)}"
        )
    inner = 1
    for size, stride in zip(reversed(shape[1:]), reversed(cache.stride()[1:]), strict=True):
        if size != 1 and stride != inner:
            raise ValueError(f"each cache page must be contiguous, got strides {cache.stride()}")
        inner *= size
    if page_size * head_dim % SCALE_BYTES or (shape[0] > 1 and cache.stride(0) % SCALE_BYTES):
        raise ValueError(
            "cache scales must be 4-byte aligned: page_size·D and the page stride must be multiples"
            f" of 4, got page_size·D={page_size * head_dim}, page stride {cache.stride(0)}"
        )


def split_pages(
    cache: torch.Tensor, page_size: int, head_dim: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Views of a checked cache: values [P, S, D] and, if quantised (uint8), scales [P, S] fp32.

    Called in op bodies only: dynamo cannot trace the storage offset, which is checked here.
    """
    if cache.dtype != torch.uint8:
        return cache, None
    if cache.storage_offset() % SCALE_BYTES:
        raise ValueError(
            f"cache must start at a multiple of 4 bytes, got offset {cache.storage_offset()}"
        )
    pages = cache.shape[0]
    data = page_size * head_dim
    stride = cache.stride(0) if pages > 1 else page_size * (head_dim + SCALE_BYTES)
    stride -= stride % SCALE_BYTES  # a lone page's stride is never used
    offset = cache.storage_offset()
    values = cache.as_strided((pages, page_size, head_dim), (stride, head_dim, 1), offset)
    raw = cache.as_strided((pages, SCALE_BYTES * page_size), (stride, 1), offset + data)
    return values, raw.view(torch.float32)
