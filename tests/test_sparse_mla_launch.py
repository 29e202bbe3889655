"""How the kernels are launched, and how the CPU path goes about it, changes no bit."""

import dataclasses
from collections.abc import Iterator

import pytest
import torch

from attention_cases import AttentionCase, assert_is_attention
from lightning_indexer.kernels import sparse_mla_launch
from lightning_indexer.kernels.backend import Target
from lightning_indexer.kernels.sparse_mla_attention import (
    MAX_DIM,
    MAX_HEADS,
    MAX_V_DIM,
    sparse_mla_attention,
)
from lightning_indexer.kernels.sparse_mla_tiles import attention_tile
from lightning_indexer.offline.case import TARGETS

CASE = AttentionCase(
    7, 40, 150, 5, (40, 32), "fp16", False, "normal", "holes", torch.int32, "contiguous", seed=4
)
INTERPRETER = Target("interpreter", "cpu")


def bits(results: tuple[torch.Tensor, torch.Tensor]) -> list[bytes]:
    return [x.contiguous().view(torch.uint8).numpy().tobytes() for x in results]


@pytest.mark.interpreter
def test_groups_of_rows_give_the_bits_of_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = CASE.inputs()
    whole = sparse_mla_attention(**inputs)
    row = 4 * 3 * CASE.heads * (32 + 2)  # 150 indices are 3 chunks
    for rows in (1, 2, 3):
        monkeypatch.setattr(sparse_mla_launch, "SCRATCH_BYTES", rows * row)
        assert sparse_mla_launch.scratch_rows(7, 3, CASE.heads, 32) == rows
        assert bits(sparse_mla_attention(**inputs)) == bits(whole)


@pytest.mark.interpreter
def test_dirty_scratch_is_harmless(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = dataclasses.replace(CASE, indices="tail").inputs()
    clean = sparse_mla_attention(**inputs)
    empty = torch.empty

    def dirty(*args: object, **kwargs: object) -> torch.Tensor:
        return empty(*args, **kwargs).fill_(torch.nan)

    monkeypatch.setattr(torch, "empty", dirty)
    assert bits(sparse_mla_attention(**inputs)) == bits(clean)


@pytest.mark.parametrize("dims", [(40, 32), (33, 5)])
@pytest.mark.parametrize("heads", [1, 5])
def test_appended_absent_slots_change_no_bit(heads: int, dims: tuple[int, int]) -> None:
    """One chunk of 64 indices becomes three in the interpreter."""
    inputs = dataclasses.replace(CASE, rows=3, width=60, heads=heads, dims=dims).inputs()
    expected = bits(sparse_mla_attention(**inputs))
    for more in (1, 100):
        wider = torch.nn.functional.pad(inputs["indices"], (0, more), value=-1)
        assert bits(sparse_mla_attention(**inputs | {"indices": wider})) == expected


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.once
@pytest.mark.parametrize("dims", [(40, 32), (576, 512)])
def test_on_a_cpu_two_threads_leave_a_row_the_bits_it_has_alone(
    two_threads: None, dims: tuple[int, int]
) -> None:
    inputs = dataclasses.replace(CASE, rows=9, dims=dims, width=700).inputs()
    out, lse = sparse_mla_attention(**inputs)
    assert_is_attention((out, lse), inputs)
    for t in range(9):
        alone = {name: inputs[name][t : t + 1] for name in ("q", "indices")}
        assert bits(sparse_mla_attention(**inputs | alone)) == bits(
            (out[t : t + 1], lse[t : t + 1])
        )


@pytest.mark.once
@pytest.mark.parametrize("dims", [(33, 5), (24, 1), (17, 17)])
@pytest.mark.parametrize("heads", [1, 3])
def test_on_a_cpu_odd_sizes_give_every_row_the_bits_it_has_alone(
    heads: int, dims: tuple[int, int]
) -> None:
    """Products by a vector follow the addresses of their operands."""
    for width in (1, 5, 30):
        case = dataclasses.replace(CASE, rows=16, heads=heads, dims=dims, width=width)
        inputs = dataclasses.replace(case, dtype="fp32", indices="tail").inputs()
        out, lse = sparse_mla_attention(**inputs)
        for t in range(16):
            alone = {name: inputs[name][t : t + 1] for name in ("q", "indices")}
            got = sparse_mla_attention(**inputs | alone)
            assert bits(got) == bits((out[t : t + 1], lse[t : t + 1])), (width, t)


@pytest.mark.once
def test_on_a_cpu_a_reduced_precision_of_matmul_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inputs = dataclasses.replace(CASE, dtype="fp32").inputs()
    expected = bits(sparse_mla_attention(**inputs))
    mm, precisions = torch.mm, set()

    def watched(*args: object, **kwargs: object) -> torch.Tensor:
        precisions.add(torch.backends.mkldnn.matmul.fp32_precision)
        return mm(*args, **kwargs)

    monkeypatch.setattr(torch, "mm", watched)
    torch.set_float32_matmul_precision("medium")
    try:
        assert bits(sparse_mla_attention(**inputs)) == expected
        assert precisions == {"ieee"}
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert bits(sparse_mla_attention(**inputs)) == expected
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.once
def test_inputs_that_require_a_gradient_are_taken_and_get_none() -> None:
    inputs = dataclasses.replace(CASE, dtype="fp32").inputs()
    expected = bits(sparse_mla_attention(**inputs))
    inputs["q"].requires_grad_()
    out, lse = sparse_mla_attention(**inputs)
    assert not out.requires_grad and not lse.requires_grad
    assert bits((out, lse)) == expected


@pytest.mark.once
@pytest.mark.parametrize("target", [*TARGETS.values(), INTERPRETER], ids=str)
def test_every_tile_is_of_powers_of_two_and_covers_what_is_allowed(target: Target) -> None:
    for q, kv in ((torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.uint8)):
        for heads in range(1, MAX_HEADS + 1):
            _check_tile(target, q, kv, heads, MAX_DIM, MAX_V_DIM)
    for dim in (1, 15, 17, 64, 100, 300, MAX_DIM):
        for v_dim in {1, dim // 2 + 1, min(dim, MAX_V_DIM)}:
            for dtype in (torch.float16, torch.float32):
                _check_tile(target, dtype, dtype, 24, dim, v_dim)


def _check_tile(
    target: Target, q: torch.dtype, kv: torch.dtype, heads: int, dim: int, v_dim: int
) -> None:
    tile = attention_tile(target, q, kv, heads, dim, v_dim)
    for name in ("block_h", "block_keys", "slice_v", "slice_r", "chunk"):
        size = getattr(tile, name)
        assert size >= 16 and size & (size - 1) == 0, (name, tile)
    assert tile.chunk % tile.block_keys == 0
    assert tile.slice_v < 2 * max(v_dim, 16) and tile.slice_r < 2 * max(dim - v_dim, 16)
