"""Prepared queries and keys at their edges: sizes, tables, defaults, reads and launches."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from fault_tools import launches
from lightning_indexer.kernels import prepare_index_q as q_module
from lightning_indexer.kernels import prepare_k_kernel as k_module
from lightning_indexer.kernels.backend import INTERPRET, Target, tl, triton
from lightning_indexer.kernels.cache_layout import split_pages
from lightning_indexer.kernels.pairwise import hadamard_on_cpu, row_sums_on_cpu
from lightning_indexer.kernels.prepare_index_k import prepare_index_k
from lightning_indexer.kernels.prepare_index_q import num_warps, prepare_index_q
from lightning_indexer.kernels.prepare_k_kernel import key_blocks
from lightning_indexer.kernels.prepare_ragged_index_k import prepare_ragged_index_k
from lightning_indexer.kernels.rope_rows import check_hadamard, partner_dims, rotation
from lightning_indexer.testing import prepare_reference
from prepared import STYLES, same

NAN = float("nan")


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def query(rows: int, heads: int, head_dim: int, half: int = 0, known: int = 5) -> dict[str, Any]:
    """Floats as they are but for a rotation."""
    return {
        "q": randn(rows, heads, head_dim),
        "weights": randn(rows, heads),
        "positions": torch.arange(rows) % known,
        "cos": randn(known, half),
        "sin": randn(known, half),
        "rope_style": "half_split",
        "scale_format": None,
    }


def keys(count: int, head_dim: int, half: int = 0, known: int = 5) -> dict[str, Any]:
    return {
        "k": randn(count, head_dim),
        "norm_weight": randn(head_dim),
        "norm_bias": randn(head_dim + 1)[1:],
        "positions": torch.arange(count) % known,
        "cos": randn(known, half),
        "sin": randn(known, half),
        "rope_style": "half_split",
        "eps": 1e-6,
    }


def cached(inputs: dict[str, Any], pages: int, page_size: int, **changes: Any) -> dict[str, Any]:
    """Keys of slots 0, 1, … and a float cache of −7."""
    count, head_dim = inputs["k"].shape
    cache = torch.full((pages, page_size, head_dim), -7.0)
    more = {"cache": cache, "slots": torch.arange(count), "page_size": page_size}
    return inputs | more | changes


def by_hand(inputs: dict[str, Any], **changes: Any) -> torch.Tensor:
    """Keys in fp32, from the oracle."""
    names = ("k", "norm_weight", "norm_bias", "positions", "cos", "sin")
    options = {"rope_first": True, "hadamard": False, "eps": inputs["eps"]}
    options |= {"rope_style": inputs["rope_style"], "dtype": torch.float32}
    return prepare_reference.prepare_index_k(*(inputs[n] for n in names), **options | changes)


# arguments


@pytest.mark.once
def test_the_transform_takes_powers_of_two_alone() -> None:
    for head_dim in (1, 2, 4, 8, 128, 256):
        check_hadamard(True, head_dim)
    for head_dim in (3, 5, 6, 7, 12, 127, 129, 192):
        check_hadamard(False, head_dim)
        with pytest.raises(
            ValueError, match=f"^hadamard needs a power of two for D, got {head_dim}$"
        ):
            check_hadamard(True, head_dim)


@pytest.mark.once
def test_a_row_is_rotated_whole_and_no_further() -> None:
    for head_dim in (8, 9):
        prepare_index_q(**query(1, 1, head_dim, half=4))
        with pytest.raises(
            ValueError, match=r"^cos must have at most D/2 = 4 columns, got \[5, 5\]$"
        ):
            prepare_index_q(**query(1, 1, head_dim, half=5))


@pytest.mark.once
def test_results_are_a_tuple_of_two() -> None:
    inputs, ragged = query(2, 1, 4), keys(2, 4) | {"scale_format": None}
    queries, weights = prepare_index_q(**inputs)
    prepared, _ = prepare_ragged_index_k(**ragged)
    bad: Any
    for bad in ([queries, weights], (queries, weights, None)):
        with pytest.raises(TypeError, match=r"^out must be a tuple \(queries, weights\)"):
            prepare_index_q(**inputs, out=bad)
    for bad in ([prepared, None], (prepared, None, None)):
        with pytest.raises(TypeError, match=r"^out must be a tuple \(keys, scales\)"):
            prepare_ragged_index_k(**ragged, out=bad)


def test_check_mode_looks_at_the_positions_of_every_written_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LIGHTNING_INDEXER_CHECK", "1")
    inputs = cached(keys(3, 8, half=2), 2, 4, slots=torch.tensor([0, -1, 1]))
    told = r"^positions must be in \[-1, 5\), got 5"
    for row in (0, 2):
        bad = torch.tensor([4, 99, 4])
        bad[row] = 5
        with pytest.raises(ValueError, match=told):
            prepare_index_k(**inputs | {"positions": bad})
    assert (inputs["cache"] == -7).all()
    last = {"positions": torch.tensor([4, 4, -1])}
    prepare_index_k(**inputs | last)
    ragged = keys(3, 8, half=2)
    prepared, _ = prepare_ragged_index_k(**ragged | last, scale_format=None)
    assert same(inputs["cache"][0, :2], prepared[[0, 2]])
    with pytest.raises(ValueError, match=told):
        prepare_ragged_index_k(**ragged | {"positions": torch.tensor([0, 5, 1])})


def test_a_key_is_by_default_rotated_first_not_transformed_and_in_a_page_of_64() -> None:
    inputs = cached(keys(3, 8, half=2), 2, 64)
    del inputs["page_size"]
    prepare_index_k(**inputs)
    assert same(inputs["cache"][0, :3], by_hand(inputs))
    assert (inputs["cache"][0, 3:] == -7).all() and (inputs["cache"][1] == -7).all()


# sizes


@pytest.mark.once
def test_sums_and_transforms_of_rows_take_any_axes_before_them() -> None:
    x = torch.arange(24.0).view(3, 1, 8)
    assert row_sums_on_cpu(x).tolist() == [[28], [92], [156]]
    assert row_sums_on_cpu(x[..., :1]).tolist() == [[0], [8], [16]]
    sums = torch.arange(8.0).view(2, 2, 2)
    assert (hadamard_on_cpu(sums) * 2**0.5).round().tolist() == [
        [[1, -1], [5, -1]],
        [[9, -1], [13, -1]],
    ]


@pytest.mark.parametrize(("heads", "head_dim"), [(1, 1), (20, 128), (1100, 1), (3, 1025)])
def test_heads_of_every_block_are_prepared(heads: int, head_dim: int) -> None:
    inputs = query(2, heads, head_dim)
    queries, weights = prepare_index_q(**inputs, scale=0.5)
    assert torch.equal(queries, inputs["q"])
    assert torch.equal(weights, inputs["weights"] * 0.5)


@pytest.mark.parametrize("head_dim", [1, 3, 1024, 1030])
def test_keys_of_every_width_are_prepared(head_dim: int) -> None:
    inputs = cached(keys(3, head_dim), 2, 2, slots=torch.tensor([3, 0, 1]))
    prepare_index_k(**inputs)
    expected = by_hand(inputs)
    assert same(inputs["cache"].flatten(0, 1)[[3, 0, 1]], expected)
    assert (inputs["cache"][1, 0] == -7).all()
    ragged = keys(3, head_dim)
    assert same(prepare_ragged_index_k(**ragged, scale_format=None)[0], expected)


@pytest.mark.parametrize("bias", [False, True])
def test_a_single_value_is_its_own_mean(bias: bool) -> None:
    inputs = keys(2, 1)
    inputs["norm_bias"] = inputs["norm_bias"] if bias else None
    prepared, _ = prepare_ragged_index_k(**inputs, scale_format=None)
    assert prepared.flatten().tolist() == [float(inputs["norm_bias"]) if bias else 0] * 2


@pytest.mark.filterwarnings("ignore:(divide by zero|invalid value):RuntimeWarning")  # idle lanes
def test_epsilon_may_be_zero() -> None:
    inputs = keys(3, 12) | {"eps": 0}
    prepared, _ = prepare_ragged_index_k(**inputs, scale_format=None)
    assert same(prepared, by_hand(inputs))


def test_lanes_past_the_key_do_not_count_in_its_scale() -> None:
    """Behind weights and bias, which are small, lies memory that would."""
    weight, bias = (torch.tensor([x] * 12 + [1e30] * 4)[:12] for x in (2.0**-9, 2.0**-10))
    inputs = keys(2, 12) | {"norm_weight": weight, "norm_bias": bias}
    prepared, scales = prepare_ragged_index_k(**inputs)
    exact = by_hand(inputs)
    assert scales is not None
    assert same(scales, exact.abs().amax(1).clamp(min=1e-4) / 448)
    assert same(prepared.float(), (exact / scales[:, None]).to(torch.float8_e4m3fn).float())


def test_one_key_goes_to_a_cache_of_one_page() -> None:
    inputs = cached(keys(1, 4), 1, 1)
    prepare_index_k(**inputs)
    assert same(inputs["cache"][0], by_hand(inputs))
    cache = torch.zeros(1, 4, 8, dtype=torch.uint8)
    prepare_index_k(**inputs | {"cache": cache, "page_size": 4})
    assert split_pages(cache, 4, 4)[0][0].any(1).tolist() == [True, False, False, False]


@pytest.mark.parametrize(("count", "pages"), [(0, 2), (3, 0)])
def test_preparing_no_keys_or_for_no_pages_launches_nothing(count: int, pages: int) -> None:
    with launches() as launched:
        prepare_index_k(**cached(keys(count, 4), pages, 2))
    assert launched == []
    with launches() as launched:
        prepare_index_k(**cached(keys(3, 4), 2, 2))
    assert launched == ["_prepare_index_k_kernel"] * INTERPRET


# what a kernel computes with


@pytest.mark.once
def test_blocks_of_keys_are_tensors_that_triton_takes() -> None:
    """Powers of two, and of no more than 2²⁰ elements."""
    for head_dim in (1, 2, 3, 4, 12, 64, 100, 128, 192, 256, 1000, 1024, 1030, 4096):
        blocks = key_blocks(head_dim)
        assert all(n >= 1 and n & (n - 1) == 0 for n in blocks.values())
        assert head_dim <= blocks["BLOCK_D"] < 2 * head_dim
        for other in ("BLOCK_D", "BLOCK_S"):
            assert blocks["BLOCK_N"] * blocks[other] <= 2**20


@pytest.mark.once
def test_warps_of_every_tile_are_a_number_that_triton_takes() -> None:
    for tile in (2**i for i in range(21)):
        warps = num_warps(tile)
        assert warps >= 1 and warps & (warps - 1) == 0


class Launches:
    """Stands in for a kernel, and notes the options it is launched with."""

    def __init__(self) -> None:
        self.options: list[dict[str, Any]] = []

    def __getitem__(self, grid: object) -> Any:
        return lambda *_, **options: self.options.append(options)


@pytest.mark.once
@pytest.mark.parametrize("target", [Target("cuda", 90), Target("hip", "gfx942")])
def test_products_and_sums_are_not_fused_and_registers_limited_for_cuda_alone(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fused they would round once; HIP refuses the limit, and CUDA one above 255."""
    pytest.importorskip("triton")
    kernel = Launches()
    monkeypatch.setattr(q_module, "_prepare_index_q_kernel", kernel)
    monkeypatch.setattr(k_module, "_prepare_index_k_kernel", kernel)
    for module in (q_module, k_module):
        monkeypatch.setattr(module, "use_triton", lambda _: True)
        monkeypatch.setattr(module, "target_of", lambda _: target)
    prepare_index_q(**query(1, 1, 8, half=2))
    prepare_ragged_index_k(**keys(1, 8, half=2))
    assert [options["enable_fp_fusion"] for options in kernel.options] == [False, False]
    limits = [options["maxnreg"] for options in kernel.options if "maxnreg" in options]
    assert len(limits) == (target.backend == "cuda")
    assert all(0 < limit <= 255 for limit in limits)


@pytest.mark.interpreter
def test_without_rotary_dimensions_nothing_is_rotated(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("rotated")

    for module in (q_module, k_module):
        monkeypatch.setattr(module, "rotation", refuse)
    prepare_index_q(**query(2, 3, 8))
    prepare_ragged_index_k(**keys(2, 8))
    for call, inputs in (
        (prepare_index_q, query(2, 3, 8, half=1)),
        (prepare_ragged_index_k, keys(2, 8, half=1)),
    ):
        with pytest.raises(Exception, match="rotated"):
            call(**inputs)


@triton.jit
def _turn_kernel(
    cos_ptr,
    sin_ptr,
    stride_p,
    cos_out_ptr,
    sin_out_ptr,
    partner_ptr,
    START: tl.constexpr,
    DIMS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    offs = tl.arange(0, 16)
    position = tl.zeros([16], tl.int64) + 1
    tables = cos_ptr, stride_p, 1, sin_ptr, stride_p, 1
    cos, sin = rotation(position, offs, *tables, 3, START, DIMS, INTERLEAVED)
    tl.store(cos_out_ptr + offs, cos)
    tl.store(sin_out_ptr + offs, sin)
    tl.store(partner_ptr + offs, partner_dims(offs, START, DIMS))


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("start", "dims"), [(0, 8), (0, 16), (8, 8), (4, 12), (0, 6), (10, 6), (3, 2)]
)
def test_rotary_dimensions_alone_have_angles_and_partners(
    start: int, dims: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton.runtime.interpreter import TensorHandle

    hints: list[int] = []
    monkeypatch.setattr(TensorHandle, "set_attr", lambda *hint: hints.extend(hint[2]))
    half = dims // 2
    tables = torch.arange(2 * 16 * 32.0).view(2, 16, 32) + 1
    cos, sin = (table[5:8, 8 : 8 + half] for table in tables)
    rotary = range(start, start + dims)
    for interleaved in (False, True):
        got_cos, got_sin = torch.zeros(2, 16)
        partners = torch.zeros(16, dtype=torch.int32)
        constants = {"START": start, "DIMS": dims, "INTERLEAVED": interleaved}
        _turn_kernel[(1,)](cos, sin, 32, got_cos, got_sin, partners, **constants)
        expected = torch.full((2, 16), NAN)
        for i in rotary:
            pair, second = divmod(i - start, 2) if interleaved else divmod(i - start, half)[::-1]
            expected[:, i] = torch.stack([cos[1, pair], sin[1, pair] * (1 if second else -1)])
        assert same(torch.stack([got_cos, got_sin]), expected)
        others = [start + (i - start + half) % dims if i in rotary else i for i in range(16)]
        assert partners.tolist() == others
    assert len(hints) == 4
    for run in hints:  # what the compiler may take for granted when it widens a load
        assert run > 0 and run & (run - 1) == 0
        for first in range(0, 16, run):
            block = others[first : first + run]
            assert block[0] % run == 0 and block == list(range(block[0], block[0] + len(block)))


@contextmanager
def elements_alone_are_read(*views: torch.Tensor) -> Iterator[None]:
    """Fails if a kernel of the interpreter loads what lies around the elements of a view."""
    if not INTERPRET:
        yield
        return
    from triton.runtime.interpreter import InterpreterBuilder

    load = InterpreterBuilder.create_masked_load
    places = []
    for view in views:
        memory, size = view.untyped_storage(), view.element_size()
        offsets = torch.arange(memory.nbytes() // size).as_strided(
            view.shape, view.stride(), view.storage_offset()
        )
        start = memory.data_ptr()
        places.append((start, start + memory.nbytes(), start + offsets.numpy().ravel() * size))

    def watched(self: object, ptrs: Any, mask: Any, *arguments: object) -> object:
        read = ptrs.data[mask.data].astype(np.int64)
        for first, last, own in places:
            near = read[(read >= first) & (read < last)]
            assert np.isin(near, own).all(), "a load beside the elements"
        return load(self, ptrs, mask, *arguments)

    with patch.object(InterpreterBuilder, "create_masked_load", watched):
        yield


def surrounded(x: torch.Tensor) -> torch.Tensor:
    """`x` amid memory that is none of it, and would be seen in a result."""
    around = torch.full([n + 32 for n in x.shape], 77, dtype=x.dtype)
    view = around[(slice(16, -16),) * x.dim()]
    return view.copy_(x)


@pytest.mark.parametrize("rope_first", [True, False])
@pytest.mark.parametrize("style", STYLES)
def test_nothing_around_the_inputs_is_read(style: str, rope_first: bool) -> None:
    options = {"rope_style": style, "rope_first": rope_first}
    plain_query, plain_keys = query(2, 3, 12, half=2), keys(3, 12, half=2)
    calls: Any = ((plain_query, prepare_index_q), (plain_keys, prepare_ragged_index_k))
    for plain, call in calls:
        plain |= options | {"scale_format": "fp32"}
        inputs = {n: surrounded(x) if isinstance(x, torch.Tensor) else x for n, x in plain.items()}
        with elements_alone_are_read(*(x for x in inputs.values() if isinstance(x, torch.Tensor))):
            got = call(**inputs)
        expected = call(**plain)
        assert torch.equal(got[0].view(torch.uint8), expected[0].view(torch.uint8))
        assert torch.equal(got[1], expected[1])
