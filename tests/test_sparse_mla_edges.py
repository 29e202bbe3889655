"""Sparse MLA attention at its limits: arguments, absent slots, memory, and the tiles of GPUs."""

import dataclasses
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch

from attention_cases import AttentionCase, assert_is_attention
from lightning_indexer.kernels import sparse_mla_launch
from lightning_indexer.kernels.backend import Target
from lightning_indexer.kernels.sparse_mla_attention import sparse_mla_attention
from lightning_indexer.kernels.sparse_mla_rows import check_rows, split_rows
from lightning_indexer.kernels.sparse_mla_tiles import SMALL, AttentionTile, attention_tile
from lightning_indexer.offline.case import TARGETS
from lightning_indexer.testing.attention_reference import mla_row

CASE = AttentionCase(
    2, 40, 70, 5, (100, 72), "fp32", False, "normal", "outside", torch.int32, "strided", seed=9
)
FP8_CASE = dataclasses.replace(CASE, fp8=True, slots=12, dtype="bf16", width=70)


def attend(
    q: torch.Tensor, kv: torch.Tensor, *indices: int, **changes: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    listed = torch.tensor([indices] * q.shape[0], dtype=torch.int32).view(q.shape[0], -1)
    arguments: dict[str, Any] = {"scale": 1.0, "v_dim": kv.shape[1]}
    return sparse_mla_attention(q, kv, listed, **arguments | changes)


@pytest.mark.once
@pytest.mark.parametrize(
    ("heads", "dim", "v_dim", "told"),
    [
        (129, 8, 8, "q must have 1 to 128 heads, got 129 in [1, 129, 8]"),
        (0, 8, 8, "q must have 1 to 128 heads, got 0 in [1, 0, 8]"),
        (1, 577, 8, "q must have 1 to 576 columns, got 577 in [1, 1, 577]"),
        (1, 0, 8, "q must have 1 to 576 columns, got 0 in [1, 1, 0]"),
        (1, 576, 513, "v_dim must be at most 512, got 513"),
        (1, 511, 512, "v_dim must be at most 511, got 512"),
        (1, 8, 0, "v_dim must be at least 1, got 0"),
    ],
)
def test_sizes_past_their_limits_are_refused(heads: int, dim: int, v_dim: int, told: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(told)}$"):
        attend(torch.zeros(1, heads, dim), torch.zeros(2, dim), 0, v_dim=v_dim)


@pytest.mark.once
@pytest.mark.parametrize(("heads", "dim", "v_dim"), [(128, 576, 512), (1, 1, 1)])
def test_the_largest_and_the_smallest_sizes_are_accepted(heads: int, dim: int, v_dim: int) -> None:
    out, lse = attend(torch.zeros(1, heads, dim), torch.ones(2, dim), 0, 1, v_dim=v_dim)
    assert out.shape == (1, heads, v_dim) and (out == 1).all()
    assert torch.allclose(lse, torch.full((1, heads), math.log(2)))


@pytest.mark.once
@pytest.mark.parametrize("scale", [math.inf, -math.inf, math.nan])
def test_a_scale_that_is_not_finite_is_refused(scale: float) -> None:
    with pytest.raises(ValueError, match=f"^scale must be finite, got {scale}$"):
        attend(torch.zeros(1, 1, 4), torch.zeros(2, 4), 0, scale=scale)


@pytest.mark.once
@pytest.mark.parametrize("scale", [True, "1", None, torch.ones(1)])
def test_a_scale_that_is_no_number_is_refused(scale: object) -> None:
    with pytest.raises(TypeError, match=f"^scale must be a number, got {type(scale).__name__}$"):
        attend(torch.zeros(1, 1, 4), torch.zeros(2, 4), 0, scale=scale)


def test_any_finite_scale_is_taken_an_int_too() -> None:
    q, kv = torch.ones(1, 1, 2), torch.tensor([[1.0, 0.0], [0.0, 3.0]])
    for scale in (0, -1, 2, 0.25, -(2.0**-100)):
        _, lse = attend(q, kv, 0, 1, scale=scale)
        expected = math.log(math.exp(scale) + math.exp(3 * scale))
        assert lse.item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.once
def test_queries_of_656_byte_rows_have_576_columns_and_512_values() -> None:
    kv = torch.zeros(2, 656, dtype=torch.uint8)
    for dim, v_dim, told in (
        (575, 512, "q must have 576 columns when kv is uint8, got 575"),
        (512, 512, "q must have 576 columns when kv is uint8, got 512"),
        (576, 511, "v_dim must be 512 when kv is uint8, got 511"),
    ):
        with pytest.raises(ValueError, match=f"^{told}$"):
            attend(torch.zeros(1, 1, dim).half(), kv, 0, v_dim=v_dim)
    with pytest.raises(TypeError, match=r"float16 when kv is uint8, got torch\.float32$"):
        attend(torch.zeros(1, 1, 576), kv, 0, v_dim=512)


def _rows(shape: tuple[int, ...], stride: tuple[int, ...], at: int = 0) -> torch.Tensor:
    return torch.arange(6000).to(torch.uint8).as_strided(shape, stride, at)


@pytest.mark.once
@pytest.mark.parametrize("shape", [(656,), (2, 655), (2, 657), (2, 656, 1), (1, 2, 656)])
def test_rows_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    told = re.escape(f"kv in uint8 must have shape [any, 656], got {list(shape)}")
    with pytest.raises(ValueError, match=f"^{told}$"):
        check_rows("kv", torch.zeros(shape, dtype=torch.uint8))


@pytest.mark.once
@pytest.mark.parametrize("stride", [(1312, 2), (658, 1), (657, 1), (1315, 2), (659, 1)])
def test_rows_that_misalign_the_scales_are_refused(stride: tuple[int, int]) -> None:
    told = re.escape(f"contiguous rows a multiple of 4 bytes apart, got strides {stride}")
    with pytest.raises(ValueError, match=f"^kv in uint8 must have {told}$"):
        check_rows("kv", _rows((3, 656), stride))


@pytest.mark.once
@pytest.mark.parametrize("at", [0, 4, 8])
@pytest.mark.parametrize("apart", [656, 660])
def test_an_aligned_row_is_its_values_scales_and_rope(apart: int, at: int) -> None:
    rows = _rows((3, 656), (apart, 1), at)
    check_rows("kv", rows)
    parts = split_rows("kv", rows)
    assert [(x.shape, x.dtype) for x in parts] == [
        ((3, 512), torch.uint8),
        ((3, 4), torch.float32),
        ((3, 64), torch.bfloat16),
    ]
    for x, first, last in zip(parts, (0, 512, 528), (512, 528, 656), strict=True):
        assert torch.equal(x.contiguous().view(torch.uint8), rows[:, first:last])


@pytest.mark.once
@pytest.mark.parametrize("at", [1, 2, 3, 6])
def test_rows_that_start_between_words_are_refused(at: int) -> None:
    with pytest.raises(ValueError, match=f"^kv in uint8 must start at a multiple .* got {at}$"):
        split_rows("kv", _rows((3, 656), (656, 1), at))


@pytest.mark.parametrize("name", ["q", "kv", "out"])
def test_the_op_itself_refuses_what_its_results_overlap(name: str) -> None:
    memory = torch.zeros(64)
    q, kv = memory[:4].view(1, 1, 4), memory[8:16].view(2, 4)
    out, lse = memory[16:20].view(1, 1, 4), {"q": q, "kv": kv, "out": memory[16:20]}[name]
    with pytest.raises(ValueError, match=f"^lse must share no memory with {name}, got "):
        attend(q, kv, 0, 1, out=out, lse=lse.flatten()[:1].view(1, 1))
    assert (memory == 0).all()


def test_content_checks_accept_minus_one_and_the_last_slot_and_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LIGHTNING_INDEXER_CHECK", "1")
    q, kv = torch.zeros(1, 1, 8), torch.eye(3, 8)
    out, _ = attend(q, kv, -1, 2, 0)
    assert out.flatten().tolist() == [0.5, 0.0, 0.5, 0.0, 0.0, 0.0, 0.0, 0.0]
    for bad in (-2, 3, 7):
        with pytest.raises(ValueError, match=rf"^indices must .*\[-1, 3\), got {bad}"):
            attend(q, kv, 0, bad)


@pytest.mark.parametrize("absent", [-1, 3])
def test_the_rows_just_outside_the_cache_are_not_in_it(absent: int) -> None:
    """They lie in memory, are finite, and would win."""
    memory = torch.tensor([[50.0, 1.0], [1.0, 2.0], [0.5, 3.0], [0.25, 4.0], [50.0, 5.0]])
    q, kv = torch.ones(1, 2, 2), memory[1:4]
    alone, with_absent = attend(q, kv, 0, 2), attend(q, kv, 0, absent, 2, absent)
    for got, want in zip(with_absent, alone, strict=True):
        assert torch.allclose(got, want, rtol=1e-6)


def test_the_only_slot_of_a_cache_may_be_listed_behind_absent_ones() -> None:
    out, lse = attend(torch.zeros(1, 1, 2), torch.tensor([[3.0, 4.0]]), -1, 5, 0, -1)
    assert out.flatten().tolist() == [3.0, 4.0] and lse.item() == 0.0


@pytest.mark.parametrize("width", [1, 3, 70])
def test_scores_that_are_all_minus_infinity_weigh_nothing(width: int) -> None:
    """They overflow: as a row without a slot, it has out 0 and lse −inf; one more score wins."""
    q, kv = torch.full((1, 2, 1), -3e38), torch.tensor([[3e38], [2.0**-100]])
    out, lse = attend(q, kv, *[0] * width)
    assert (out == 0).all() and (lse == -math.inf).all()
    out, lse = attend(q, kv, *[0] * width, 1)
    assert (out == 2.0**-100).all() and lse.isfinite().all()


def _gpu_tiles() -> list[Any]:
    """The distinct tiles of GPUs, in chunks of 64 indices, each with a few heads more than it has.

    Warps, stages and registers mean nothing to the interpreter.
    """
    found: dict[tuple[AttentionTile, bool], Any] = {}
    for target in [*TARGETS.values(), *(Target("cuda", arch) for arch in SMALL)]:
        for case, kv in ((CASE, torch.bfloat16), (FP8_CASE, torch.uint8), (CASE, torch.float32)):
            dims = (576, 512) if case.fp8 else case.dims
            q = torch.bfloat16 if case.fp8 else kv
            for heads in (3, 20, 70):
                tile = attention_tile(target, q, kv, heads, *dims)
                tile = dataclasses.replace(tile, num_warps=4, num_stages=1, max_registers=None)
                tile = dataclasses.replace(tile, chunk=64, hoist=True)
                name = f"{tile.block_h}x{tile.block_keys} {tile.slice_v} {tile.slice_r}"
                more = dataclasses.replace(case, rows=1, width=50, heads=tile.block_h + 3)
                param = pytest.param(tile, more, id=f"{name}{' fp8' * case.fp8}")
                found.setdefault((tile, case.fp8), param)
    return list(found.values())


@pytest.mark.interpreter
@pytest.mark.parametrize(("tile", "case"), _gpu_tiles())
def test_every_tile_of_a_gpu_gives_the_formula(tile: AttentionTile, case: AttentionCase) -> None:
    inputs = case.inputs()
    with patch.object(sparse_mla_launch, "attention_tile", lambda *_: tile):
        out, lse = sparse_mla_attention(**inputs)
    heads = [0, 1, tile.block_h - 1, tile.block_h, case.heads - 1]
    exact = torch.stack([mla_row(inputs["kv"], slot) for slot in range(case.slots)])
    checked = inputs | {"q": inputs["q"][:, heads], "kv": exact}
    assert_is_attention((out[:, heads], lse[:, heads]), checked)


@pytest.mark.interpreter
def test_chunks_of_several_tiles_of_heads_are_merged_as_on_a_gpu() -> None:
    """There a merging program has one head."""
    tile = attention_tile(TARGETS["sm_90"], torch.float32, torch.float32, 18, 24, 17)
    merge = sparse_mla_launch.merge_constants
    inputs = dataclasses.replace(CASE, heads=18, dims=(24, 17), width=100).inputs()
    with (
        patch.object(
            sparse_mla_launch, "attention_tile", lambda *_: dataclasses.replace(tile, chunk=64)
        ),
        patch.object(
            sparse_mla_launch, "merge_constants", lambda _, *sizes: merge(TARGETS["sm_90"], *sizes)
        ),
    ):
        assert_is_attention(sparse_mla_attention(**inputs), inputs)


@contextmanager
def accesses(kind: str) -> Iterator[list[int]]:
    """The addresses of all elements that kernels load or store, in order."""
    from triton.runtime.interpreter import InterpreterBuilder

    found: list[int] = []
    access: Callable[..., Any] = getattr(InterpreterBuilder, f"create_masked_{kind}")

    def watched(self: object, ptrs: Any, *args: Any) -> Any:
        mask = args[0] if kind == "load" else args[1]
        found.extend(ptrs.data[mask.data].tolist())
        return access(self, ptrs, *args)

    with patch.object(InterpreterBuilder, f"create_masked_{kind}", watched):
        yield found


def addresses(x: torch.Tensor) -> list[int]:
    """Of every element."""
    places = torch.zeros(x.shape, dtype=torch.int64)
    for axis, (size, stride) in enumerate(zip(x.shape, x.stride(), strict=True)):
        steps = torch.arange(size) * stride * x.element_size()
        places += steps.view(-1, *[1] * (x.dim() - axis - 1))
    return (places + x.data_ptr()).flatten().tolist()


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("fp8", "heads", "width"),
    [(False, 1, 50), (False, 5, 130), (False, 20, 50), (False, 17, 64), (True, 3, 70)],
)
def test_what_is_read_was_given_and_every_result_is_written_once(
    fp8: bool, heads: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No row of kv that no index names is read, and no partial result that was not written."""
    case = FP8_CASE if fp8 else dataclasses.replace(CASE, dims=(21, 13))
    inputs = dataclasses.replace(case, heads=heads, width=width).inputs()
    q, kv, indices = inputs["q"], inputs["kv"], inputs["indices"]
    out, lse = torch.zeros(2, heads, inputs["v_dim"], dtype=q.dtype), torch.zeros(2, heads)
    scratch: list[torch.Tensor] = []
    allocate = sparse_mla_launch._scratch

    def recorded(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        scratch.extend(allocate(*args))
        return scratch[0], scratch[1]

    monkeypatch.setattr(sparse_mla_launch, "_scratch", recorded)
    with accesses("load") as loaded, accesses("store") as stored:
        sparse_mla_attention(**inputs, out=out, lse=lse)
    partial = [place for x in scratch for place in addresses(x)]
    readable = {*addresses(q), *addresses(indices), *partial}
    for slot in set(indices.flatten().tolist()) & set(range(kv.shape[0])):
        readable |= set(addresses(kv[slot]))
    assert set(loaded) <= readable
    assert sorted(stored) == sorted([*addresses(out), *addresses(lse), *partial])
    assert bool(partial) is (width > 64)


@pytest.mark.interpreter
@pytest.mark.parametrize("width", [100, 130])
def test_rows_whose_partial_results_do_not_fit_are_launched_later(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five rows of two or three chunks, where two rows fit: all tensors lie in larger ones."""
    inputs = dataclasses.replace(CASE, rows=8, heads=2, dims=(20, 16), width=width).inputs()
    inputs |= {"q": inputs["q"][:5], "indices": inputs["indices"][:5]}
    out, lse = torch.zeros(8, 2, 16)[:5], torch.zeros(8, 2)[:5]
    limit = 2 * 4 * -(-width // 64) * 2 * (16 + 2)
    scratch: list[torch.Tensor] = []
    allocate = sparse_mla_launch._scratch

    def recorded(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        parts = allocate(*args)
        scratch.extend(parts)
        return parts

    monkeypatch.setattr(sparse_mla_launch, "_scratch", recorded)
    monkeypatch.setattr(sparse_mla_launch, "SCRATCH_BYTES", limit)
    with accesses("store") as stored:
        assert_is_attention(sparse_mla_attention(**inputs, out=out, lse=lse), inputs)
    assert sum(x.numel() * x.element_size() for x in scratch) == limit
    partial = {place for x in scratch for place in addresses(x)}
    results = [place for place in stored if place not in partial]
    assert sorted(results) == sorted([*addresses(out), *addresses(lse)])


@pytest.mark.once
@pytest.mark.parametrize("target", TARGETS.values(), ids=str)
@pytest.mark.parametrize("heads", [1, 16, 128])
def test_kernels_get_no_option_that_their_compiler_does_not_know(
    heads: int, target: Target
) -> None:
    """PTX and a limit of registers are NVIDIA's; a loop ends early wherever one can."""
    for q, kv in ((torch.bfloat16, torch.uint8), (torch.float32, torch.float32)):
        tile = attention_tile(target, q, kv, heads, 576, 512)
        constants = sparse_mla_launch.kernel_constants(target, q, kv, heads, 576, 512)
        nvidia = target.backend == "cuda"
        assert constants["USE_PTX"] is nvidia and constants["FIXED_KEYS"] is False
        assert constants.get("maxnreg") == (tile.max_registers if nvidia else None)
        assert ("maxnreg" in constants) is (nvidia and tile.max_registers is not None)
        assert constants["REST"] == 64 and constants["NATIVE_FP8"] is target.has_fp8_dot


@pytest.mark.once
@pytest.mark.parametrize("target", TARGETS.values(), ids=str)
def test_a_merging_program_holds_its_sums_in_registers(target: Target) -> None:
    for heads in (1, 16, 128):
        constants = sparse_mla_launch.merge_constants(target, heads, 512)
        threads = 32 * constants["num_warps"]
        assert constants["BLOCK_H"] * constants["BLOCK_V"] <= 128 * threads
