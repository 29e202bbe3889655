"""Every tile that a GPU is given, run in the interpreter: same formula, same bits in both ops."""

import dataclasses
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import pytest
import torch

from lightning_indexer.kernels import mqa_logits as ragged_module
from lightning_indexer.kernels import paged_mqa_kernel as paged_module
from lightning_indexer.kernels import score_tile
from lightning_indexer.kernels.backend import Target
from lightning_indexer.kernels.configs import ScoreConfig, score_config
from lightning_indexer.kernels.mqa_logits import mqa_logits
from lightning_indexer.kernels.paged_mqa_logits import paged_mqa_logits
from lightning_indexer.offline.case import TARGETS
from lightning_indexer.testing import reference
from lightning_indexer.testing.compare import assert_matches
from paged_scoring import PagedCase, gathered
from scoring import FP32, ScoreCase, same_bits, score_bound

pytestmark = pytest.mark.interpreter

INF = float("inf")
DTYPES = (
    (torch.uint8, torch.uint8),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.uint8),
    (FP32, FP32),
)
INTERPRETER = Target("interpreter", "cpu")


def tiles() -> dict[ScoreConfig, tuple[int, int]]:
    """The tables' distinct tiles, each with an H and a D that it pads.

    Two rows a program are enough here, and warps and registers mean nothing to the interpreter.
    """
    found: dict[ScoreConfig, tuple[int, int]] = {}
    for target in TARGETS.values():
        for dtypes in DTYPES:
            for heads, head_dim in ((12, 128), (24, 96), (48, 128), (100, 128), (64, 200)):
                tile = score_config(target, *dtypes, heads, head_dim)
                tile = dataclasses.replace(tile, block_rows=2, num_warps=4, max_registers=None)
                found.setdefault(tile, (heads, head_dim))
    return found


def tile_id(tile: ScoreConfig) -> str:
    heads = f"{tile.dot_heads} of {tile.block_h} heads in {tile.sums}"
    return f"{tile.block_keys} keys, {heads}, {tile.chunk_d} wide"


@contextmanager
def using(tile: ScoreConfig) -> Iterator[None]:
    """Both ops launch `tile`, in the interpreter's arithmetic."""

    def constants(_target: Target, *arguments: object) -> dict:
        with patch.object(score_tile, "score_config", lambda *_: tile):
            return score_tile.tile_constants.__wrapped__(INTERPRETER, *arguments)

    with ExitStack() as stack:
        for module in (ragged_module, paged_module):
            stack.enter_context(patch.object(module, "tile_constants", constants))
        yield


@pytest.mark.parametrize(
    "tile, heads, head_dim",
    [pytest.param(tile, *sizes, id=tile_id(tile)) for tile, sizes in tiles().items()],
)
def test_tile_gives_the_formula_and_both_ops_the_same_bits(
    tile: ScoreConfig, heads: int, head_dim: int
) -> None:
    # two blocks of rows, two tiles of keys, neither full
    rows, length = tile.block_rows + 1, tile.block_keys + 30
    case = ScoreCase(
        rows, length, heads, head_dim, "fp32", True, "normal", "causal", "contiguous", seed=6
    )
    inputs = case.inputs()
    with using(tile):
        got = mqa_logits(**inputs)
        bound = score_bound(inputs["q"], inputs["k"], inputs["weights"], inputs["k_scale"])
        assert_matches(got, reference.mqa_logits(**inputs), bound)
        unscaled = inputs | {"k_scale": None}
        pages = -(-length // 16)
        cache = torch.zeros(pages * 16, head_dim)
        cache[:length] = inputs["k"]
        paged = paged_mqa_logits(
            inputs["q"][:, None],
            cache.view(pages, 16, head_dim),
            inputs["weights"],
            inputs["row_ends"],
            torch.arange(pages, dtype=torch.int32)[None],
            row_to_request=torch.zeros(rows, dtype=torch.int32),
            max_context_len=length,
            page_size=16,
        )
        assert same_bits(paged, mqa_logits(**unscaled))


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of keys of each tile that the kernels load, one entry a load."""
    counted: list[int] = []
    load_keys = score_tile.load_keys

    def load(key_ptrs, *arguments):
        counted.append(key_ptrs.shape[0])
        return load_keys(key_ptrs, *arguments)

    for module in (ragged_module, paged_module):
        monkeypatch.setattr(module, "load_keys", load)
    return counted


def test_a_tile_is_loaded_once_for_its_rows_and_not_at_all_if_none_sees_it(loads) -> None:
    tile = score_config(TARGETS["sm_90"], torch.uint8, torch.uint8, 16, 32)
    case = ScoreCase(16, 700, 4, 32, "fp32", False, "normal", "full", "contiguous", seed=8)
    inputs = case.inputs()
    inputs["row_ends"][:] = 300  # two of three tiles
    with using(tile):
        got = mqa_logits(**inputs)
    assert loads == [256, 256]
    assert (got[:, 300:] == -INF).all() and torch.isfinite(got[:, :300]).all()


def test_drafts_and_neighbours_of_one_request_share_its_keys(
    loads, monkeypatch: pytest.MonkeyPatch
) -> None:
    tile = score_config(TARGETS["sm_90"], torch.uint8, torch.uint8, 16, 32)
    call = ("float32", FP32)
    case = PagedCase(3, 5, 90, 4, 32, 16, call, "drafts", "ties", "contiguous", seed=11)
    inputs = case.inputs(hostile=False)
    inputs["context_lens"][:] = torch.tensor([90, 70, 3], dtype=torch.int32)
    lengths, requests = reference.row_lengths(inputs["context_lens"], 5, None)
    ragged = inputs | {
        "q": inputs["q"].flatten(0, 1)[:, None],
        "context_lens": torch.tensor(lengths),
        "row_to_request": torch.tensor(requests),
    }
    with using(tile):
        expected = paged_mqa_logits(**inputs)
        assert len(loads) == 3  # one tile of keys a request
        for few_rows in (paged_module.FEW_ROWS, 0):
            monkeypatch.setattr(paged_module, "FEW_ROWS", few_rows)
            loads.clear()
            assert same_bits(paged_mqa_logits(**ragged), expected)
            assert len(loads) == 3


@pytest.mark.parametrize("few_rows", [0, 1000], ids=["blocks of rows", "a program a row"])
def test_rows_of_any_requests_in_any_order(few_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_module, "FEW_ROWS", few_rows)
    call = ("nominal 4-D", torch.float8_e4m3fn)
    case = PagedCase(4, 10, 70, 3, 32, 16, call, "ragged", "ties", "contiguous", seed=3)
    inputs = case.inputs()  # requests and pages that do not exist among them
    bounds = torch.full((case.rows, 70), 2.0**-20)
    _, _, keys, _ = gathered(inputs)
    assert keys.shape == (case.rows, 70, 32)
    tile = score_config(TARGETS["sm_90"], torch.uint8, torch.uint8, 16, 32)
    with using(tile):
        assert_matches(paged_mqa_logits(**inputs), reference.paged_mqa_logits(**inputs), bounds)


def test_rows_that_see_nothing_are_filled(loads) -> None:
    case = ScoreCase(19, 140, 4, 32, "fp8", True, "normal", "full", "contiguous", seed=2)
    inputs = case.inputs()
    inputs["row_ends"] = inputs["row_starts"] - torch.arange(19, dtype=torch.int32) % 3
    assert (mqa_logits(**inputs) == -INF).all()
    assert loads == []
