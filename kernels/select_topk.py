"""Scores and selection in chunks of rows: the [T, L] matrix of scores never exists."""

from __future__ import annotations

import torch

from .checks import check_int, check_out, content_checks
from .e4m3 import as_bytes
from .mqa_logits import MQA_LOGITS_OP
from .paged_args import check_paged_args, check_paged_contents
from .paged_mqa_logits import PAGED_MQA_LOGITS_OP, row_lengths
from .registry import register_op
from .score_args import check_ragged_args, check_windows
from .topk import TOPK_OP

GPU_WORKSPACE_BYTES = 256 << 20
CPU_WORKSPACE_BYTES = 8 << 20  # what a last-level cache keeps between scoring and selection
SCORE_BYTES = 4


def select_topk(
    q: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor,
    row_starts: torch.Tensor,
    row_ends: torch.Tensor,
    topk: int,
    *,
    k_scale: torch.Tensor | None = None,
    workspace_bytes: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """out = topk_indices(mqa_logits(q, k, weights, row_starts, row_ends), topk, row_starts, …).

    Args:
        q, k, weights, row_starts, row_ends, k_scale: as `mqa_logits` takes them.
        topk: positions to select, at least 1; may exceed L.
        workspace_bytes: bound of the scores held at once, at least one row (4·L); by default
            256 MiB on a GPU and 8 MiB on a CPU, or one row where that is more.
        out: [T, topk] int32, sharing no memory with the inputs.

    Returns:
        `out`: positions relative to the row's start, ascending, then −1.

    Raises:
        TypeError, ValueError: an argument of wrong type, dtype, shape or device, a workspace
            below one row; with LIGHTNING_INDEXER_CHECK=1 a window that is not empty and leaves
            [0, L). `out` is untouched then.

    Guarantees:
        The bits of the two ops called one after the other, whatever the workspace. Allocates the
        workspace and no more that grows with T·L. Does not synchronise on a GPU.

    Source:
        The lightning indexer of DeepSeek-V3.2; the chunking of vLLM's sparse indexer.
    """
    rows, length, device = check_ragged_args(q, k, weights, row_starts, row_ends, k_scale)
    check_int("topk", topk, minimum=1)
    workspace_bytes = _check_workspace(workspace_bytes, length, device)
    out = _output(out, rows, topk, device)
    SELECT_TOPK_OP(
        as_bytes(q),
        as_bytes(k),
        weights,
        row_starts,
        row_ends,
        k_scale,
        topk,
        workspace_bytes,
        out=out,
    )
    return out


def paged_select_topk(
    q: torch.Tensor,
    cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    topk: int,
    *,
    max_context_len: int,
    row_to_request: torch.Tensor | None = None,
    page_size: int = 64,
    workspace_bytes: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """out = topk_indices(paged_mqa_logits(q, cache, …), topk).

    Args:
        q, cache, weights, context_lens, block_table, max_context_len, row_to_request, page_size:
            as `paged_mqa_logits` takes them.
        topk: positions to select, at least 1; may exceed max_context_len.
        workspace_bytes: bound of the scores held at once, at least one row (4·max_context_len);
            by default 256 MiB on a GPU and 8 MiB on a CPU, or one row where that is more.
        out: [B·N, topk] int32, sharing no memory with the inputs.

    Returns:
        `out`, flat rows: positions in the request's context, ascending, then −1.

    Raises:
        TypeError, ValueError: an argument of wrong type, dtype, shape or device, a workspace
            below one row; with LIGHTNING_INDEXER_CHECK=1 a length above max_context_len, or a
            request or page out of range in a row that uses it. `out` is untouched then.

    Guarantees:
        The bits of the two ops called one after the other, whatever the workspace. Allocates the
        workspace and no more that grows with rows·max_context_len. Does not synchronise on a GPU.

    Source:
        The lightning indexer of DeepSeek-V3.2; the decode path of vLLM's sparse indexer.
    """
    rows, device = check_paged_args(
        q, cache, weights, context_lens, block_table, max_context_len, row_to_request, page_size
    )
    check_int("topk", topk, minimum=1)
    workspace_bytes = _check_workspace(workspace_bytes, max_context_len, device)
    out = _output(out, rows, topk, device)
    PAGED_SELECT_TOPK_OP(
        as_bytes(q),
        cache,
        weights,
        context_lens,
        block_table,
        row_to_request,
        topk,
        max_context_len,
        page_size,
        workspace_bytes,
        out=out,
    )
    return out


def _check_workspace(workspace_bytes: int | None, length: int, device: torch.device) -> int:
    one_row = SCORE_BYTES * length
    if workspace_bytes is None:
        default = CPU_WORKSPACE_BYTES if device.type == "cpu" else GPU_WORKSPACE_BYTES
        return max(default, one_row)
    check_int("workspace_bytes", workspace_bytes, minimum=0)
    if workspace_bytes < one_row:
        raise ValueError(
            f"workspace_bytes must be at least {one_row} (one row of {length} fp32 scores),"
            f" got {workspace_bytes}"
        )
    return workspace_bytes


def _output(out: torch.Tensor | None, rows: int, topk: int, device: torch.device) -> torch.Tensor:
    if out is None:
        return torch.empty((rows, topk), dtype=torch.int32, device=device)
    return check_out(out, dtype=torch.int32, shape=(rows, topk), device=device)


def _workspace(rows: int, length: int, workspace_bytes: int, out: torch.Tensor) -> torch.Tensor:
    """Scores of as many rows as fit, and at least one."""
    fit = workspace_bytes // max(SCORE_BYTES * length, 1)
    shape = (max(1, min(rows, fit)), length)
    return torch.empty(shape, dtype=torch.float32, device=out.device)


def _select_topk(
    q: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor,
    row_starts: torch.Tensor,
    row_ends: torch.Tensor,
    k_scale: torch.Tensor | None,
    topk: int,
    workspace_bytes: int,
    *,
    out: torch.Tensor,
) -> None:
    """The op; uint8 q or k holds e4m3fn."""
    if content_checks(out):  # of all chunks, before the first is written
        check_windows(row_starts, row_ends, k.shape[0])
    rows = q.shape[0]
    workspace = _workspace(rows, k.shape[0], workspace_bytes, out)
    step = workspace.shape[0]
    for first in range(0, rows, step):
        chunk = slice(first, min(first + step, rows))
        starts, ends = row_starts[chunk], row_ends[chunk]
        logits = workspace[: chunk.stop - first]
        MQA_LOGITS_OP(q[chunk], k, weights[chunk], starts, ends, k_scale, out=logits)
        TOPK_OP(logits, topk, starts, ends, out=out[chunk])


SELECT_TOPK_OP = register_op(
    "select_topk(Tensor q, Tensor k, Tensor weights, Tensor row_starts, Tensor row_ends,"
    " Tensor? k_scale, SymInt topk, SymInt workspace_bytes, *, Tensor(a!) out) -> ()",
    _select_topk,
    mutates="out",
)


def _paged_select_topk(
    q: torch.Tensor,
    cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    row_to_request: torch.Tensor | None,
    topk: int,
    max_context_len: int,
    page_size: int,
    workspace_bytes: int,
    *,
    out: torch.Tensor,
) -> None:
    """The op; uint8 q holds e4m3fn. Chunks whole requests, or rows of one where N do not fit."""
    batch, next_n = q.shape[:2]
    lengths = row_lengths(context_lens, next_n)
    if content_checks(out):  # of all chunks, before the first is written
        check_paged_contents(
            lengths,
            block_table,
            row_to_request,
            num_pages=cache.shape[0],
            page_size=page_size,
            max_context_len=max_context_len,
        )
    lengths = lengths.clamp(0, max_context_len).to(torch.int32)
    workspace = _workspace(batch * next_n, max_context_len, workspace_bytes, out)
    rows_step = max(1, min(next_n, workspace.shape[0]))
    batch_step = max(1, workspace.shape[0] // rows_step)
    for b in range(0, batch, batch_step):
        requests = slice(b, min(b + batch_step, batch))
        for n in range(0, next_n, rows_step):
            chunk_n = slice(n, min(n + rows_step, next_n))
            first, last = b * next_n + n, (requests.stop - 1) * next_n + chunk_n.stop
            ends = lengths[requests, chunk_n]
            logits = workspace[: last - first]
            PAGED_MQA_LOGITS_OP(
                q[requests, chunk_n],
                cache,
                weights[first:last],
                ends,
                block_table if row_to_request is not None else block_table[requests],
                row_to_request[requests] if row_to_request is not None else None,
                page_size,
                out=logits,
            )
            TOPK_OP(logits, topk, None, ends.reshape(-1), out=out[first:last])


PAGED_SELECT_TOPK_OP = register_op(
    "paged_select_topk(Tensor q, Tensor cache, Tensor weights, Tensor context_lens,"
    " Tensor block_table, Tensor? row_to_request, SymInt topk, SymInt max_context_len,"
    " SymInt page_size, SymInt workspace_bytes, *, Tensor(a!) out) -> ()",
    _paged_select_topk,
    mutates="out",
)
