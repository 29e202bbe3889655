"""Argument and content checks of the two ops that score a paged cache."""

from __future__ import annotations

import torch

from .cache_layout import check_cache
from .checks import INDEX_DTYPES, check_int, check_tensor
from .score_args import KEY_DTYPES, check_dtypes, check_head_sizes


def check_paged_args(
    q: torch.Tensor,
    cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    max_context_len: int,
    row_to_request: torch.Tensor | None,
    page_size: int,
) -> tuple[int, torch.device]:
    """Number of rows and device of a call whose arguments fit together; raises otherwise."""
    check_tensor("q", q, dtype=tuple(KEY_DTYPES), shape=(None, None, None, None))
    heads, head_dim = check_head_sizes(q)
    device, batch, next_n = q.device, q.shape[0], q.shape[1]
    check_int("page_size", page_size, minimum=1)
    check_int("max_context_len", max_context_len, minimum=0)
    check_cache(cache, page_size, head_dim)
    check_tensor("cache", cache, device=device)
    check_dtypes(q, "cache", torch.float8_e4m3fn if cache.dtype == torch.uint8 else cache.dtype)
    rows = batch * next_n
    check_tensor("weights", weights, dtype=torch.float32, shape=(rows, heads), device=device)
    check_tensor("context_lens", context_lens, dtype=INDEX_DTYPES, device=device)
    if row_to_request is not None:
        check_tensor("row_to_request", row_to_request, dtype=INDEX_DTYPES, device=device)
        check_tensor("row_to_request", row_to_request, shape=(batch,))
        if next_n != 1:
            raise ValueError(
                f"q must have shape [T, 1, H, D] with row_to_request, got {list(q.shape)}"
            )
        check_tensor("context_lens", context_lens, shape=(batch,))
    elif tuple(context_lens.shape) not in ((batch,), (batch, next_n)):
        raise ValueError(
            f"context_lens must have shape [B] = [{batch}] or [B, next_n] = [{batch}, {next_n}],"
            f" got {list(context_lens.shape)}"
        )
    requests = batch if row_to_request is None else None
    check_tensor(
        "block_table", block_table, dtype=torch.int32, shape=(requests, None), device=device
    )
    if block_table.shape[1] * page_size < max_context_len:
        raise ValueError(
            f"block_table must cover max_context_len {max_context_len}, got"
            f" {block_table.shape[1]} pages of {page_size}"
        )
    return rows, device


def check_paged_contents(
    lengths: torch.Tensor,
    block_table: torch.Tensor,
    row_to_request: torch.Tensor | None,
    *,
    num_pages: int,
    page_size: int,
    max_context_len: int,
) -> None:
    """Content check: raises ValueError if a row with keys would read what does not exist.

    `lengths` is [B, N]; rows of no keys, as padding is, may name any request.
    """
    if bool((lengths > max_context_len).any()):
        raise ValueError(
            f"context_lens must be at most max_context_len {max_context_len},"
            f" got {int(lengths.max())}"
        )
    longest = lengths.clamp(min=0).amax(1) if lengths.numel() else lengths.new_zeros(0)
    requests = torch.arange(len(longest), device=longest.device)
    if row_to_request is not None:
        requests = row_to_request.to(torch.int64)
    used = longest > 0
    longest, requests = longest[used], requests[used]
    bad = (requests < 0) | (requests >= block_table.shape[0])
    if bool(bad.any()):
        raise ValueError(
            f"row_to_request must be in [0, {block_table.shape[0]}), got {int(requests[bad][0])}"
        )
    starts = torch.arange(block_table.shape[1], device=longest.device) * page_size
    pages = block_table[requests]
    bad = (starts < longest[:, None]) & ((pages < 0) | (pages >= num_pages))
    if bool(bad.any()):
        raise ValueError(
            f"block_table must name pages in [0, {num_pages}), got {int(pages[bad][0])}"
        )
