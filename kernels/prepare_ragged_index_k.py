"""Index keys as the projection leaves them → the keys and scales that `mqa_logits` takes."""

from __future__ import annotations

import torch

from .cache_layout import FLOAT_CACHES
from .checks import check_out, check_tensor, content_checks
from .e4m3 import as_bytes
from .prepare_k_kernel import Norm, check_norm, prepare_keys
from .quantize import check_scale_format
from .registry import register_op
from .rope_rows import Rope, check_hadamard, check_positions, check_rope


def prepare_ragged_index_k(
    k: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_bias: torch.Tensor | None,
    positions: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    eps: float,
    rope_style: str,
    rope_first: bool = True,
    hadamard: bool = False,
    scale_format: str | None = "fp32",
    out: tuple[torch.Tensor, torch.Tensor | None] | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """out[i] = hadamard(rope(layer_norm(k[i]))), quantised or not: `prepare_index_k` without cache.

    Args:
        k: [L, D] bf16, fp16 or fp32, any strides.
        norm_weight: [D] bf16, fp16 or fp32, any stride.
        norm_bias: like norm_weight, or None.
        positions: [L] int32 or int64, any stride; −1 for no token. None: row i of the tables is
            that of key i.
        cos: [positions, rope_dim/2] fp32, any strides; see `prepare_index_q`.
        sin: like cos.
        eps: added to the variance, at least 0.
        rope_style: "half_split" (pairs i, i + rope_dim/2) or "interleaved" (pairs 2i, 2i+1).
        rope_first: the first rope_dim dimensions are rotated; False: the last.
        hadamard: transform the key, as its queries are. D must be a power of two.
        scale_format: "fp32", "ue8m0" for power-of-two scales, None to leave keys floats.
        out: (keys, scales): [L, D] e4m3 and [L] fp32, or with scale_format None a tensor of k's
            dtype and None. Any strides, sharing no memory with the inputs.

    Returns:
        `out`, as above: what `prepare_index_k` would write and `read_index_k` gather.

    Raises:
        TypeError, ValueError: an argument of wrong type, dtype, shape or device. With
            LIGHTNING_INDEXER_CHECK=1 also a position below −1 or past the tables. Nothing is
            written then.

    Guarantees:
        Those of `prepare_index_k`. A position outside the tables gives a key that scores NaN.

    Source:
        As `prepare_index_k`; ragged prefill as in DeepGEMM's `fp8_mqa_logits`.
    """
    count, head_dim = check_tensor("k", k, dtype=FLOAT_CACHES, shape=(None, None)).shape
    if head_dim < 1:
        raise ValueError(f"k must have at least one column, got {list(k.shape)}")
    check_norm(k, norm_weight, norm_bias, eps)
    check_rope(k, positions, cos, sin, rope_style, rope_first)
    check_hadamard(hadamard, head_dim)
    if scale_format is not None:
        check_scale_format(scale_format)
    dtype = k.dtype if scale_format is None else torch.float8_e4m3fn
    if out is None:
        scales = None
        if scale_format is not None:
            scales = torch.empty(count, dtype=torch.float32, device=k.device)
        out = torch.empty((count, head_dim), dtype=dtype, device=k.device), scales
    else:
        if not (isinstance(out, tuple) and len(out) == 2):
            raise TypeError(f"out must be a tuple (keys, scales), got {type(out).__name__}")
        check_out(out[0], dtype=dtype, shape=(count, head_dim), device=k.device)
        if scale_format is not None:
            check_out(out[1], dtype=torch.float32, shape=(count,), device=k.device)
        elif out[1] is not None:
            raise TypeError(f"out[1] must be None without a scale_format, got {type(out[1])}")
    _op(
        *(k, norm_weight, norm_bias, positions, cos, sin, float(eps)),
        *(rope_style == "interleaved", rope_first, hadamard, scale_format == "ue8m0"),
        out=[as_bytes(out[0]), *(out[1:] if out[1] is not None else ())],
    )
    return out


def _prepare_ragged_index_k(
    k: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_bias: torch.Tensor | None,
    positions: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float,
    interleaved: bool,
    rope_first: bool,
    transform: bool,
    ue8m0: bool,
    *,
    out: list[torch.Tensor],
) -> None:
    if content_checks(k):
        check_positions(positions, cos.shape[0], None)
    norm = Norm(norm_weight, norm_bias, eps)
    rope = Rope(positions, cos, sin, interleaved, rope_first)
    # A cache of one-token pages, whose slots are the rows.
    scales = out[1][:, None] if len(out) == 2 else None
    prepare_keys(k, norm, rope, transform, ue8m0, out[0][:, None], scales, None)


_op = register_op(
    "prepare_ragged_index_k(Tensor k, Tensor norm_weight, Tensor? norm_bias, Tensor? positions,"
    " Tensor cos, Tensor sin, float eps, bool interleaved, bool rope_first, bool hadamard,"
    " bool ue8m0, *, Tensor(a!)[] out) -> ()",
    _prepare_ragged_index_k,
    mutates="out",
)
