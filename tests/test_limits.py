"""The limits of arguments, from both sides: the last value that is accepted, the first refused."""

import re
from typing import Any

import pytest
import torch

from lightning_indexer.kernels.backend import Target, multiprocessors
from lightning_indexer.kernels.cache_layout import check_cache
from lightning_indexer.kernels.checks import check_int, check_tensor
from lightning_indexer.kernels.paged_args import check_paged_args, check_paged_contents
from lightning_indexer.kernels.read_index_k import read_index_k
from lightning_indexer.kernels.score_args import check_head_sizes, check_windows
from lightning_indexer.kernels.slots import indices_to_slots


def _int32(*values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _bytes(shape: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
    return torch.zeros(256, dtype=torch.uint8).as_strided(shape, strides)


def _paged(**changes: Any) -> dict[str, Any]:
    arguments = {
        "q": torch.zeros(2, 1, 1, 8),
        "cache": torch.zeros(3, 4, 8),
        "weights": torch.zeros(2, 1),
        "context_lens": _int32(1, 5),
        "block_table": torch.zeros(2, 2, dtype=torch.int32),
        "max_context_len": 8,
        "row_to_request": None,
        "page_size": 4,
    }
    return {**arguments, **changes}


@pytest.mark.once
@pytest.mark.parametrize("minimum", [-1, 0, 1])
def test_the_minimum_itself_is_large_enough(minimum: int) -> None:
    assert check_int("n", minimum, minimum=minimum) == minimum
    with pytest.raises(ValueError, match=rf"^n must be at least {minimum}, got {minimum - 1}$"):
        check_int("n", minimum - 1, minimum=minimum)


@pytest.mark.once
def test_a_refused_shape_is_told_with_the_sizes_that_are_free() -> None:
    with pytest.raises(ValueError, match=r"^x must have shape \[any, 3\], got \[2, 4\]$"):
        check_tensor("x", torch.zeros(2, 4), shape=(None, 3))


@pytest.mark.once
@pytest.mark.parametrize(("heads", "head_dim"), [(1, 1), (128, 256)])
def test_the_smallest_and_the_largest_heads_are_accepted(heads: int, head_dim: int) -> None:
    assert check_head_sizes(torch.zeros(1, heads, head_dim)) == (heads, head_dim)


@pytest.mark.once
@pytest.mark.parametrize(
    ("heads", "head_dim", "told"),
    [
        (0, 8, "1 to 128 heads, got 0"),
        (129, 8, "1 to 128 heads, got 129"),
        (8, 0, "a head dim of 1 to 256, got 0"),
        (8, 257, "a head dim of 1 to 256, got 257"),
    ],
)
def test_heads_past_the_limits_are_refused(heads: int, head_dim: int, told: str) -> None:
    with pytest.raises(ValueError, match=f"^q must have {told} in "):
        check_head_sizes(torch.zeros(1, heads, head_dim))


@pytest.mark.once
@pytest.mark.parametrize(("start", "end"), [(-3, -3), (9, 9), (0, 8), (7, 8)])
def test_windows_that_are_empty_or_end_with_the_keys_are_accepted(start: int, end: int) -> None:
    check_windows(_int32(start), _int32(end), 8)


@pytest.mark.once
@pytest.mark.parametrize(("start", "end", "name"), [(-1, 0, "row_starts"), (8, 9, "row_ends")])
def test_windows_of_one_key_that_does_not_exist_are_refused(
    start: int, end: int, name: str
) -> None:
    with pytest.raises(ValueError, match=rf"^{name} must stay in \[0, 8\]"):
        check_windows(_int32(start), _int32(end), 8)


@pytest.mark.once
def test_float_pages_of_another_shape_are_refused() -> None:
    check_cache(torch.zeros(3, 4, 8), 4, 8)
    for shape in ((3, 5, 8), (3, 4, 9), (3, 8, 8)):
        told = re.escape(f"= [any, 4, 8], got {list(shape)}")
        with pytest.raises(ValueError, match=told):
            check_cache(torch.zeros(shape), 4, 8)


@pytest.mark.once
def test_flat_pages_hold_all_bytes_of_a_page() -> None:
    check_cache(torch.zeros(2, 48, dtype=torch.uint8), 4, 8)
    told = re.escape("[P, 4, 1, 12], [P, 4, 12] or [P, bytes ≥ 48], got [2, 44]")
    with pytest.raises(ValueError, match=told):
        check_cache(torch.zeros(2, 44, dtype=torch.uint8), 4, 8)


@pytest.mark.once
@pytest.mark.parametrize(
    ("shape", "strides"),
    [
        ((1, 4, 1, 12), (50, 12, 99, 1)),  # of one size, which no address depends on
        ((1, 1, 12), (50, 99, 1)),
        ((1, 4, 12), (49, 12, 1)),  # a lone page, so its stride is of no use
        ((2, 4, 12), (52, 12, 1)),
    ],
)
def test_strides_that_no_address_depends_on_are_free(
    shape: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    check_cache(_bytes(shape, strides), shape[1], 8)


@pytest.mark.once
@pytest.mark.parametrize("page_size", [2, 4])
def test_pages_with_gaps_between_tokens_are_refused(page_size: int) -> None:
    with pytest.raises(ValueError, match=r"contiguous, got strides \(96, 16, 1\)"):
        check_cache(_bytes((2, page_size, 12), (96, 16, 1)), page_size, 8)


@pytest.mark.once
@pytest.mark.parametrize(
    ("shape", "strides", "data"), [((2, 4, 12), (50, 12, 1), 32), ((2, 1, 12), (14, 12, 1), 8)]
)
def test_pages_that_misalign_the_scales_are_refused(
    shape: tuple[int, ...], strides: tuple[int, ...], data: int
) -> None:
    with pytest.raises(ValueError, match=f"got page_size·D={data}, page stride {strides[0]}$"):
        check_cache(_bytes(shape, strides), shape[1], 8)


@pytest.mark.once
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"max_context_len": 0, "block_table": torch.zeros(2, 0, dtype=torch.int32)},
        {"page_size": 1, "cache": torch.zeros(3, 1, 8), "max_context_len": 2},
        {"row_to_request": _int32(0, 0), "block_table": torch.zeros(5, 2, dtype=torch.int32)},
    ],
)
def test_paged_calls_at_their_limits_are_accepted(changes: dict[str, Any]) -> None:
    assert check_paged_args(**_paged(**changes)) == (2, torch.device("cpu"))


@pytest.mark.once
@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"page_size": 0}, "page_size must be at least 1, got 0"),
        ({"max_context_len": -1}, "max_context_len must be at least 0, got -1"),
        ({"max_context_len": 9}, "cover max_context_len 9, got 2 pages of 4"),
        (
            {"block_table": torch.zeros(3, 2, dtype=torch.int32)},
            "block_table must have shape [2, any], got [3, 2]",
        ),
    ],
)
def test_paged_calls_past_their_limits_are_refused(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=re.escape(told)):
        check_paged_args(**_paged(**changes))


def _check_contents(
    lengths: torch.Tensor, table: torch.Tensor, requests: torch.Tensor | None = None
) -> None:
    check_paged_contents(lengths, table, requests, num_pages=3, page_size=4, max_context_len=8)


@pytest.mark.once
def test_entries_past_the_last_key_may_be_anything() -> None:
    _check_contents(_int32([4], [8], [0]), _int32([2, -1], [0, 2], [7, 7]))
    _check_contents(_int32([0], [1]), _int32([0, 9]), _int32(-5, 0))
    _check_contents(torch.zeros(0, 1), _int32([0, 1]), torch.zeros(0, dtype=torch.int32))


@pytest.mark.once
@pytest.mark.parametrize(
    ("length", "entries", "request_id", "told"),
    [
        (9, [0, 1], 0, "context_lens must be at most max_context_len 8, got 9"),
        (1, [0, 1], 1, "row_to_request must be in [0, 1), got 1"),
        (1, [0, 1], -1, "row_to_request must be in [0, 1), got -1"),
        (1, [3, 0], 0, "block_table must name pages in [0, 3), got 3"),
        (5, [0, -1], 0, "block_table must name pages in [0, 3), got -1"),
    ],
)
def test_the_first_key_that_cannot_be_read_is_refused(
    length: int, entries: list[int], request_id: int, told: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(told)):
        _check_contents(_int32([length]), _int32(entries), _int32(request_id))


def _read(cache: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor, **more: Any) -> Any:
    return read_index_k(cache, table, lengths, page_size=4, **more)


def test_keys_of_one_value_are_read() -> None:
    cache = torch.arange(8.0).view(2, 4, 1)
    values, scales = _read(cache, _int32([1, 0]), _int32(5))
    assert values.flatten().tolist() == [4, 5, 6, 7, 0]
    assert scales is None


@pytest.mark.once
@pytest.mark.parametrize("out", [[torch.zeros(4, 1), None], (torch.zeros(4, 1), None, None)])
def test_the_result_of_a_read_is_a_tuple_of_two(out: object) -> None:
    with pytest.raises(TypeError, match=r"^out must be a tuple \(values, scales\)"):
        _read(torch.zeros(2, 4, 1), _int32([1, 0]), _int32(4), out=out)


@pytest.mark.parametrize("length", [0, 11, 12])
def test_a_read_may_end_with_the_table(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_INDEXER_CHECK", "1")
    values, _ = _read(torch.ones(2, 4, 1), _int32([0, 1, 0]), _int32(length))
    assert torch.equal(values, torch.ones(length, 1))


@pytest.mark.once
@pytest.mark.parametrize(
    ("length", "told"), [(13, r"\[0, 13\), got 13"), (-1, r"\[0, 13\), got -1")]
)
def test_a_read_past_the_table_is_refused(
    length: int, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIGHTNING_INDEXER_CHECK", "1")
    with pytest.raises(ValueError, match=f"^context_lens must be in {told}"):
        _read(torch.ones(2, 4, 1), _int32([0, 1, 0]), _int32(length))


@pytest.mark.once
@pytest.mark.parametrize(
    ("backend", "arch", "native"),
    [("cuda", 86, False), ("cuda", 89, True), ("cuda", 90, True), ("hip", "gfx942", False)],
)
def test_fp8_products_begin_with_sm_89(backend: str, arch: int | str, native: bool) -> None:
    assert Target(backend, arch).has_fp8_dot is native


@pytest.mark.once
def test_a_cpu_runs_one_program_at_a_time() -> None:
    assert multiprocessors(torch.device("cpu")) == 1


def _slots(request: int, table: torch.Tensor) -> list[int]:
    return indices_to_slots(_int32([0, 7, -1]), table, _int32(request), 4).flatten().tolist()


def test_a_row_of_no_request_has_no_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_INDEXER_CHECK", "1")
    assert _slots(-1, _int32([3, 5])) == [-1, -1, -1]
    assert _slots(0, _int32([3, 2**29 - 1])) == [12, 2**31 - 1, -1]


@pytest.mark.once
@pytest.mark.parametrize("request_id", [-2, 1])
def test_a_row_of_a_request_that_does_not_exist_is_refused(
    request_id: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIGHTNING_INDEXER_CHECK", "1")
    told = rf"^row_to_request must be in \[-1, 1\), got {request_id}"
    with pytest.raises(ValueError, match=told):
        _slots(request_id, _int32([3, 5]))


def test_slots_past_the_largest_int32_are_none() -> None:
    assert _slots(0, _int32([2**29, 2**29 - 1])) == [-1, 2**31 - 1, -1]


def test_a_row_of_one_index_more_than_a_power_of_two_writes_no_more() -> None:
    guarded = torch.full((1, 2048), -7, dtype=torch.int32)
    indices = torch.zeros(1, 1025, dtype=torch.int32)
    indices_to_slots(indices, _int32([3]), _int32(0), 4, out=guarded[:, :1025])
    assert guarded.flatten().tolist() == [12] * 1025 + [-7] * 1023
