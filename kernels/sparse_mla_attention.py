"""Multi-head latent attention over selected rows of a key-value cache."""

from __future__ import annotations

import math

import torch

from .backend import use_triton
from .checks import (
    INDEX_DTYPES,
    check_int,
    check_out,
    check_range,
    check_tensor,
    content_checks,
)
from .registry import register_op
from .sparse_mla_cpu import attend_on_cpu
from .sparse_mla_launch import launch
from .sparse_mla_rows import ROPE, VALUES, check_rows

QUERY_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_HEADS = 128
MAX_DIM = 576
MAX_V_DIM = 512


def sparse_mla_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    scale: float,
    v_dim: int,
    *,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out[t,h] = Σ_j softmax_j(scale·q[t,h]·kv[indices[t,j]]) · kv[indices[t,j], :v_dim].

    Args:
        q: [T, Hq, Dqk] bf16, fp16 or fp32; Hq ≤ 128, Dqk ≤ 576. Any strides, as below.
        kv: [slots, Dqk] of q's dtype: one latent vector a slot, key and (its first v_dim columns)
            value of every head. Or uint8 [slots, 656] for bf16 or fp16 queries of Dqk=576 and
            v_dim=512: rows of 512 e4m3 values, 4 fp32 scales of 128 values each and 64 bf16 RoPE
            values, contiguous, a multiple of 4 bytes apart.
        indices: [T, W] int32 or int64 slots. −1 and slots outside [0, slots), anywhere in the row,
            are skipped. A slot listed twice counts twice.
        scale: finite factor of the dot products (a model's Dqk^-0.5, times YaRN's correction).
        v_dim: columns of kv that are values, 1 to min(Dqk, 512).
        out: [T, Hq, v_dim] of q's dtype, sharing no memory with the inputs.
        lse: [T, Hq] fp32, likewise.

    Returns:
        (`out`, `lse`): lse is the natural logarithm of Σ_j exp(scale·q·k), by which partial
        results merge. A row without a slot has out 0 and lse −inf. NaN in a selected row, or a
        score of +inf, gives NaN.

    Raises:
        TypeError, ValueError: an argument of wrong type, dtype, shape or device, naming it. With
            LIGHTNING_INDEXER_CHECK=1 also an index outside [−1, slots). Nothing is written then.

    Guarantees:
        A row's bits depend on its query and indices and on the rows of kv that they name, on
        dtypes, Hq, Dqk, v_dim and the device; not on T, other rows, or −1 appended to it.
        Scores, softmax and sums are fp32, products of fp32 inputs too; on a GPU weights (and fp8
        rows, once scaled) are rounded to q's dtype before they are multiplied. Rows that no index
        names have no effect, and on a GPU are never read. Scratch does not grow with T: a row's
        keys and scores in fp32 on a CPU, 32 MiB on a GPU (one row's, if that is more). Has no
        backward: results require no gradient. Does not synchronise on a GPU.

    Source:
        DeepSeek-V3.2's sparse attention; FlashMLA's `flash_mla_sparse_fwd` and its fp8 cache.
    """
    rows, heads = _check_inputs(q, kv, indices, scale, v_dim)
    if out is None:
        out = torch.empty((rows, heads, v_dim), dtype=q.dtype, device=q.device)
    else:
        check_out(out, dtype=q.dtype, shape=(rows, heads, v_dim), device=q.device)
    if lse is None:
        lse = torch.empty((rows, heads), dtype=torch.float32, device=q.device)
    else:
        check_tensor("lse", lse, dtype=torch.float32, shape=(rows, heads), device=q.device)
    _op(q, kv, indices, float(scale), out=[out, lse])
    return out, lse


def _check_inputs(
    q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor, scale: float, v_dim: int
) -> tuple[int, int]:
    """T and Hq of a call whose arguments fit together; raises otherwise."""
    rows, heads, dim = check_tensor("q", q, dtype=QUERY_DTYPES, shape=(None, None, None)).shape
    for name, size, most in (("heads", heads, MAX_HEADS), ("columns", dim, MAX_DIM)):
        if not 1 <= size <= most:
            raise ValueError(f"q must have 1 to {most} {name}, got {size} in {list(q.shape)}")
    check_int("v_dim", v_dim, minimum=1)
    if v_dim > min(dim, MAX_V_DIM):
        raise ValueError(f"v_dim must be at most {min(dim, MAX_V_DIM)}, got {v_dim}")
    if check_tensor("kv", kv, device=q.device).dtype == torch.uint8:
        check_rows("kv", kv)
        if q.dtype == torch.float32:
            raise TypeError("q must be bfloat16 or float16 when kv is uint8, got torch.float32")
        if dim != VALUES + ROPE:
            raise ValueError(f"q must have {VALUES + ROPE} columns when kv is uint8, got {dim}")
        if v_dim != VALUES:
            raise ValueError(f"v_dim must be {VALUES} when kv is uint8, got {v_dim}")
    else:
        check_tensor("kv", kv, dtype=(q.dtype, torch.uint8), shape=(None, dim))
    check_tensor("indices", indices, dtype=INDEX_DTYPES, shape=(rows, None), device=q.device)
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        raise TypeError(f"scale must be a number, got {type(scale).__name__}")
    if not -math.inf < scale < math.inf:
        raise ValueError(f"scale must be finite, got {scale}")
    return rows, heads


def _sparse_mla_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    scale: float,
    *,
    out: list[torch.Tensor],
) -> None:
    """The op; `out` holds out and lse."""
    if content_checks(q):
        check_range("indices", indices, -1, kv.shape[0])
    if q.shape[0] == 0:
        return
    if indices.shape[1] == 0 or kv.shape[0] == 0:
        out[0].zero_()
        out[1].fill_(float("-inf"))
        return
    attend = launch if use_triton(q) else attend_on_cpu
    attend(q, kv, indices, scale, *out)


_op = register_op(
    "sparse_mla_attention(Tensor q, Tensor kv, Tensor indices, float scale,"
    " *, Tensor(a!)[] out) -> ()",
    _sparse_mla_attention,
    mutates="out",
    parts=("out", "lse"),
)
