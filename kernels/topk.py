"""Exact top-k selection of positions by the rule of the docs: ties to the smaller position."""

from __future__ import annotations

import torch

from . import topk_cpu
from .backend import use_triton
from .checks import INDEX_DTYPES, check_int, check_out, check_tensor
from .registry import register_op
from .topk_kernel import launch_topk

SCORE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MAX_LENGTH = 2**31 - 2**13  # positions, and the end of a block that holds the last, are int32


def topk_indices(
    logits: torch.Tensor,
    k: int,
    row_starts: torch.Tensor | None = None,
    row_ends: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """out[t] = the k positions s of the greatest logits[t, s], start ≤ s < end, ascending.

    Ties go to the smaller position, −0.0 equals +0.0, +inf is the greatest; NaN and −inf are
    never selected. Positions count from the row's start: s − max(row_starts[t], 0).

    Args:
        logits: [T, L] fp32, fp16 or bf16, any strides. What lies outside a row's window is never
            looked at.
        k: at least 1; may exceed L.
        row_starts: [T] int32 or int64, the window's first column (default 0; negative is 0).
        row_ends: [T] int32 or int64, one past its last column (default L; more is L). A window
            with end ≤ start, negative ends included, is empty.
        out: [T, k] int32, any strides, sharing no memory with the inputs.

    Returns:
        `out`, valid positions first and ascending, then −1 where a row has fewer than k
        selectable scores.

    Raises:
        TypeError, ValueError: an argument of wrong type, dtype, shape or device. `out` is
            untouched then.

    Guarantees:
        Exact for every score distribution (no capacity limit), with a bounded number of reads.
        The same bits on every run, backend and batch. Does not synchronise on a GPU.

    Source:
        The lightning indexer's selection in DeepSeek-V3.2, with the tie rule made explicit.
    """
    check_tensor("logits", logits, dtype=SCORE_DTYPES, shape=(None, None))
    if logits.shape[1] > MAX_LENGTH:
        raise ValueError(f"logits must have at most {MAX_LENGTH} columns, got {logits.shape[1]}")
    check_int("k", k, minimum=1)
    device, rows = logits.device, logits.shape[0]
    for name, bound in (("row_starts", row_starts), ("row_ends", row_ends)):
        if bound is not None:
            check_tensor(name, bound, dtype=INDEX_DTYPES, shape=(rows,), device=device)
    if out is None:
        out = torch.empty((rows, k), dtype=torch.int32, device=device)
    else:
        check_out(out, dtype=torch.int32, shape=(rows, k), device=device)
    TOPK_OP(logits, k, row_starts, row_ends, out=out)
    return out


def _topk(
    logits: torch.Tensor,
    k: int,
    row_starts: torch.Tensor | None,
    row_ends: torch.Tensor | None,
    *,
    out: torch.Tensor,
) -> None:
    if out.numel() == 0:
        return
    select = launch_topk if use_triton(out) else topk_cpu.select_rows
    select(logits, k, row_starts, row_ends, out)


TOPK_OP = register_op(
    "topk_indices(Tensor logits, int k, Tensor? row_starts, Tensor? row_ends,"
    " *, Tensor(a!) out) -> ()",
    _topk,
    mutates="out",
)
