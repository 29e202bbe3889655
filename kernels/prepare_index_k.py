"""Index keys as the projection leaves them → the paged cache, normed, rotated and quantised."""

from __future__ import annotations

import torch

from .cache_layout import FLOAT_CACHES, check_cache, split_pages
from .checks import INDEX_DTYPES, check_int, check_range, check_tensor, content_checks
from .prepare_k_kernel import Norm, check_norm, prepare_keys
from .quantize import check_scale_format
from .registry import register_op
from .rope_rows import Rope, check_hadamard, check_positions, check_rope


def prepare_index_k(
    k: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_bias: torch.Tensor | None,
    positions: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    eps: float,
    rope_style: str,
    rope_first: bool = True,
    hadamard: bool = False,
    page_size: int = 64,
    scale_format: str = "fp32",
) -> None:
    """cache[slots[i]] ← hadamard(rope(layer_norm(k[i]))), in place, as `write_index_k` stores it.

    layer_norm(x) = (x − mean)·(1 / sqrt(var + eps))·norm_weight + norm_bias, where mean and var
    are sums over D: neighbours are added, then neighbouring sums, and so on (zeros fill up to a
    power of two). RoPE and transform are those of `prepare_index_q`. All of it is IEEE fp32,
    operation by operation, rounded once at the end.

    Args:
        k: [n, D] bf16, fp16 or fp32, any strides.
        norm_weight: [D] bf16, fp16 or fp32, any stride.
        norm_bias: like norm_weight, or None.
        positions: [n] int32 or int64, any stride: rows of the tables; −1 for no token. None: row i
            of the tables is that of key i.
        cos: [positions, rope_dim/2] fp32, any strides; see `prepare_index_q`.
        sin: like cos.
        cache: what `write_index_k` takes: uint8 pages of e4m3 values and scales, or bf16, fp16 or
            fp32 [P, S, D].
        slots: [n] int32 or int64, any stride. −1, or a slot outside the cache: key not written.
        eps: added to the variance, at least 0.
        rope_style: "half_split" (pairs i, i + rope_dim/2) or "interleaved" (pairs 2i, 2i+1).
        rope_first: the first rope_dim dimensions are rotated; False: the last.
        hadamard: transform the key, as its queries are. D must be a power of two.
        page_size: S, tokens a page.
        scale_format: "fp32", or "ue8m0" for power-of-two scales. Float caches have no scale.

    Returns:
        None.

    Raises:
        TypeError, ValueError: an argument of wrong type, dtype, shape or device. With
            LIGHTNING_INDEXER_CHECK=1 also a slot outside [−1, P·S), and the position of a written
            key below −1 or past the tables. Nothing is written then.

    Guarantees:
        The same bytes on every device (NaN payloads of a float cache aside), whatever else is in
        the batch. Of equal slots the last one wins. Only the addressed rows change. A position
        outside the tables rotates by NaN: the key is written, and never selected. Does not
        synchronise.

    Source:
        DeepSeek-V3.2's indexer (`k_norm`, RoPE, `rotate_activation`, `act_quant`), and the fused
        cache writes of vLLM and SGLang.
    """
    count, head_dim = check_tensor("k", k, dtype=FLOAT_CACHES, shape=(None, None)).shape
    if head_dim < 1:
        raise ValueError(f"k must have at least one column, got {list(k.shape)}")
    check_norm(k, norm_weight, norm_bias, eps)
    check_rope(k, positions, cos, sin, rope_style, rope_first)
    check_hadamard(hadamard, head_dim)
    check_int("page_size", page_size, minimum=1)
    check_cache(cache, page_size, head_dim)
    check_tensor("cache", cache, device=k.device)
    check_tensor("slots", slots, dtype=INDEX_DTYPES, shape=(count,), device=k.device)
    check_scale_format(scale_format)
    _op(
        *(cache, k, norm_weight, norm_bias, positions, cos, sin, slots, float(eps)),
        *(rope_style == "interleaved", rope_first, hadamard, page_size, scale_format == "ue8m0"),
    )


def _prepare_index_k(
    cache: torch.Tensor,
    k: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_bias: torch.Tensor | None,
    positions: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    eps: float,
    interleaved: bool,
    rope_first: bool,
    transform: bool,
    page_size: int,
    ue8m0: bool,
) -> None:
    values, scales = split_pages(cache, page_size, k.shape[1])
    if content_checks(cache):
        check_range("slots", slots, -1, cache.shape[0] * page_size)
        check_positions(positions, cos.shape[0], slots >= 0)
    norm = Norm(norm_weight, norm_bias, eps)
    rope = Rope(positions, cos, sin, interleaved, rope_first)
    prepare_keys(k, norm, rope, transform, ue8m0, values, scales, slots)


_op = register_op(
    "prepare_index_k(Tensor(a!) cache, Tensor k, Tensor norm_weight, Tensor? norm_bias,"
    " Tensor? positions, Tensor cos, Tensor sin, Tensor slots, float eps, bool interleaved,"
    " bool rope_first, bool hadamard, int page_size, bool ue8m0) -> ()",
    _prepare_index_k,
    mutates="cache",
)
