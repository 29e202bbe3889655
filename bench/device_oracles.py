"""Every op on this device against a float64 oracle or a plain sort, which share no code with it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial

import torch

from device_inputs import (
    BF16,
    DTYPE_PAIRS,
    FP8,
    FP16,
    FP32,
    REGIMES,
    Inputs,
    moved,
    paged_inputs,
    ragged_inputs,
    score_rows,
    sorted_selection,
)
from device_step import Check, parse_arguments, run_checks
from lightning_indexer.kernels.compact import compact_topk_indices
from lightning_indexer.kernels.mqa_logits import mqa_logits
from lightning_indexer.kernels.paged_mqa_logits import paged_mqa_logits
from lightning_indexer.kernels.read_index_k import read_index_k
from lightning_indexer.kernels.select_topk import paged_select_topk, select_topk
from lightning_indexer.kernels.slots import indices_to_slots
from lightning_indexer.kernels.topk import topk_indices
from lightning_indexer.kernels.write_index_k import write_index_k
from lightning_indexer.testing import reference
from lightning_indexer.testing.compare import assert_matches

SIZES = ((64, 128), (32, 128), (5, 33), (1, 32))
#: Pairs of dtypes that are checked at every size; the others at the first.
ALL_SIZES = ("fp8", "bf16", "fp32")


def assert_scores(actual: torch.Tensor, expected: torch.Tensor, magnitude: torch.Tensor, q: Inputs):
    """Within what sums of D products and H heads may lose, in any order.

    fp8 tensor cores align products before adding them, and keep some 13 bits of each.
    """
    heads, head_dim = q["q"].shape[-2:]
    native_fp8 = actual.is_cuda and q["q"].dtype == FP8
    unit = 2.0**-12 if native_fp8 else 2.0**-23 * (heads + head_dim + 3)
    bound = (unit * magnitude + 2.0**-120).nan_to_num(neginf=0.0)
    assert_matches(actual.cpu(), expected, bound)


def positive(inputs: Inputs) -> Inputs:
    """The same call on magnitudes: its scores bound the sums' rounding errors."""

    def size(x: torch.Tensor) -> torch.Tensor:
        return (x.view(torch.uint8) & 0x7F).view(FP8) if x.dtype == FP8 else x.abs()

    return inputs | {name: size(inputs[name]) for name in ("q", "k", "weights") if name in inputs}


def check_ragged(inputs: Inputs, device: torch.device) -> None:
    got = mqa_logits(**moved(inputs, device))
    expected = reference.mqa_logits(**inputs)
    assert_scores(got, expected, reference.mqa_logits(**positive(inputs)), inputs)


def check_paged(inputs: Inputs, device: torch.device) -> None:
    """Against the oracle; and the bits are those of `mqa_logits` on the gathered keys."""
    on_device = moved(inputs, device)
    got = paged_mqa_logits(**on_device)
    expected = reference.paged_mqa_logits(**inputs)
    sizes = positive(inputs)
    cache = inputs["cache"]
    if cache.dtype == torch.uint8:
        page_bytes = inputs["page_size"] * inputs["q"].shape[-1]
        flat = cache.flatten(1).clone()
        flat[:, :page_bytes] &= 0x7F
        sizes["cache"] = flat
    else:
        sizes["cache"] = cache.abs()
    assert_scores(got, expected, reference.paged_mqa_logits(**sizes), inputs)
    _check_gathered(on_device, got)


def _check_gathered(inputs: Inputs, got: torch.Tensor) -> None:
    next_n = inputs["q"].shape[1]
    lengths, requests = reference.row_lengths(
        inputs["context_lens"], next_n, inputs.get("row_to_request")
    )
    queries = inputs["q"].flatten(0, 1)
    t = max(range(len(lengths)), key=lambda row: lengths[row])
    line = inputs["block_table"][requests[t] : requests[t] + 1]
    lens = torch.tensor([inputs["max_context_len"]], device=got.device)
    k, k_scale = read_index_k(
        inputs["cache"], line, lens, page_size=inputs["page_size"], head_dim=queries.shape[2]
    )
    bounds = (torch.tensor([n], dtype=torch.int32, device=got.device) for n in (0, lengths[t]))
    one = slice(t, t + 1)
    alone = mqa_logits(queries[one], k, inputs["weights"][one], *bounds, k_scale=k_scale)
    assert torch.equal(alone.view(torch.int32), got[one].view(torch.int32)), "bits differ"


def check_topk(
    shape: tuple[int, int], k: int, regime: str, dtype: torch.dtype, device: torch.device
) -> None:
    rows, length = shape
    logits = score_rows(rows, length, regime).to(device=device, dtype=dtype)
    assert torch.equal(topk_indices(logits, k), sorted_selection(logits, k))
    starts = torch.arange(rows, dtype=torch.int32, device=device) * 3 - 2
    ends = length - torch.arange(rows, dtype=torch.int32, device=device) * (length // rows)
    got = topk_indices(logits, k, starts, ends)
    assert torch.equal(got, sorted_selection(logits, k, starts, ends)), "with windows"


def check_select(inputs: Inputs, topk: int, device: torch.device) -> None:
    x = moved(inputs, device)
    bounds = x["row_starts"], x["row_ends"]
    expected = sorted_selection(mqa_logits(**x), topk, *bounds)
    row_bytes = 4 * x["k"].shape[0]
    for budget in (None, row_bytes, 3 * row_bytes):
        assert torch.equal(select_topk(**x, topk=topk, workspace_bytes=budget), expected)


def check_paged_select(inputs: Inputs, topk: int, device: torch.device) -> None:
    x = moved(inputs, device)
    expected = sorted_selection(paged_mqa_logits(**x), topk)
    row_bytes = 4 * x["max_context_len"]
    for budget in (None, row_bytes, 3 * row_bytes):
        assert torch.equal(paged_select_topk(**x, topk=topk, workspace_bytes=budget), expected)


def check_compact(n: int, height: int, width: int, device: torch.device) -> None:
    g = torch.Generator().manual_seed(n)
    buffers = [
        torch.randint(0, 999, (height, w), dtype=torch.int32, generator=g) for w in (width, 7)
    ]
    rows = torch.randint(-2, height + 2, (n,), generator=g)
    expected = [reference.compact_topk_indices(b, rows, num_rows=height - 1) for b in buffers]
    on_device = [b.to(device) for b in buffers]
    compact_topk_indices(on_device, rows.to(device), num_rows=height - 1)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(on_device, expected, strict=True))


def check_slots(page_size: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
    g = torch.Generator().manual_seed(page_size)
    table = torch.randint(-1, 1000, (3, 40), dtype=torch.int32, generator=g)
    indices = torch.randint(-3, 42 * page_size, (4, width), dtype=torch.int32, generator=g)
    requests = torch.tensor([2, 0, 3, -1], dtype=torch.int32)
    expected = reference.indices_to_slots(indices, table, requests, page_size)
    out = torch.empty((4, width), dtype=dtype, device=device)
    moved_in = (x.to(device) for x in (indices, table, requests))
    indices_to_slots(*moved_in, page_size, out=out)
    assert torch.equal(out.cpu(), expected.to(dtype))


def check_cache(
    dtype: torch.dtype, k_dtype: torch.dtype, scale_format: str, device: torch.device
) -> None:
    """Written bytes, and what is read back."""
    inputs = paged_inputs(BF16, dtype, "drafts", 2, 1, 100, page_size=16, head_dim=64)
    cache = inputs["cache"]
    g = torch.Generator().manual_seed(3)
    k = (torch.randn(40, 64, generator=g) * 2.0 ** torch.arange(-20, 20)[:, None]).to(k_dtype)
    slots = torch.randint(-2, 14 * 16 + 2, (40,), generator=g)
    options = {"page_size": 16, "scale_format": scale_format}
    expected = reference.write_index_k(cache, k, slots, **options)
    written = torch.stack([cache.to(device)] * 2, dim=1)[:, 1]
    write_index_k(written, k.to(device), slots.to(device), **options)
    assert torch.equal(written.cpu(), expected), "bytes written"
    lens = torch.tensor([100, 37])
    sizes = {"page_size": 16, "head_dim": 64, "total": 140}
    values, scales = reference.read_index_k(expected, inputs["block_table"], lens, **sizes)
    table = inputs["block_table"].to(device)
    got, got_scales = read_index_k(written, table, lens.to(device), **sizes)
    assert torch.equal(reference.to_float64(got.cpu()).nan_to_num(), values.nan_to_num())
    if got_scales is not None:
        assert torch.equal(got_scales.cpu().nan_to_num(), scales.nan_to_num())


def scoring_checks(device: torch.device, small: bool) -> Iterator[Check]:
    rows, length = (5, 40) if small else (19, 300)
    for dtypes in list(DTYPE_PAIRS)[: 4 if small else None]:
        for heads, head_dim in SIZES[2:3] if small else SIZES[: 4 if dtypes in ALL_SIZES else 1]:
            inputs = ragged_inputs(dtypes, rows, length, heads, head_dim)
            label = f"mqa_logits {dtypes} H={heads} D={head_dim}"
            yield label, partial(check_ragged, inputs, device)
    for form in ("drafts", "own lengths", "ragged"):
        for q_dtype, cache_dtype in ((FP8, FP8), (BF16, FP8), (BF16, BF16), (FP32, FP16)):
            if small and form != "ragged" and cache_dtype != FP8:
                continue
            sizes = (2, 2, 70, 4, 32, 16) if small else (3, 3, 200)
            inputs = paged_inputs(q_dtype, cache_dtype, form, *sizes)
            label = f"paged_mqa_logits {form} {q_dtype} {cache_dtype}".replace("torch.", "")
            yield label, partial(check_paged, inputs, device)


def selection_checks(device: torch.device, small: bool) -> Iterator[Check]:
    # short rows, one program a row, several programs a row, and the longest sample
    shapes = ((2, 300),) if small else ((7, 1000), (300, 9000), (3, 70_000), (2, 300_000))
    for shape in shapes:
        for regime in ("relu", "special") if small else REGIMES:
            for k in (20,) if small else (16, 2048):
                label = f"topk_indices {list(shape)} k={k} {regime}"
                yield label, partial(check_topk, shape, k, regime, FP32, device)
        for dtype in (FP16, BF16):
            label = f"topk_indices {list(shape)} {dtype}"
            yield label, partial(check_topk, shape, 200, "normal", dtype, device)
    rows, length = (5, 40) if small else (19, 900)
    for dtypes in ("fp32",) if small else ("fp8", "bf16", "fp16", "fp32"):
        for ties in (False, True):
            inputs = ragged_inputs(dtypes, rows, length, 4 if small else 64, 32, ties=ties)
            label = f"select_topk {dtypes}{' with ties' if ties else ''}"
            yield label, partial(check_select, inputs, length // 5, device)
    for form in ("drafts", "ragged"):
        inputs = paged_inputs(BF16, FP8, form, 2, 2, 50 if small else 900, 4, 32, 16)
        yield f"paged_select_topk {form}", partial(check_paged_select, inputs, 11, device)


def layout_checks(device: torch.device, small: bool) -> Iterator[Check]:
    for n, height, width in (
        ((3, 9, 40),) if small else ((1, 4, 2048), (64, 512, 2048), (900, 999, 70))
    ):
        yield f"compact_topk_indices n={n}", partial(check_compact, n, height, width, device)
    for page_size in (1, 48, 64):
        for dtype in (torch.int32, torch.int64):
            width = 30 if small else 1500
            yield (
                f"indices_to_slots S={page_size} {dtype}",
                partial(check_slots, page_size, width, dtype, device),
            )
    for scale_format in ("fp32", "ue8m0"):
        for k_dtype in (BF16, FP32):
            label = f"write_index_k, read_index_k fp8 {scale_format} {k_dtype}"
            yield label, partial(check_cache, FP8, k_dtype, scale_format, device)
    for dtype in (BF16, FP16, FP32):
        label = f"write_index_k, read_index_k {dtype}"
        yield label, partial(check_cache, dtype, dtype, "fp32", device)


def main() -> int:
    arguments = parse_arguments(__doc__)
    where = arguments.device, arguments.small
    checks = (*layout_checks(*where), *selection_checks(*where), *scoring_checks(*where))
    return run_checks(checks, arguments.out, "oracles")


if __name__ == "__main__":
    sys.exit(main())
