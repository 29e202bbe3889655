"""Scores at the edges of tiles, windows, runs, pages and tensors, in sums that are exact."""

from typing import Any

import pytest
import torch

from lightning_indexer.kernels import mqa_logits as ragged_module
from lightning_indexer.kernels import paged_mqa_kernel as paged_module
from lightning_indexer.kernels import score_queries, score_tile
from lightning_indexer.kernels.backend import HAS_TRITON, Target, tl
from lightning_indexer.kernels.configs import score_config
from lightning_indexer.kernels.mqa_logits import mqa_logits
from lightning_indexer.kernels.paged_mqa_logits import paged_mqa_logits
from lightning_indexer.kernels.score_queries import encoded_queries
from lightning_indexer.offline.case import TARGETS
from scoring import FP8, Canary

INF, NAN = float("inf"), float("nan")
HEADS, DIM, PAGE = 3, 24, 16  # heads and dimensions that a tile pads
INTERPRETER = Target("interpreter", "cpu")
Windows = list[tuple[int, int]]


def integers(*shape: int, low: int = -3, high: int = 3) -> torch.Tensor:
    """Every sum of products of such numbers is exact in fp32, in any order."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(low, high + 1, shape, generator=generator).float()


def int32(*values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def by_hand(
    q: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor, windows: Windows
) -> torch.Tensor:
    """The formula in float64 for q [T, H, D], keys [L, D]; windows may be cut by the keys."""
    out = torch.full((len(q), len(keys)), -INF)
    for t, (start, end) in enumerate(windows):
        seen = slice(max(start, 0), max(start, end, 0))
        dots = (keys[seen].double() @ q[t].double().T).relu()
        out[t, seen] = (dots @ weights[t].double()).float()
    return out


def ragged(windows: Windows, length: int, **changes: Any) -> dict[str, Any]:
    rows = len(windows)
    inputs = {
        "q": integers(rows, HEADS, DIM),
        "k": integers(length, DIM),
        "weights": integers(rows, HEADS, low=1),
        "row_starts": int32(*(start for start, _ in windows)),
        "row_ends": int32(*(end for _, end in windows)),
    }
    return inputs | changes


# windows of one key sequence

NONE = (0, 0)
#: Blocks of rows of which one sees something, or none; windows that end and begin with tiles.
SPARSE_WINDOWS: Windows = [
    *[NONE, (9, 5), (3, 8), NONE],
    *[NONE, NONE, (127, 129), (128, 256)],
    *[NONE, NONE, (299, 300), NONE],
    *[NONE, (256, 257), (-9, 1)],
    *[(0, 300), NONE],
]


def test_each_row_gets_its_window_and_nothing_else_is_written() -> None:
    inputs = ragged(SPARSE_WINDOWS, 300)
    canary = Canary.of(len(SPARSE_WINDOWS), 300)
    mqa_logits(**inputs, out=canary.out)
    expected = by_hand(inputs["q"], inputs["k"], inputs["weights"], SPARSE_WINDOWS)
    assert torch.equal(canary.out, expected)
    canary.assert_nothing_else_written()


@pytest.mark.parametrize("window", [(0, 40), (7, 7)])
def test_rows_behind_the_last_one_are_not_read(window: tuple[int, int]) -> None:
    inputs = ragged([window, (0, 40)], 40)
    inputs["q"][1], inputs["weights"][1] = NAN, NAN
    few = inputs | {name: inputs[name][:1] for name in inputs.keys() - {"k"}}
    expected = by_hand(few["q"], inputs["k"], few["weights"], [window])
    assert torch.equal(mqa_logits(**few), expected)


def test_an_infinite_key_is_infinite_for_every_head_that_there_is() -> None:
    inputs = ragged([(0, 5)], 5)
    inputs["q"].fill_(1)
    inputs["k"][2, 4] = INF
    expected = by_hand(inputs["q"], inputs["k"], inputs["weights"], [(0, 5)])
    expected[0, 2] = INF
    assert torch.equal(mqa_logits(**inputs), expected)


def test_subnormal_bf16_keys_count_beside_large_queries() -> None:
    q = torch.full((1, HEADS, DIM), 2.0**100, dtype=torch.bfloat16)
    k = torch.full((2, DIM), 2.0**-133, dtype=torch.bfloat16)
    inputs = ragged([(0, 2)], 2, q=q, k=k)
    assert mqa_logits(**inputs).tolist() == [[inputs["weights"].sum() * DIM * 2.0**-33] * 2]


def test_keys_of_several_slices_are_all_multiplied() -> None:
    inputs = ragged([(0, 3)], 3, q=integers(1, HEADS, 256), k=integers(3, 256))
    expected = by_hand(inputs["q"], inputs["k"], inputs["weights"], [(0, 3)])
    assert torch.equal(mqa_logits(**inputs), expected)


# which tiles of keys the kernels load

TILE = 128


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many keys are read of each tile that is loaded, one entry a load."""
    counted: list[int] = []
    load_keys = score_tile.load_keys

    def load(key_ptrs: Any, stride_kd: Any, mask_keys: Any, *arguments: Any) -> Any:
        counted.append(int(mask_keys.handle.data.sum()))
        return load_keys(key_ptrs, stride_kd, mask_keys, *arguments)

    def constants(*arguments: Any) -> dict[str, Any]:
        tile = {"BLOCK_KEYS": TILE, "BLOCK_ROWS": 4, "CHUNK_D": 32}
        return score_tile.tile_constants(*arguments) | tile

    monkeypatch.setattr(score_tile, "load_keys", load)
    for module in (ragged_module, paged_module):
        monkeypatch.setattr(module, "load_keys", load)
        monkeypatch.setattr(module, "tile_constants", constants)
    return counted


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("windows", "expected"),
    [
        ([(0, TILE)], [128]),
        ([(TILE, TILE + 1)], [128]),
        ([(2 * TILE, 300)], [44]),
        ([(5, 5), (9, 7)], []),
    ],
)
def test_tiles_that_no_window_reaches_are_not_loaded(
    windows: Windows, expected: list[int], loads: list[int]
) -> None:
    inputs = ragged([*windows, (0, 300)], 300)  # the last row lies behind the tensors
    few = inputs | {name: inputs[name][: len(windows)] for name in inputs.keys() - {"k"}}
    mqa_logits(**few)
    assert loads == expected


@pytest.mark.interpreter
def test_keys_of_one_slice_are_loaded_once_for_all_rows_of_a_block(loads: list[int]) -> None:
    mqa_logits(**ragged([(0, 9)] * 4, 9, q=integers(4, HEADS, 32), k=integers(9, 32)))
    assert loads == [9]


# keys in pages


def paged(rows: list[tuple[int, int]], max_context_len: int, **changes: Any) -> dict[str, Any]:
    """Rows (request, length) in the ragged form; around cache and table there is more of both."""
    lines = -(-max_context_len // PAGE)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1)).int()
    table = order.repeat(lines)[: 6 * lines].view(6, lines)
    inputs = {
        "q": integers(len(rows), 1, HEADS, DIM),
        "cache": integers(42, PAGE, DIM)[1:-1],
        "weights": integers(len(rows), HEADS, low=1),
        "context_lens": int32(*(length for _, length in rows)),
        "block_table": table[1:-1],
        "row_to_request": int32(*(request for request, _ in rows)),
        "max_context_len": max_context_len,
        "page_size": PAGE,
    }
    return inputs | changes


def paged_by_hand(inputs: dict[str, Any], rows: list[tuple[int, int]]) -> torch.Tensor:
    cache, table, size = inputs["cache"], inputs["block_table"], inputs["page_size"]
    q, width = inputs["q"].flatten(0, 1), inputs["max_context_len"]
    out = torch.full((len(rows), width), -INF)
    for t, (request, length) in enumerate(rows):
        known = 0 <= request < len(table)
        for s in range(min(length, width) if known else 0):
            page = int(table[request, s // size])
            if 0 <= page < len(cache):
                key, row = cache[page, s % size][None], slice(t, t + 1)
                out[t, s] = by_hand(q[row], key, inputs["weights"][row], [(0, 1)])
    return out


def assert_pages_are_scored(inputs: dict[str, Any], rows: list[tuple[int, int]]) -> None:
    canary = Canary.of(len(rows), inputs["max_context_len"])
    paged_mqa_logits(**inputs, out=canary.out)
    assert torch.equal(canary.out, paged_by_hand(inputs, rows))
    canary.assert_nothing_else_written()


FEW_ROWS = pytest.mark.parametrize("few_rows", [0, 256], ids=["blocks of rows", "a program a row"])


@FEW_ROWS
def test_rows_of_runs_get_the_keys_of_their_requests(
    few_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs of every length, across blocks; the request before the first row is the first's."""
    monkeypatch.setattr(paged_module, "FEW_ROWS", few_rows)
    rows = [
        (0, 128),
        (1, 2),
        (1, 130),
        (2, 129),
        (2, 140),
        (2, 1),
        (2, 0),
        (2, 20),
        (2, -3),
        (0, 7),
    ]
    inputs = paged(rows, 140)
    inputs["row_to_request"] = int32(0, *(request for request, _ in rows))[1:]
    assert_pages_are_scored(inputs, rows)


@FEW_ROWS
def test_requests_and_pages_that_do_not_exist_are_not_read(
    few_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is memory before and behind table and cache, with keys in it that could be scored."""
    monkeypatch.setattr(paged_module, "FEW_ROWS", few_rows)
    rows = [(-1, 40), (0, 40), (3, 40), (4, 40)]
    inputs = paged(rows, 40)
    inputs["block_table"][0] = int32(-1, 0, 39)
    inputs["block_table"][3] = int32(39, 40, 0)
    assert_pages_are_scored(inputs, rows)


def test_a_missing_page_of_the_only_one_is_empty() -> None:
    rows = [(0, 20), (1, 20)]
    only = {"cache": integers(3, PAGE, DIM)[1:2], "block_table": int32([1, 0], [0, -1])}
    assert_pages_are_scored(paged(rows, 20, **only), rows)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("next_n", [1, 3, 6])
def test_drafts_see_one_key_more_each_and_never_fewer_than_none(
    next_n: int, dtype: torch.dtype
) -> None:
    smallest = torch.iinfo(dtype).min
    lens = torch.tensor([5, smallest, 0, 141], dtype=dtype)
    rows = [(b, int(n) - next_n + 1 + j) for b, n in enumerate(lens) for j in range(next_n)]
    q = integers(4, next_n, HEADS, DIM)
    inputs = paged([(0, 0)] * len(rows), 140, q=q, context_lens=lens, row_to_request=None)
    assert_pages_are_scored(inputs, rows)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_rows_of_a_request_may_each_have_their_own_length(dtype: torch.dtype) -> None:
    lens = torch.tensor([[3, 140, 0], [129, 1, 2], [0, 0, 0], [-1, 128, 141]], dtype=dtype)
    rows = [(b, int(n)) for b, line in enumerate(lens) for n in line]
    q = integers(4, 3, HEADS, DIM)
    inputs = paged(rows, 140, q=q, context_lens=lens, row_to_request=None)
    assert_pages_are_scored(inputs, rows)


def test_pages_hold_64_tokens_unless_said_otherwise() -> None:
    inputs = paged([(0, 70)], 70, cache=integers(2, 64, DIM), block_table=int32([1, 0]))
    inputs["page_size"] = 64
    expected = paged_by_hand(inputs, [(0, 70)])
    del inputs["page_size"]
    assert torch.equal(paged_mqa_logits(**inputs), expected)


@pytest.mark.once
def test_lengths_of_no_rows_may_be_any(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_INDEXER_CHECK", "1")
    q = torch.zeros(4, 0, HEADS, DIM)
    inputs = paged([], 40, q=q, context_lens=int32(0, 9, 40, 41), row_to_request=None)
    assert paged_mqa_logits(**inputs).shape == (0, 40)


@pytest.mark.interpreter
@FEW_ROWS
@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([(0, TILE), (1, 300)], [44, 128, 128, 128]),
        ([(0, 100), (0, 90), (0, 9), (1, 3)], [3, 100]),
        ([(0, 9), (1, 20), (0, 5)], [5, 9, 20]),
        ([(0, 0), (-1, 300), (4, 300), (1, -1)], []),
    ],
)
def test_pages_are_loaded_once_for_a_run_and_not_past_its_longest_row(
    rows: list[tuple[int, int]],
    expected: list[int],
    few_rows: int,
    loads: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(paged_module, "FEW_ROWS", few_rows)
    inputs = paged([*rows, (2, 300)], 300)  # the last row lies behind the tensors
    per_row = ("q", "weights", "context_lens", "row_to_request")
    paged_mqa_logits(**inputs | {name: inputs[name][: len(rows)] for name in per_row})
    assert sorted(loads) == expected


@pytest.mark.interpreter
def test_the_interpreter_loops_up_to_given_numbers(loads: Any, monkeypatch: Any) -> None:
    ends = []  # the interpreter of Triton 3.6 cannot do otherwise

    def loop(end: Any) -> range:
        ends.append(end)
        return range(end)

    for module in (ragged_module, paged_module):
        monkeypatch.setattr(module, "range", loop, raising=False)
    mqa_logits(**ragged([(0, 9)], TILE + 1))
    paged_mqa_logits(**paged([(0, 9)], TILE + 1))
    assert len(ends) == 4
    assert not any(isinstance(end, tl.tensor) for end in ends)


@pytest.mark.interpreter
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx942"])
def test_fp8_is_scored_exactly_in_every_type_that_gpus_multiply(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def constants(_target: Target, *arguments: Any) -> dict[str, Any]:
        of_gpu = score_tile.tile_constants.__wrapped__(TARGETS[target], *arguments)
        return of_gpu | {"USE_PTX": False, "FIXED_ROWS": True}

    decoded, decode = [], score_tile.e4m3_to_fp16

    def spied(x: Any) -> Any:
        decoded.append(x)
        return decode(x)

    monkeypatch.setattr(score_tile, "e4m3_to_fp16", spied)
    monkeypatch.setattr(ragged_module, "tile_constants", constants)
    inputs = ragged([(0, 9), (3, 30)], 30)
    expected = by_hand(inputs["q"], inputs["k"], inputs["weights"], [(0, 9), (3, 30)])
    fp8 = inputs | {name: inputs[name].to(FP8) for name in ("q", "k")}
    assert torch.equal(mqa_logits(**fp8), expected)
    assert bool(decoded) == (target == "sm_80")  # that which multiplies no bytes


needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="no Triton here")


@needs_triton
@pytest.mark.once
def test_operands_hold_every_query_and_are_of_a_type_that_the_target_multiplies() -> None:
    dtypes = (torch.uint8, torch.bfloat16, torch.float16, torch.float32)
    rest = (tl.bfloat16, tl.float16, tl.float32)
    expected = {
        "sm_80": (tl.float16, *rest),
        "sm_90": (tl.float8e4nv, *rest),
        "gfx942": (tl.float8e4b8, *rest),
    }
    for name, operands in expected.items():
        got = tuple(score_tile.operand_dtype(TARGETS[name], dtype) for dtype in dtypes)
        assert got == operands
    assert {score_tile.operand_dtype(INTERPRETER, dtype) for dtype in dtypes} == {tl.float32}


@needs_triton
@pytest.mark.once
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_only_nvidia_gets_ptx_and_a_limit_of_registers_and_only_the_interpreter_fixed_rows(
    dtype: torch.dtype,
) -> None:
    for target in (*TARGETS.values(), INTERPRETER):
        constants = score_tile.tile_constants(target, dtype, dtype, 64, 128)
        cuda = target.backend == "cuda"
        limit = score_config(target, dtype, dtype, 64, 128).max_registers if cuda else None
        assert constants["USE_PTX"] is cuda
        assert constants.get("maxnreg") == limit
        assert constants["FIXED_ROWS"] is (target == INTERPRETER)


@pytest.mark.interpreter
@pytest.mark.parametrize("target", [INTERPRETER, Target("cuda", 80)], ids=["whole", "in blocks"])
@pytest.mark.parametrize(("heads", "head_dim"), [(3, 24), (11, 100)])
def test_encoding_queries_writes_them_and_nothing_behind_them(
    heads: int, head_dim: int, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    q = integers(2, 1, heads, head_dim)
    guarded = torch.full((q.numel() + 4096,), NAN, dtype=torch.float16)
    monkeypatch.setattr(score_queries, "target_of", lambda _: target)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", lambda shape, **_: guarded[: q.numel()].view(shape))
        got = encoded_queries(q.to(FP8).view(torch.uint8), tl.float16)
    assert torch.equal(got.float(), q)
    assert guarded[q.numel() :].isnan().all()
