"""Argument and content checks of the scoring ops."""

from __future__ import annotations

import torch

from .checks import INDEX_DTYPES, check_tensor

_FP8 = torch.float8_e4m3fn
#: Key dtypes by query dtype: its own, and those it holds exactly.
KEY_DTYPES = {
    _FP8: (_FP8,),
    torch.bfloat16: (torch.bfloat16, _FP8),
    torch.float16: (torch.float16, _FP8),
    torch.float32: (torch.float32, torch.bfloat16, torch.float16, _FP8),
}
MAX_HEADS = 128
MAX_HEAD_DIM = 256


def check_dtypes(q: torch.Tensor, name: str, key_dtype: torch.dtype) -> None:
    """Raises unless keys of that dtype can be widened exactly to the queries' dtype."""
    if key_dtype not in KEY_DTYPES[q.dtype]:
        need = " or ".join(str(d).removeprefix("torch.") for d in KEY_DTYPES[q.dtype])
        raise TypeError(f"{name} must be {need} when q is {q.dtype}, got {key_dtype}")


def check_head_sizes(q: torch.Tensor) -> tuple[int, int]:
    """H and D of q [..., H, D], if the kernels have tiles for them."""
    heads, head_dim = q.shape[-2], q.shape[-1]
    if not 1 <= heads <= MAX_HEADS:
        raise ValueError(f"q must have 1 to {MAX_HEADS} heads, got {heads} in {list(q.shape)}")
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(
            f"q must have a head dim of 1 to {MAX_HEAD_DIM}, got {head_dim} in {list(q.shape)}"
        )
    return heads, head_dim


def check_ragged_args(
    q: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor,
    row_starts: torch.Tensor,
    row_ends: torch.Tensor,
    k_scale: torch.Tensor | None,
) -> tuple[int, int, torch.device]:
    """T, L and device of a call whose arguments fit together; raises otherwise."""
    check_tensor("q", q, dtype=tuple(KEY_DTYPES), shape=(None, None, None))
    heads, head_dim = check_head_sizes(q)
    device, rows = q.device, q.shape[0]
    check_tensor("k", k, shape=(None, head_dim), device=device)
    check_dtypes(q, "k", k.dtype)
    length = k.shape[0]
    check_tensor("weights", weights, dtype=torch.float32, shape=(rows, heads), device=device)
    for name, bound in (("row_starts", row_starts), ("row_ends", row_ends)):
        check_tensor(name, bound, dtype=INDEX_DTYPES, shape=(rows,), device=device)
    if k_scale is not None:
        check_tensor("k_scale", k_scale, dtype=torch.float32, shape=(length,), device=device)
    return rows, length, device


def check_windows(row_starts: torch.Tensor, row_ends: torch.Tensor, length: int) -> None:
    """Content check: raises ValueError if a window that is not empty leaves [0, length)."""
    for name, bound, bad in (
        ("row_starts", row_starts, row_starts < 0),
        ("row_ends", row_ends, row_ends > length),
    ):
        bad = bad & (row_ends > row_starts)
        if bool(bad.any()):
            raise ValueError(
                f"{name} must stay in [0, {length}] where the window is not empty,"
                f" got {int(bound[bad][0])} ({int(bad.sum())} such rows)"
            )
