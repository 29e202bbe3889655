"""Before a launch: which tensors share memory, where an op runs, and which tile it is given."""

import importlib.util
import math
import os
import random
import re
import sys
from itertools import product
from pathlib import Path
from types import ModuleType
from unittest.mock import Mock

import pytest
import torch

from lightning_indexer.kernels import backend, registry
from lightning_indexer.kernels.aliasing import (
    check_apart,
    check_no_self_overlap,
    distinct_buffers,
    spans_meet,
)
from lightning_indexer.kernels.backend import Target
from lightning_indexer.kernels.configs import score_config
from lightning_indexer.kernels.sparse_mla_attention import MAX_DIM, MAX_HEADS, MAX_V_DIM
from lightning_indexer.kernels.sparse_mla_launch import merge_constants, scratch_rows
from lightning_indexer.kernels.sparse_mla_tiles import attention_tile
from lightning_indexer.offline.case import TARGETS

pytestmark = pytest.mark.once

BF16, FP32, BYTES = torch.bfloat16, torch.float32, torch.uint8
KERNEL_DOCS = Path(__file__).resolve().parents[1] / "docs" / "kernels.md"
INTERPRETER = Target("interpreter", "cpu")
GPUS = [*TARGETS.values(), *(Target("cuda", arch) for arch in (86, 89, 121))]
WARPS = (1, 2, 4, 8, 16, 32)  # what Triton compiles for


def matrix(shape: tuple[int, ...], stride: tuple[int, ...], at: int = 0) -> torch.Tensor:
    """A view of one memory of 400 elements of four bytes."""
    return MEMORY.as_strided(shape, stride, at)


MEMORY = torch.zeros(400, dtype=torch.int32)


def elements(x: torch.Tensor) -> list[int]:
    """The address of every element, in elements from the beginning of the memory."""
    places = torch.as_strided(torch.arange(400), x.shape, x.stride(), int(x.storage_offset()))
    return places.flatten().tolist()


def is_refused(check: object, *args: object) -> bool:
    assert callable(check)
    try:
        check(*args)
    except ValueError as error:
        assert "overlap" in str(error) or "must share no memory with " in str(error)
        return True
    return False


@pytest.mark.parametrize(
    ("shape", "stride"),
    [
        ((3, 2), (2, 1)),
        ((2, 3), (1, 2)),
        ((2, 2, 2), (1, 2, 4)),
        ((1, 3), (0, 1)),
        ((1, 1), (0, 0)),
    ],
)
def test_elements_that_just_fit_between_others_do_not_overlap(
    shape: tuple[int, ...], stride: tuple[int, ...]
) -> None:
    check_no_self_overlap("x", matrix(shape, stride))


@pytest.mark.parametrize(
    ("shape", "stride"),
    [((2, 1), (0, 1)), ((2, 2), (1, 1)), ((3, 3), (2, 1)), ((2, 2, 2), (1, 2, 3))],
)
def test_one_address_of_two_elements_is_an_overlap(
    shape: tuple[int, ...], stride: tuple[int, ...]
) -> None:
    assert len(set(elements(matrix(shape, stride)))) < math.prod(shape)
    told = re.escape(f"x must not hold overlapping elements, got strides {stride}")
    with pytest.raises(ValueError, match=f"^{told}$"):
        check_no_self_overlap("x", matrix(shape, stride))


@pytest.mark.parametrize(
    ("shape", "stride", "last"),
    [((5,), (1,), 4), ((3, 2), (7, 2), 16), ((2, 1, 4), (9, 50, 1), 12), ((1, 1), (3, 3), 0)],
)
def test_spans_meet_from_the_first_element_to_the_last(
    shape: tuple[int, ...], stride: tuple[int, ...], last: int
) -> None:
    x = matrix(shape, stride, at=60)
    for at, meets in ((59, False), (60, True), (60 + last, True), (61 + last, False)):
        one = matrix((1,), (1,), at)
        assert spans_meet(x, one) is meets and spans_meet(one, x) is meets, at


def random_matrix(draw: random.Random) -> torch.Tensor:
    shape = draw.randint(1, 3), draw.randint(1, 3)
    return matrix(shape, (draw.randint(0, 9), draw.randint(0, 3)), draw.randint(0, 9))


def test_buffers_are_apart_or_the_same_or_refused() -> None:
    draw, outcomes = random.Random(0), []
    for _ in range(3000):
        a, b = random_matrix(draw), random_matrix(draw)
        if any(is_refused(check_no_self_overlap, "x", x) for x in (a, b)):
            continue
        same = a.shape == b.shape and elements(a) == elements(b)
        shared = not set(elements(a)).isdisjoint(elements(b))
        refused = is_refused(distinct_buffers, [a, b])
        assert refused is (shared and not same), (a.shape, a.stride(), b.shape, b.stride())
        if not refused:
            kept = distinct_buffers([a, b])
            assert kept[0] is a and (kept[1:] == [] if same else kept[1] is b)
        outcomes.append((same, shared))
    assert min(map(outcomes.count, ((True, True), (False, True), (False, False)))) >= 5


def test_every_buffer_is_compared_with_all_before_it() -> None:
    a, b, c = (matrix((2, 2), (4, 1), at) for at in (0, 2, 20))
    assert [x.storage_offset() for x in distinct_buffers([a[:0], c, a, b, c, a])] == [20, 0, 2]
    for first in ([a[:0]], [matrix((1, 1), (1, 1), 30)], [c, a]):
        assert is_refused(distinct_buffers, [*first, a, matrix((2, 2), (4, 1), 1)])
    assert is_refused(distinct_buffers, [a, a[1:, :1]])  # of one element
    assert is_refused(distinct_buffers, [a[1:, :1], a])


def test_columns_of_one_matrix_are_told_apart_without_listing_their_elements(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A pool of buffers may have billions of elements."""
    lines = torch.zeros(6, 8, dtype=torch.int32)
    parts = [lines[:, :3], lines[1:4, 3:5], lines[::2, 5:]]
    monkeypatch.setattr(torch, "isin", None)
    for buffers in (parts, parts[::-1]):
        assert [x.data_ptr() for x in distinct_buffers(buffers)] == [x.data_ptr() for x in buffers]


def test_what_is_written_never_shares_an_element_with_what_is_read() -> None:
    draw, refused = random.Random(1), 0
    for _ in range(3000):
        a, b = random_matrix(draw), random_matrix(draw)
        if is_refused(check_no_self_overlap, "x", a):
            continue
        if not set(elements(a)).isdisjoint(elements(b)):
            assert is_refused(check_apart, "out", a, [("x", b)]), (a.stride(), b.stride())
            refused += 1
    assert refused > 100


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("line", [8, 11])
def test_columns_of_their_own_are_apart_and_a_common_one_is_not(
    dtype: torch.dtype, line: int
) -> None:
    """However many rows each has, of two or three axes, and one being of every other row."""
    lines = torch.zeros(1, 6, line, dtype=dtype)
    for rows, others in product((slice(0, 4), slice(2, 4), slice(0, 5, 2)), repeat=2):
        out = lines[:, rows, :3]
        for x in (lines[:, others, 3:], lines[:, others, 3:4], lines[0, others, 4:]):
            check_apart("out", out, [("x", x)])
            check_apart("out", x, [("x", out)])
        for x in (lines[:, others, 2:], lines[:, others, 2:3]):  # in line 2 at least
            assert is_refused(check_apart, "out", out, [("x", x)])
            assert is_refused(check_apart, "out", x, [("x", out)])
    for part in (lines[0, 2:3, 5:6], lines[:, 2:3, 3:8], lines[0, 2, 3:5]):  # of one line
        check_apart("out", lines[:, :, :3], [("x", part)])
        check_apart("out", part, [("x", lines[:, :, :3])])


def test_all_that_is_given_is_compared() -> None:
    out, far = matrix((4,), (1,), 10), matrix((4,), (1,), 14)
    near, one, none = matrix((4,), (1,), 13), matrix((1,), (1,), 12), matrix((0,), (1,), 12)
    other = torch.zeros(4)
    check_apart("out", out, [("a", far), ("b", None), ("c", 3), ("d", [none, far, other])])
    for before in (other, none, far, None, 0.5):
        for x in (near, one):
            for others in ([("a", before), ("x", x)], [("x", [before, x])], [("x", (before, x))]):
                with pytest.raises(ValueError, match=r"^out must share no memory with x, got "):
                    check_apart("out", out, others)
    assert is_refused(check_apart, "out", matrix((2, 2), (1, 1)), [])


def test_an_op_compares_what_it_is_given_of_arguments_with_defaults(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registry, "NAMESPACE", "launch_edges")
    monkeypatch.setattr(registry, "_LIBRARY", torch.library.Library("launch_edges", "FRAGMENT"))

    def double(x: torch.Tensor, _: torch.Tensor | None = None, *, out: torch.Tensor) -> None:
        torch.mul(x, 2, out=out)

    schema = "double(Tensor x, Tensor? y=None, *, Tensor(a!) out) -> ()"
    op = registry.register_op(schema, double, mutates="out")
    x, out = torch.arange(3.0), torch.zeros(3)
    op(x, out=out)
    assert out.tolist() == [0, 2, 4]
    with pytest.raises(ValueError, match=r"^out must share no memory with y, got "):
        op(x, out[1:], out=out)


def test_the_interpreter_is_used_where_the_environment_asks_for_it() -> None:
    assert backend.HAS_TRITON is (importlib.util.find_spec("triton") is not None)
    asked = os.environ.get("TRITON_INTERPRET", "0") == "1"
    assert backend.INTERPRET is (backend.HAS_TRITON and asked)


@pytest.mark.parametrize("interpret", [False, True])
def test_kernels_run_on_every_gpu_and_on_a_cpu_if_interpreted(
    interpret: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "INTERPRET", interpret)
    assert backend.use_triton(Mock(is_cuda=True, device=torch.device("cuda", 0)))
    assert backend.use_triton(torch.zeros(1)) is interpret
    assert not backend.use_triton(torch.zeros(1, device="meta"))


def test_an_amd_gpu_is_named_without_its_features(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = Mock(gcnArchName="gfx942:sramecc+:xnack-")
    monkeypatch.setattr(torch.version, "hip", "6.2")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    assert backend._device_target.__wrapped__(0) == Target("hip", "gfx942")


@pytest.fixture
def without_triton(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module as it is imported on a platform that has no Triton."""
    for name in ("triton", "triton.language"):
        monkeypatch.setitem(sys.modules, name, None)
    spec = backend.__spec__
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_without_triton_there_is_no_interpreter(without_triton: ModuleType) -> None:
    assert without_triton.HAS_TRITON is False and without_triton.INTERPRET is False
    assert not without_triton.use_triton(torch.zeros(1))


def test_without_triton_kernels_are_left_as_they_are(without_triton: ModuleType) -> None:
    jit = without_triton.triton.jit
    assert jit(matrix) is matrix
    assert jit()(matrix) is matrix and jit(do_not_specialize=["n"])(matrix) is matrix
    assert without_triton.tl.constexpr(3) == 3


def test_without_triton_sizes_are_those_with_it(without_triton: ModuleType) -> None:
    for n in range(1, 140):
        least = next(1 << i for i in range(9) if 1 << i >= n)
        assert without_triton.triton.next_power_of_2(n) == least
        for b in (1, 2, 7, 64):
            assert without_triton.triton.cdiv(n, b) == len(range(0, n, b))


def padded(n: int, least: int) -> int:
    """The least power of two of at least `n` and `least`."""
    return next(1 << i for i in range(20) if 1 << i >= max(n, least))


@pytest.mark.parametrize("target", [*GPUS, INTERPRETER], ids=str)
@pytest.mark.parametrize(("q", "k"), [(BYTES, BYTES), (BF16, BF16), (BF16, BYTES), (FP32, FP32)])
def test_scoring_tiles_are_powers_of_two_and_pad_no_more_than_they_must(
    q: torch.dtype, k: torch.dtype, target: Target
) -> None:
    for heads, dim in product((1, 2, 15, 16, 17, 31, 32, 33, 64, 65, 128), (1, 32, 33, 128, 256)):
        tile = score_config(target, q, k, heads, dim)
        sizes = (tile.block_keys, tile.block_rows, tile.dot_heads, tile.sums, tile.chunk_d)
        assert all(size > 0 and size & (size - 1) == 0 for size in sizes)
        assert tile.block_h == padded(heads, 16)
        assert tile.block_h % tile.dot_heads == 0 and tile.block_h % (2 * tile.sums) == 0
        assert tile.chunk_d <= padded(dim, 32)
        assert q == FP32 or tile.chunk_d == padded(dim, 32)  # of fp32 a slice at a time
        assert tile.num_warps in WARPS and tile.num_stages >= 1
        assert tile.max_registers is None or 1 <= tile.max_registers <= 255
        if target.arch in (90, 100) and q != FP32:  # wgmma and tcgen05 have 16 rows a warp
            assert tile.block_keys >= 16 * tile.num_warps


@pytest.mark.parametrize("target", GPUS, ids=str)
def test_attention_tiles_are_what_a_gpu_can_launch_and_pad_no_more_than_they_must(
    target: Target,
) -> None:
    for (q, kv), heads in product(((BF16, BF16), (BF16, BYTES), (FP32, FP32)), range(1, 129)):
        tile = attention_tile(target, q, kv, heads, MAX_DIM, MAX_V_DIM)
        assert tile.num_warps in WARPS and tile.num_stages >= 1
        assert tile.max_registers is None or 1 <= tile.max_registers <= 255  # of a thread
        assert tile.block_h <= padded(heads, 16)
        assert target.backend != "hip" or tile.num_stages == 1  # two do not fit into 64 KiB
        widths = padded(MAX_V_DIM, 16), padded(MAX_DIM - MAX_V_DIM, 16)
        assert tile.slice_v <= widths[0] and tile.slice_r <= widths[1]


def documented(section: str, row: str) -> list[tuple[str, ...]]:
    """The cells that `row` finds in the tables of a section of the docs."""
    text = KERNEL_DOCS.read_text().partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    return [found.groups() for found in re.finditer(row, text, re.MULTILINE)]


@pytest.mark.parametrize(
    ("target", "operands", "heads", "keys", "rows", "warps"),
    documented("Scoring", r"^\| (\w+\d) \| ([^|]+) \| (\d+) \| (\d+) × (\d+), (\d+) \|"),
)
def test_scoring_tiles_in_the_docs_are_the_ones_launched(
    target: str, operands: str, heads: str, keys: str, rows: str, warps: str
) -> None:
    dtype = BF16 if operands.startswith("bf16") else BYTES
    tile = score_config(TARGETS[target], dtype, dtype, int(heads), 128)
    sizes = (tile.block_keys, tile.block_rows, tile.num_warps)
    assert sizes == (int(keys), int(rows), int(warps))


def documented_tiles() -> list[tuple[str, int, list[int], list[int]]]:
    """Rows of the table in the docs: heads × keys, slice and warps of bf16 and of 656-byte rows.

    What `(fp8: …)` lists replaces as many numbers before it; `as sm_90` is that target's row.
    """
    found: dict[tuple[str, int], tuple[list[int], list[int]]] = {}
    cells = documented("Sparse MLA attention", r"^\| (\w+\d) \| (\d+) \| ([^|]+) \|")
    for name, heads, cell in cells:
        if cell.startswith("as "):
            found[name, int(heads)] = found[cell.split()[1], int(heads)]
            continue
        before, _, rest = cell.partition("(fp8: ")
        changed, _, after = rest.partition(")")
        kept, new, end = (
            [int(n) for n in re.findall(r"\b\d+\b", x)] for x in (before, changed, after)
        )
        fp8 = kept[: len(kept) - len(new)] + new + end
        found[name, int(heads)] = (kept + end)[:4], fp8[:4]
    return [(*key, *tiles) for key, tiles in found.items()]


@pytest.mark.parametrize(("target", "heads", "floats", "fp8"), documented_tiles())
def test_the_tiles_in_the_docs_are_the_ones_launched(
    target: str, heads: int, floats: list[int], fp8: list[int]
) -> None:
    for kv, expected in ((BF16, floats), (BYTES, fp8)):
        tile = attention_tile(TARGETS[target], BF16, kv, heads, MAX_DIM, MAX_V_DIM)
        assert [tile.block_h, tile.block_keys, tile.slice_v, tile.num_warps] == expected


def test_the_docs_have_tiles_of_every_target() -> None:
    attention = {(target, heads) for target, heads, _, _ in documented_tiles()}
    assert attention == set(product(TARGETS, (16, 128)))
    assert {target for target, *_ in documented("Scoring", r"^\| (\w+\d) \|")} == set(TARGETS)


@pytest.mark.parametrize("arch", [86, 89, 121])
def test_gpus_of_99_kib_have_tiles_of_the_target_of_99_kib(arch: int) -> None:
    """But for bytes that sm_86 decodes as sm_80 does, in a tile that fits."""
    for (q, kv), heads in product(((BF16, BF16), (BF16, BYTES), (FP32, FP32)), (1, 16, 33, 128)):
        same = "sm_80" if arch == 86 and kv == BYTES else "sm_120"
        tile = attention_tile(Target("cuda", arch), q, kv, heads, MAX_DIM, MAX_V_DIM)
        assert tile == attention_tile(TARGETS[same], q, kv, heads, MAX_DIM, MAX_V_DIM)


@pytest.mark.parametrize("kv", [BF16, BYTES])
@pytest.mark.parametrize("target", GPUS, ids=str)
def test_chunks_are_of_256_indices_and_of_512_above_64_heads(
    target: Target, kv: torch.dtype
) -> None:
    chunks = {h: attention_tile(target, BF16, kv, h, 576, 512).chunk for h in (1, 64, 65, 128)}
    assert chunks == {1: 256, 64: 256, 65: 512, 128: 512}


@pytest.mark.parametrize("heads", [1, 16, 100, MAX_HEADS])
@pytest.mark.parametrize("splits", [2, 5, 4000])
def test_scratch_is_at_most_32_mib_or_one_row(splits: int, heads: int) -> None:
    """A partial result is v_dim sums, a greatest score and a total, of four bytes each."""
    for v_dim in (1, 100, MAX_V_DIM):
        row = sum(4 * splits * heads * n for n in (v_dim, 1, 1))
        fits = 2**25 // row
        assert scratch_rows(10**9, splits, heads, v_dim) == max(fits, 1)
        assert scratch_rows(1, splits, heads, v_dim) == 1
        if fits > 2:
            assert scratch_rows(fits - 1, splits, heads, v_dim) == fits - 1


@pytest.mark.parametrize("target", [*GPUS, INTERPRETER], ids=str)
def test_a_merging_program_covers_every_column_of_its_heads(target: Target) -> None:
    for heads, v_dim in product((1, 3, 64, 65, 128), (1, 15, 16, 17, 512)):
        constants = merge_constants(target, heads, v_dim)
        assert constants["H"] == heads and constants["V"] == v_dim
        assert constants["BLOCK_V"] == padded(v_dim, 1)
        assert constants["BLOCK_H"] in (1, padded(heads, 1))
        assert constants["num_warps"] in WARPS
