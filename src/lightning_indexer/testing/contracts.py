"""What a kernel promises: the conformance suites draw only what is promised, and judge by that.

Defaults are this package's own promises. A kernel that promises less says so:
`TopkContract(order="any", tie_rule="any", windows=("none",))`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .attention_cases import CACHES, UNLISTED
from .bounds import ROUNDING
from .caches import FLOATS, QUANTISED
from .cases import BF16, DTYPE_PAIRS, FP16, FP32, ROW_ORDERS
from .layouts import LAYOUTS
from .paged_cases import CALLS, FORMS

INT32, INT64 = torch.int32, torch.int64


@dataclass(frozen=True, kw_only=True)
class KernelContract:
    """What every contract says.

    Attributes:
        device: where the kernel runs; inputs are drawn on the CPU and moved there.
        layouts: of inputs (and of `out`) that it takes, out of "contiguous", "padded" (rows of 16
            byte multiples), "odd offset", "transposed" and "strided".
        empty_sizes: whether sizes may be 0.
        deterministic: whether the same call gives the same bits again.
        takes_out: whether it writes into `out=` (it is then given poisoned memory); else it
            returns its result.
    """

    device: str = "cpu"
    layouts: tuple[str, ...] = LAYOUTS
    empty_sizes: bool = True
    deterministic: bool = True
    takes_out: bool = False

    def __post_init__(self) -> None:
        """Raises ValueError for a word that means nothing."""
        _check_words("layouts", self.layouts, LAYOUTS)


@dataclass(frozen=True, kw_only=True)
class TopkContract(KernelContract):
    """Of `fn(logits, k, row_starts, row_ends) → [T, k]` positions.

    Attributes:
        order: of the chosen positions in a row: "ascending", "score" (best first) or "any", a set.
        tie_rule: "smaller position" or "any": which of equal scores is chosen at the boundary.
        nan: "skipped", "greatest" (as torch.topk has it) or "absent": no promise, none is drawn.
        neg_inf: "skipped", "least" (an ordinary score) or "absent".
        pos_inf: whether +inf is drawn.
        padding: what fills the places that a row of few candidates leaves; None: no promise, so
            that every row has k candidates. Needs windows=("none",), for a window may be short.
        k_past_length: whether k may be greater than L; else only windows, NaN and −inf leave a
            row short.
        positions: counted from the row's start ("relative") or column 0 ("absolute").
        windows: which bounds it is given, out of "none", "ends", "both"; with ("none",) it is
            called as fn(logits, k).
        dtypes: of logits.
        bound_dtypes: of row bounds.
        index_dtype: of the result.
        max_length: the largest L. Lengths of 1,100 and less are drawn, and with a larger L rows
            of that length besides.
        max_k: the largest k.
        blocks: tile or buffer sizes; lengths next to them are drawn often.
    """

    order: str = "ascending"
    tie_rule: str = "smaller position"
    nan: str = "skipped"
    neg_inf: str = "skipped"
    pos_inf: bool = True
    padding: int | None = -1
    k_past_length: bool = True
    positions: str = "relative"
    windows: tuple[str, ...] = ("none", "ends", "both")
    dtypes: tuple[torch.dtype, ...] = (FP32, FP16, BF16)
    bound_dtypes: tuple[torch.dtype, ...] = (INT32, INT64)
    index_dtype: torch.dtype = INT32
    max_length: int = 1100
    max_k: int = 900
    blocks: tuple[int, ...] = (16, 64, 256, 512)

    def __post_init__(self) -> None:
        """Raises ValueError for a word that means nothing."""
        super().__post_init__()
        _check_words("order", (self.order,), ("ascending", "score", "any"))
        _check_words("tie_rule", (self.tie_rule,), ("smaller position", "any"))
        _check_words("nan", (self.nan,), ("skipped", "greatest", "absent"))
        _check_words("neg_inf", (self.neg_inf,), ("skipped", "least", "absent"))
        _check_words("positions", (self.positions,), ("relative", "absolute"))
        _check_words("windows", self.windows, ("none", "ends", "both"))
        if self.padding is None and self.windows != ("none",):
            raise ValueError(f"windows must be ('none',) without a padding, got {self.windows}")


@dataclass(frozen=True, kw_only=True)
class ScoreContract(KernelContract):
    """What both scoring contracts say.

    Attributes:
        outside: what lies outside a row's window: "-inf", or "anything" (it is not looked at).
        special_values: whether NaN and ±inf in a visible key reach its scores, and no others.
        batch_invariant: whether a score's bits depend on its query and key alone. If not, scores
            of the same query and key may differ by twice the error bound.
        rounding: unit roundoff of products and sums; 2^-8 for a kernel that sums in bf16.
        heads, head_dims: that it takes.
        max_rows, max_length: the largest T (B·N if paged) and L that are drawn.
    """

    outside: str = "-inf"
    special_values: bool = True
    batch_invariant: bool = True
    rounding: float = ROUNDING
    heads: tuple[int, ...] = (1, 2, 3, 4, 5, 16, 24, 33, 64)
    head_dims: tuple[int, ...] = (8, 32, 33, 40, 96, 128)
    max_rows: int = 20
    max_length: int = 150

    def __post_init__(self) -> None:
        """Raises ValueError for a word that means nothing."""
        super().__post_init__()
        _check_words("outside", (self.outside,), ("-inf", "anything"))


@dataclass(frozen=True, kw_only=True)
class MqaLogitsContract(ScoreContract):
    """Of `fn(q, k, weights, row_starts, row_ends, k_scale=…) → [T, L]` scores.

    Attributes:
        dtypes: pairs of query and key dtypes, names out of `cases.DTYPE_PAIRS`.
        scaled: whether k_scale is given, (True,), (False,) or both; with (False,) the argument is
            never passed.
        windows: kinds of windows, out of "full", "causal", "packed" and "any" (past the keys,
            negative, empty).
    """

    dtypes: tuple[str, ...] = tuple(DTYPE_PAIRS)
    scaled: tuple[bool, ...] = (False, True)
    windows: tuple[str, ...] = ("full", "causal", "packed", "any")

    def __post_init__(self) -> None:
        """Raises ValueError for a word that means nothing."""
        super().__post_init__()
        _check_words("dtypes", self.dtypes, tuple(DTYPE_PAIRS))
        _check_words("windows", self.windows, ("full", "causal", "packed", "any"))


@dataclass(frozen=True, kw_only=True)
class PagedMqaLogitsContract(ScoreContract):
    """Of `fn(q, cache, weights, context_lens, block_table, max_context_len=…, page_size=…)`.

    Attributes:
        calls: (declaration of the cache, dtype of queries), out of `paged_cases.CALLS`.
        forms: of lengths: "drafts" ([B]), "own lengths" ([B, N]), "ragged" (row_to_request=…).
        page_sizes: tokens a page.
        max_next_n: the largest N.
        garbage: whether pages outside the cache, requests outside the table and lengths outside
            [0, max_context_len] are drawn; such positions score −inf.
    """

    calls: tuple[tuple[str, torch.dtype], ...] = CALLS
    forms: tuple[str, ...] = FORMS
    page_sizes: tuple[int, ...] = (1, 7, 16, 64)
    head_dims: tuple[int, ...] = (8, 32, 40, 96, 128)  # of a quantised page: multiples of 4
    max_next_n: int = 3
    max_length: int = 90
    max_rows: int = 9
    garbage: bool = True

    def __post_init__(self) -> None:
        """Raises ValueError for a word that means nothing."""
        super().__post_init__()
        _check_words("forms", self.forms, FORMS)
        _check_words("calls", tuple(c for c, _ in self.calls), (*QUANTISED, *FLOATS))


@dataclass(frozen=True, kw_only=True)
class CompactContract(KernelContract):
    """Of `fn(buffers, rows)`, in place; `takes_out` does not matter.

    Attributes:
        several: whether it takes a list of buffers; else `fn(buffer, rows)`.
        repeats: whether a buffer may be listed twice (it is compacted once).
        num_rows: whether it takes `num_rows=`, from which on row ids are unknown.
        orders: of row ids, out of `cases.ROW_ORDERS`; "wild" has unknown ids, whose rows become
            −1.
        rows_dtypes: of row ids.
        max_height, max_width: of buffers.
    """

    several: bool = True
    repeats: bool = True
    num_rows: bool = True
    orders: tuple[str, ...] = ROW_ORDERS
    rows_dtypes: tuple[torch.dtype, ...] = (INT32, INT64)
    max_height: int = 40
    max_width: int = 140

    def __post_init__(self) -> None:
        """Raises ValueError for a word that means nothing."""
        super().__post_init__()
        _check_words("orders", self.orders, ROW_ORDERS)


@dataclass(frozen=True, kw_only=True)
class SlotsContract(KernelContract):
    """Of `fn(indices, block_table, row_to_request, page_size) → [T, W]` slots.

    Attributes:
        garbage: whether positions past the table, unknown requests and unassigned pages give −1;
            else only the position −1 does, and nothing worse is drawn.
        page_sizes: tokens a page.
        request_dtypes: of row_to_request (and of `out`, with `takes_out`).
    """

    garbage: bool = True
    page_sizes: tuple[int, ...] = (1, 3, 4, 64)
    request_dtypes: tuple[torch.dtype, ...] = (INT32, INT64)


@dataclass(frozen=True, kw_only=True)
class SparseAttentionContract(KernelContract):
    """Of `fn(q, kv, indices, scale, v_dim) → (out, lse)`, or out alone.

    Attributes:
        caches: what a slot holds: "floats" of q's dtype, "656 bytes" (fp8 values with their scales
            and bf16 RoPE values, for fp16 and bf16 queries of Dqk=576, v_dim=512), or both.
        dims: pairs (Dqk, v_dim), of floats.
        dtypes: of q and kv.
        heads: that it takes.
        lse: whether it returns the natural logarithm of the summed exponentials as well.
        empty_rows: whether −1 is drawn, and with it rows without a slot, which give 0 and −inf;
            else every index is a slot.
        garbage: whether slots outside the pool are skipped as −1 is.
        repeats: whether a slot may be listed twice (it counts twice).
        unlisted: what slots that no index names hold: "special" (NaN and infinity, for they are
            not read) or "finite" (a kernel may multiply them by 0).
        batch_invariant: whether −1 appended to a row leaves its bits alone. If not, results may
            differ by twice the error bound.
        operand: unit roundoff of what weights are multiplied in; 2^-11 or 2^-8 for a kernel that
            rounds them to fp16 or bf16. Sums are of fp32.
        max_rows, max_width, max_slots: the largest T, W and pool.
    """

    caches: tuple[str, ...] = CACHES
    dims: tuple[tuple[int, int], ...] = ((16, 16), (24, 16), (40, 32), (96, 64))
    dtypes: tuple[torch.dtype, ...] = (FP32, FP16, BF16)
    heads: tuple[int, ...] = (1, 2, 3, 16, 17)
    lse: bool = True
    garbage: bool = True
    empty_rows: bool = True
    repeats: bool = True
    unlisted: str = "special"
    batch_invariant: bool = True
    operand: float = ROUNDING
    max_rows: int = 4
    max_width: int = 70
    max_slots: int = 100

    def __post_init__(self) -> None:
        """Raises ValueError for a word that means nothing."""
        super().__post_init__()
        _check_words("unlisted", (self.unlisted,), UNLISTED)
        _check_words("caches", self.caches, CACHES)
        if "656 bytes" in self.caches and set(self.dtypes) <= {FP32}:
            raise ValueError(f"caches must be ('floats',) without fp16 and bf16, got {self.caches}")


@dataclass(frozen=True, kw_only=True)
class IndexSharingContract:
    """Of a draft model that shares its selection.

    Attributes:
        hidden_size: width of the hidden states it takes.
        index_topk: keys it selects for a row.
        page_size: tokens a page of its caches.
        vocab_size: token ids to draw from.
        dtype: of hidden states.
        device: where it runs.
    """

    hidden_size: int
    index_topk: int
    page_size: int = 64
    vocab_size: int = 32
    dtype: torch.dtype = FP32
    device: str = "cpu"


def _check_words(name: str, words: tuple[str, ...], known: tuple[str, ...]) -> None:
    for word in words:
        if word not in known:
            raise ValueError(f"{name} must be out of {known}, got {word!r}")
