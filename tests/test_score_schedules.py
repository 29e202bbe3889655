"""What the CPU scorer asks of products, memory and loads, and its trial of a machine's products."""

from typing import Any

import pytest
import torch

from lightning_indexer.kernels import mqa_logits as ragged_module
from lightning_indexer.kernels import products_cpu, score_cpu
from lightning_indexer.kernels.mqa_logits import mqa_logits
from lightning_indexer.kernels.products_cpu import SMALL_TILE, tile_shape, tiles_score_as_one
from lightning_indexer.kernels.score_cpu import CpuScorer
from test_score_edges import DIM, HEADS, INF, NAN, NONE, Windows, by_hand, int32, integers, ragged

pytestmark = pytest.mark.once


class Spy:
    """Stands in for `score_tiles`; multiplies, and keeps what it was asked for."""

    def __init__(self, patch: pytest.MonkeyPatch, trusted: bool = True) -> None:
        self.rows: list[int] = []
        self.no_nan: list[bool] = []
        self.trials: list[int] = []
        self.trusted = trusted
        patch.setattr(score_cpu, "score_tiles", self.score)
        patch.setattr(score_cpu, "tiles_score_as_one", self.trial)

    def trial(self, _heads: int, _head_dim: int, tiles: int, _threads: int) -> bool:
        self.trials.append(tiles)
        return self.trusted

    def score(self, *tensors: torch.Tensor, no_nan: bool = False) -> None:
        self.rows.append(len(tensors[0]))
        self.no_nan.append(no_nan)
        products_cpu.score_tiles(*tensors, no_nan=no_nan)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("trusted", [False, True])
def test_products_are_of_one_tile_or_of_all_and_of_all_only_where_the_trial_allows_it(
    trusted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, _ = tile_shape(HEADS, DIM)
    for count in (1, rows, rows + 1, 2 * rows + 1, 3 * rows):
        spy = Spy(monkeypatch, trusted)
        inputs = ragged([(0, 9)] * count, 9)
        got = mqa_logits(**inputs)
        expected = by_hand(inputs["q"], inputs["k"], inputs["weights"], [(0, 9)] * count)
        assert torch.equal(got, expected)
        tiles = -(-count // rows)
        assert spy.trials == ([tiles] if tiles > 1 else [])
        assert spy.rows == ([tiles * rows] if trusted else [rows] * tiles)


def test_one_row_of_a_large_group_is_multiplied_with_its_tile_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spy, rows = Spy(monkeypatch), tile_shape(HEADS, DIM)[0]
    mqa_logits(**ragged([(0, 9), *[NONE] * (8 * rows - 1)], 9))
    assert spy.rows == [rows]


def test_nan_is_ruled_out_only_where_no_sum_in_any_order_is_infinite(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    width = tile_shape(64, 128)[1]
    for query, key, ruled_out in (
        (1.0, 1.0, True),
        (2.0**70, 2.0**70, False),
        (2.0**63, 2.0**63, False),
    ):
        spy = Spy(monkeypatch)
        q, k = torch.full((4, 64, 128), query), torch.full((width + 9, 128), key)
        k[50] = NAN  # in the first tile, not in the second
        mqa_logits(q, k, torch.ones(4, 64), int32(0, 0, 0, 0), int32(*[width + 9] * 4))
        assert spy.no_nan == [False, ruled_out]


@pytest.mark.parametrize(
    ("windows", "expected"),
    [
        ([(0, 256), (3, 9), (512, 600), NONE], [(0, 256), (512, 88)]),
        ([NONE, (4, 4), (500, 600), (5, 5)], [(500, 100)]),
        ([NONE, (9, 7), (3, 3), NONE], []),
    ],
)
def test_a_cpu_loads_tiles_from_the_first_window_to_the_last_where_one_lies(
    windows: Windows, expected: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(score_cpu, "tile_shape", lambda *_: (2, 256))
    q, k, weights = integers(4, 32, 8), integers(600, 8), integers(4, 32, low=1)
    out, loaded = torch.full((4, 600), -INF), []

    def load(first: int, count: int, keys: torch.Tensor) -> tuple[None, None]:
        loaded.append((first, count))
        keys.copy_(k[first : first + count])
        return None, None

    starts, ends = zip(*windows, strict=True)
    CpuScorer(32, 8, 4).run(q, weights, starts, ends, load, out)
    assert loaded == expected
    assert torch.equal(out, by_hand(q, k, weights, windows))


def test_a_run_takes_tensors_that_ask_for_a_gradient() -> None:
    q, weights = torch.ones(2, HEADS, DIM), torch.ones(2, HEADS)
    keys, out = torch.ones(9, DIM), torch.empty(2, 9)

    def load(first: int, count: int, into: torch.Tensor) -> tuple[None, None]:
        into.copy_(keys[first : first + count])
        return None, None

    scorer = CpuScorer(HEADS, DIM, 2)
    scorer.run(q.requires_grad_(), weights.requires_grad_(), [0, 0], [9, 9], load, out)
    assert not out.requires_grad and (out == HEADS * DIM).all()


@pytest.mark.parametrize("group", [1, 2, 4])
def test_a_call_widens_each_tile_of_keys_once_and_queries_once_per_load(
    group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 4 tiles of queries, against 5 tiles of keys in loads of 2; a group alone loads one."""
    rows, width = tile_shape(HEADS, DIM)
    length = 4 * width + 9
    keys, queries, widen_into = [], [], score_cpu.widen_into

    def widen(into: list[int]) -> Any:
        return lambda out, values: (into.append(len(values)), widen_into(out, values))

    monkeypatch.setattr(ragged_module, "widen_into", widen(keys))
    monkeypatch.setattr(score_cpu, "widen_into", widen(queries))
    monkeypatch.setattr(score_cpu, "GROUP", group)
    monkeypatch.setattr(score_cpu, "LOADED_TILES", 2)
    inputs = ragged([(0, length)] * (4 * rows), length)
    expected = by_hand(inputs["q"], inputs["k"], inputs["weights"], [(0, length)] * (4 * rows))
    assert torch.equal(mqa_logits(**inputs), expected)
    assert keys == [*[width] * 4, 9]
    groups = 4 // group
    assert queries == [group * rows] * (3 * groups if groups > 1 else 1)
    assert len(CpuScorer(HEADS, DIM, 4 * rows).keys) == (2 if groups > 1 else 1)


def test_queries_are_set_for_the_keys_they_see_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, width = tile_shape(HEADS, DIM)
    set_queries, taken = CpuScorer._set_queries, []

    def take(self: CpuScorer, q: torch.Tensor, weights: torch.Tensor) -> None:
        taken.append(int(weights[0, 0]))
        set_queries(self, q, weights)

    monkeypatch.setattr(CpuScorer, "_set_queries", take)
    monkeypatch.setattr(score_cpu, "GROUP", 1)
    monkeypatch.setattr(score_cpu, "LOADED_TILES", 1)
    windows = [(0, 9), NONE, (width, width + 9), (5, width + 5)]
    inputs = ragged([window for window in windows for _ in range(rows)], width + 9)
    inputs["weights"][:] = torch.arange(4).repeat_interleave(rows)[:, None]
    mqa_logits(**inputs)
    assert taken == [0, 3, 2, 3]


def test_keys_are_packed_once_for_all_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = []

    def pack(keys: torch.Tensor, heads: int, rows: int) -> torch.Tensor:
        packed.append((heads, rows))
        return keys

    rows, width = tile_shape(HEADS, DIM)
    Spy(monkeypatch)
    monkeypatch.setattr(score_cpu, "pack_keys", pack)
    monkeypatch.setattr(score_cpu, "GROUP", 2)
    mqa_logits(**ragged([(0, width + 9)] * (4 * rows), width + 9))
    assert packed == [(HEADS, 2 * rows)] * 2


# products of a CPU


def test_keys_of_a_tile_depend_on_the_number_of_its_values() -> None:
    sizes = [(heads, dim) for heads in (1, 3, 4, 32, 64, 128) for dim in (8, 32, 64, 96, 128, 256)]
    shapes = sorted(
        (tile_shape(*size)[0] * size[0] * size[1], tile_shape(*size)[1]) for size in sizes
    )
    assert [keys for _, keys in shapes] == sorted(keys for _, keys in shapes)
    few, many = tile_shape(4, 32)[1], tile_shape(64, 128)[1]
    assert few < many
    assert [tile_shape(64, SMALL_TILE // 64 + more)[1] for more in (0, 1)] == [few, many]


@pytest.mark.parametrize("there", [True, False])
def test_large_tiles_alone_are_multiplied_by_onednn_and_only_where_there_is_one(
    there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def product(queries: torch.Tensor, keys: torch.Tensor, *_: Any) -> torch.Tensor:
        asked.append(keys.shape)
        return queries @ keys.T

    monkeypatch.setattr(products_cpu, "has_inner_product", lambda: there)
    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", product, raising=False)
    for heads, dim in ((4, 32), (64, 128)):
        rows, width = tile_shape(heads, dim)
        q, w, k = integers(rows, heads, dim), integers(rows, heads), integers(width, dim)
        scores = torch.empty(rows, 1, width)
        products_cpu.score_tiles(q, w[:, None], k, scores)
        assert torch.equal(scores[:, 0], by_hand(q, k, w, [(0, width)] * rows))
    assert asked == ([(width, dim)] if there else [])


PRODUCT, PACKING = "_linear_pointwise", "_reorder_linear_weight"


def test_packed_keys_are_onednns_where_it_multiplies_and_the_keys_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    few, many = torch.ones(256, 32), torch.ones(512, 128)
    assert products_cpu.pack_keys(few, 4, 16) is few
    monkeypatch.setattr(products_cpu, "has_inner_product", lambda: False)
    assert products_cpu.pack_keys(many, 64, 2) is many
    monkeypatch.setattr(products_cpu, "has_inner_product", lambda: True)
    monkeypatch.setattr(torch.ops.mkldnn, PACKING, lambda keys, m: (keys, m), raising=False)
    assert products_cpu.pack_keys(many, 64, 2) == (many, 128)


@pytest.mark.parametrize("lacks", ["nothing", "AVX", "oneDNN", PRODUCT, PACKING])
def test_onednn_is_asked_only_on_x86_and_if_it_has_the_product(
    lacks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    capability = "DEFAULT" if lacks == "AVX" else "AVX2"
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: lacks != "oneDNN")
    there = {name: 0 for name in (PRODUCT, PACKING) if name != lacks}
    monkeypatch.setattr(torch.ops, "mkldnn", type("Operators", (), there))
    assert products_cpu.has_inner_product.__wrapped__() is (lacks == "nothing")


def trial_on(machine: Any, patch: pytest.MonkeyPatch) -> bool:
    """The trial of 3 tiles where scores are `machine`'s, given exact ones to spoil."""

    def score(q: Any, weights: Any, keys: Any, scores: Any, no_nan: bool = False) -> None:
        assert scores.shape == (len(q), 1, len(keys)) and weights.shape == (len(q), 1, q.shape[1])
        scores[:] = torch.einsum("thd,ld->thl", q.double(), keys.double()).relu().amax(1)[:, None]
        machine(scores, no_nan)

    patch.setattr(products_cpu, "score_tiles", score)
    return tiles_score_as_one.__wrapped__(4, 32, 3, 1)


def test_the_trial_passes_machines_that_score_rows_by_themselves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert trial_on(lambda *_: None, monkeypatch)


@pytest.mark.parametrize("no_nan", [False, True])
@pytest.mark.parametrize("row", [0, 17, 46, 47])
def test_the_trial_sees_one_bit_of_one_row_of_either_product(
    row: int, no_nan: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of row 47, the last, whose query is zero, the bit is a sign."""

    def machine(scores: torch.Tensor, is_no_nan: bool) -> None:
        if len(scores) == 48 and is_no_nan is no_nan:
            scores.view(torch.int32)[row, 0, 7] ^= 1 if row < 47 else -(2**31)
            assert row < 47 or scores[row, 0, 7] == 0

    assert not trial_on(machine, monkeypatch)
