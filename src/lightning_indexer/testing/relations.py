"""Metamorphic relations: two calls whose answers must agree, whatever the oracle says.

Each takes the kernel as a function of the named inputs and raises AssertionError where it breaks.
`agree` says how near two results must be; it gets both and what they are about.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .layouts import bits_of
from .regimes import BITS, FP8

Inputs = dict[str, Any]
Kernel = Callable[[Inputs], torch.Tensor]
Agree = Callable[[torch.Tensor, torch.Tensor, str], None]


def assert_equal(a: torch.Tensor, b: torch.Tensor, what: str) -> None:
    """Raises AssertionError unless a equals b; NaN equals NaN."""
    assert a.shape == b.shape, f"{what}: shapes {list(a.shape)} and {list(b.shape)}"
    wrong = ~((a == b) | (torch.isnan(a) & torch.isnan(b)))
    if wrong.any():
        at = tuple(wrong.nonzero()[0].tolist())
        raise AssertionError(f"{what}: {int(wrong.sum())} differ, first at {at}: {a[at]}, {b[at]}")


def distinct_scores(rows: int, length: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """[rows, length] scores without a tie: neighbouring numbers of the dtype, shuffled."""
    g = torch.Generator().manual_seed(seed)
    order = torch.rand(rows, length, generator=g).argsort(dim=1)
    one = torch.ones((), dtype=dtype).view(BITS[dtype.itemsize])
    return (order + int(one)).to(one.dtype).view(dtype)


# Selection. Inputs: logits, k, row_starts, row_ends.


def row_alone(select: Kernel, inputs: Inputs, agree: Agree) -> None:
    """A row's selection does not depend on its batch."""
    together = select(inputs)
    for t in range(together.shape[0]):
        row = {n: x[t : t + 1] if isinstance(x, torch.Tensor) else x for n, x in inputs.items()}
        agree(select(row), together[t : t + 1], f"row {t} alone and in its batch")


def window_is_slice(
    select: Kernel, inputs: Inputs, agree: Agree, positions: str = "relative"
) -> None:
    """A window of a row selects what the same scores alone do."""
    logits, starts, ends = (inputs[n] for n in ("logits", "row_starts", "row_ends"))
    windowed = select(inputs)
    for t in range(logits.shape[0]):
        start = 0 if starts is None else max(int(starts[t]), 0)
        end = max(int(ends[t]), start)
        alone = inputs | {"logits": logits[t : t + 1, start:end].clone()}
        got = select(alone | {"row_starts": None, "row_ends": None})
        if positions == "absolute":
            got = torch.where(got >= 0, got + start, got)
        agree(got, windowed[t : t + 1], f"window [{start}, {end}) of row {t} and its slice")


def keys_permuted(select: Kernel, inputs: Inputs, seed: int) -> None:
    """Of scores without a tie, the same keys are selected wherever they lie."""
    logits = inputs["logits"]
    order = torch.randperm(logits.shape[1], generator=torch.Generator().manual_seed(seed))
    plain, moved = select(inputs), select(inputs | {"logits": logits[:, order]})
    known = (moved >= 0) & (moved < logits.shape[1])
    assert bool(known.all()), "keys in another order: positions outside the row"
    as_sets(order[moved.long()], plain, "keys in another order")


def worse_keys_appended(select: Kernel, inputs: Inputs) -> None:
    """Keys worse than all others, behind them, change no row that has k keys."""
    logits = inputs["logits"]
    assert logits.shape[1] >= inputs["k"], "every row needs k keys"
    worse = -logits[:, : 1 + logits.shape[1] // 2].abs() - 1
    longer = inputs | {"logits": torch.cat([logits, worse], dim=1)}
    as_sets(select(longer), select(inputs), "worse keys appended")


def scores_doubled(select: Kernel, inputs: Inputs, agree: Agree) -> None:
    """Twice every score selects the same."""
    agree(select(inputs | {"logits": inputs["logits"] * 2}), select(inputs), "scores doubled")


def as_sets(a: torch.Tensor, b: torch.Tensor, what: str) -> None:
    """`assert_equal`, whatever the order in a row."""
    assert_equal(a.long().sort(dim=1).values, b.long().sort(dim=1).values, what)


# Ragged scores. Inputs: q, k, weights, row_starts, row_ends, k_scale.


def pick(x: torch.Tensor | None, index: torch.Tensor) -> torch.Tensor | None:
    """x[index], also where indexing is not implemented for the dtype."""
    return None if x is None else bits_of(x)[index].view(x.dtype)


def scored_keys_permuted(score: Kernel, inputs: Inputs, agree: Agree) -> None:
    """Over full windows, scores move with their keys."""
    length = inputs["k"].shape[0]
    order = torch.randperm(length, generator=torch.Generator().manual_seed(length))
    moved = inputs | {n: pick(inputs[n], order) for n in ("k", "k_scale")}
    undone = torch.empty_like(order)
    undone[order] = torch.arange(length)
    agree(score(moved)[:, undone], score(inputs), "keys in another order")


def rows_split(score: Kernel, inputs: Inputs, agree: Agree, names: tuple[str, ...]) -> None:
    """Two calls of half of the rows each give what one call does; `names` have an axis of rows."""
    whole = score(inputs)
    half = whole.shape[0] // 2
    parts = []
    for rows in (slice(0, half), slice(half, None)):
        parts.append(score(inputs | {n: inputs[n][rows] for n in names}))
    agree(torch.cat(parts), whole, "rows split over two calls")


def keys_split(score: Kernel, inputs: Inputs, agree: Agree) -> None:
    """Over full windows, two calls of half of the keys each give what one call does."""
    whole = score(inputs)
    half = whole.shape[1] // 2
    parts = []
    for keys in (slice(0, half), slice(half, None)):
        k, scale = inputs["k"][keys], inputs["k_scale"]
        part = {"k": k, "k_scale": None if scale is None else scale[keys]}
        ends = torch.full_like(inputs["row_ends"], k.shape[0])
        parts.append(score(inputs | part | {"row_ends": ends}))
    agree(torch.cat(parts, dim=1), whole, "keys split over two calls")


def unseen_keys_changed(score: Kernel, inputs: Inputs, agree: Agree) -> None:
    """What no window holds, NaN too, changes nothing."""
    before = score(inputs)
    places = torch.arange(inputs["k"].shape[0])
    starts, ends = inputs["row_starts"][:, None], inputs["row_ends"][:, None]
    unseen = ~((places >= starts) & (places < ends)).any(dim=0)
    k = inputs["k"].clone()
    if k.dtype == FP8:
        bits_of(k)[unseen] = 0x7F
    else:
        k[unseen] = torch.nan
    agree(score(inputs | {"k": k}), before, "keys that no window holds changed to NaN")


def weights_doubled(score: Kernel, inputs: Inputs) -> None:
    """Twice the weights give twice the scores, exactly: no rounding depends on a power of two."""
    twice = score(inputs | {"weights": inputs["weights"] * 2})
    assert_equal(twice, 2 * score(inputs), "weights doubled, and scores doubled")


# Paged scores. Inputs: q, cache, weights, context_lens, block_table, max_context_len, page_size.


def pages_renumbered(score: Kernel, inputs: Inputs, seed: int, agree: Agree) -> None:
    """Pages that lie elsewhere, in the order of a contiguous cache and in another, score alike."""
    cache, table = inputs["cache"], inputs["block_table"]
    plain = score(inputs)
    g = torch.Generator().manual_seed(seed)
    pages = cache.shape[0]
    order = torch.randperm(pages, generator=g)
    moved = cache.clone()
    moved[order] = cache
    where = torch.where((table >= 0) & (table < pages), order[table.long() % pages], table).int()
    agree(score(inputs | {"cache": moved, "block_table": where}), plain, "pages renumbered")
    straight = torch.arange(table.numel()).view(table.shape)
    known = (table >= 0) & (table < pages)
    laid = cache[torch.where(known, table, 0).long().flatten()]
    line = torch.where(known, straight, -1).int()
    if laid.shape[0]:
        inputs = inputs | {"cache": laid, "block_table": line}
        agree(score(inputs), plain, "every request's pages contiguous")


# Compaction. The kernel returns the buffers it was given, after the call.


def compacted_together(
    compact: Callable[[list[torch.Tensor], torch.Tensor], list[torch.Tensor]],
    buffers: list[torch.Tensor],
    rows: torch.Tensor,
) -> None:
    """Buffers in one call end as each alone does."""
    together = compact([b.clone() for b in buffers], rows)
    for i, buffer in enumerate(buffers):
        (alone,) = compact([buffer.clone()], rows)
        assert_equal(together[i], alone, f"buffer {i} in one call with others, and alone")


def listed_twice(
    compact: Callable[[list[torch.Tensor], torch.Tensor], list[torch.Tensor]],
    buffer: torch.Tensor,
    rows: torch.Tensor,
) -> None:
    """A buffer that is listed twice, as two layers share one, is compacted once."""
    (once,) = compact([buffer.clone()], rows)
    shared = buffer.clone()
    assert_equal(compact([shared, shared], rows)[0], once, "a buffer listed twice, and once")


def compacted_twice(
    compact: Callable[[list[torch.Tensor], torch.Tensor], list[torch.Tensor]],
    buffer: torch.Tensor,
    rows: torch.Tensor,
) -> None:
    """Compaction by `rows`, then by their reverse, is one compaction by rows reversed."""
    back = torch.arange(len(rows)).flip(0).to(rows.dtype)
    (once,) = compact([buffer.clone()], rows)
    (twice,) = compact([once], back)
    (direct,) = compact([buffer.clone()], rows.flip(0))
    assert_equal(twice, direct, "compacted twice, and once by both")


# Slots. Inputs: indices, block_table, row_to_request, page_size.


def table_expanded(convert: Kernel, inputs: Inputs) -> None:
    """A table of one slot a token gives, with pages of 1, the same slots."""
    table, size = inputs["block_table"], inputs["page_size"]
    tokens = table[:, :, None] * size + torch.arange(size, dtype=table.dtype)
    tokens = torch.where(table[:, :, None] < 0, -1, tokens).flatten(1)
    expanded = convert(inputs | {"block_table": tokens, "page_size": 1})
    assert_equal(expanded, convert(inputs), "a table of tokens, and one of pages")


def indices_permuted(convert: Kernel, inputs: Inputs, seed: int) -> None:
    """A slot depends on its own position alone."""
    indices = inputs["indices"]
    order = torch.randperm(indices.shape[1], generator=torch.Generator().manual_seed(seed))
    moved = convert(inputs | {"indices": indices[:, order]})
    assert_equal(moved, convert(inputs)[:, order], "positions in another order")


# Attention. The kernel returns out and lse; inputs: q, kv, indices, scale, v_dim.


def absent_indices_appended(attend: Kernel, inputs: Inputs, agree: Agree) -> None:
    """−1 behind a row's indices changes nothing."""
    indices = inputs["indices"]
    padded = torch.cat([indices, indices.new_full((indices.shape[0], 5), -1)], dim=1)
    agree(attend(inputs | {"indices": padded}), attend(inputs), "−1 appended to the indices")


def attention_merged(
    attend: Callable[[Inputs], tuple[torch.Tensor, ...]],
    inputs: Inputs,
    bounds: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """Halves of the indices, merged by their lse, are the whole within the error bounds."""
    whole, total = (x.double() for x in attend(inputs))
    half = inputs["indices"].shape[1] // 2
    parts = [
        tuple(x.double() for x in attend(inputs | {"indices": indices.contiguous()}))
        for indices in (inputs["indices"][:, :half], inputs["indices"][:, half:])
    ]
    lse = torch.logaddexp(parts[0][1], parts[1][1])
    shares = [torch.where(lse.isneginf(), 0.0, (part - lse).exp()) for _, part in parts]
    merged = sum(s[..., None] * out for s, (out, _) in zip(shares, parts, strict=True))
    for what, a, b, bound in (("lse", lse, total, bounds[1]), ("out", merged, whole, bounds[0])):
        same = (a == b) | ((a - b).abs() <= bound)
        assert bool(same.all()), f"{what} of two halves merged differs from the whole's"
