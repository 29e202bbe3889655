import pytest
import torch
from hypothesis import given, settings

from counting import AGREEMENT, counts_examples, tallies
from lightning_indexer.kernels import compact
from lightning_indexer.kernels.compact import COMPACT_OP, compact_topk_indices
from lightning_indexer.testing import CompactContract, reference, relations
from lightning_indexer.testing.calls import guarded_call
from lightning_indexer.testing.cases import CompactCase
from lightning_indexer.testing.strategies import compact_cases

EIGHTH = settings(max_examples=max(3, settings().max_examples // 8))


cases = compact_cases(CompactContract(empty_sizes=False))


def _expected(case: CompactCase) -> list[torch.Tensor]:
    return [
        reference.compact_topk_indices(buffer, case.rows(), num_rows=case.limit)
        for buffer in case.buffers()
    ]


def _compacted(buffers: list[torch.Tensor], rows: torch.Tensor) -> list[torch.Tensor]:
    compact_topk_indices(buffers, rows)
    return buffers


@given(case=cases)
@counts_examples("compact_topk_indices")
@tallies(AGREEMENT, "compact_topk_indices")
def test_row_i_becomes_old_row_rows_i_and_nothing_else_changes(case: CompactCase) -> None:
    buffers = case.buffers()
    returned = guarded_call(
        compact_topk_indices,
        {"buffers": buffers, "rows": case.rows()},
        {"num_rows": case.limit},
        writes=frozenset({"buffers"}),
    )
    assert returned is None
    for buffer, expected in zip(buffers, _expected(case), strict=True):
        assert torch.equal(buffer, expected)


@EIGHTH
@given(case=cases)
@counts_examples("compact_topk_indices")
def test_buffers_together_give_what_each_alone_gives(case: CompactCase) -> None:
    relations.compacted_together(_compacted, case.buffers(), case.rows())


@EIGHTH
@given(case=cases)
@counts_examples("compact_topk_indices")
def test_gather_to_scratch_gives_what_slices_in_place_give(case: CompactCase) -> None:
    one, other = case.buffers()[0], case.buffers()[0]
    compact_topk_indices(one, case.rows())
    compact._gather_then_write(other, case.rows(), case.height)
    assert torch.equal(one, other)


def test_more_rows_than_fit_a_tile_are_compacted() -> None:
    n = compact.MAX_ROWS_IN_PLACE + 1
    buffer = torch.arange(n, dtype=torch.int32)[:, None].repeat(1, 3)
    compact_topk_indices(buffer, torch.arange(n).flip(0))
    assert torch.equal(buffer[:, 1], torch.arange(n, dtype=torch.int32).flip(0))


def test_most_rows_of_a_tile_are_compacted_in_place() -> None:
    n = compact.MAX_ROWS_IN_PLACE
    buffer = torch.arange(n, dtype=torch.int32)[:, None].repeat(1, 5)
    compact_topk_indices(buffer, torch.arange(n).flip(0))
    assert torch.equal(buffer[:, 4], torch.arange(n, dtype=torch.int32).flip(0))


def test_more_buffers_than_a_launch_takes_are_all_compacted() -> None:
    buffers = [
        torch.tensor([[i], [i + 1]], dtype=torch.int32)
        for i in range(compact.BUFFERS_PER_LAUNCH + 1)
    ]
    compact_topk_indices(buffers, torch.tensor([1]))
    assert [b[0, 0].item() for b in buffers] == [i + 1 for i in range(len(buffers))]


def test_buffer_listed_twice_is_compacted_once() -> None:
    buffer = torch.arange(4, dtype=torch.int32)[:, None].repeat(1, 3)
    compact_topk_indices([buffer, buffer, buffer[:, :]], torch.tensor([1, 2, 3]))
    assert buffer[:, 0].tolist() == [1, 2, 3, 3]


@pytest.mark.parametrize("cut", ["columns", "alternate columns", "alternate rows"])
def test_views_that_interleave_without_sharing_are_compacted(cut: str) -> None:
    parent = torch.arange(48, dtype=torch.int32).view(6, 8)
    views = {
        "columns": lambda x: [x[:, :3], x[:, 3:]],
        "alternate columns": lambda x: [x[:, ::2], x[:, 1::2]],
        "alternate rows": lambda x: [x[::2], x[1::2]],
    }[cut]
    expected = parent.clone()
    for view in views(expected):
        view.copy_(reference.compact_topk_indices(view, torch.tensor([2, 0])))
    compact_topk_indices(views(parent), torch.tensor([2, 0]))
    assert torch.equal(parent, expected)


def test_row_ids_may_lie_in_the_buffer_they_move() -> None:
    buffer = torch.tensor([[2, 7], [2, 8], [1, 9]], dtype=torch.int32)
    compact_topk_indices(buffer, buffer[:, 0])
    assert buffer.tolist() == [[1, 9], [1, 9], [2, 8]]


@pytest.mark.parametrize("height, width, n", [(0, 4, 0), (3, 0, 2), (3, 4, 0)])
def test_empty_sizes_change_nothing(height: int, width: int, n: int) -> None:
    buffer = torch.full((height, width), 5, dtype=torch.int32)
    compact_topk_indices([buffer], torch.zeros(n, dtype=torch.int32))
    assert (buffer == 5).all()
    compact_topk_indices([], torch.zeros(0, dtype=torch.int32))


def _buffer(height: int = 3, width: int = 4) -> torch.Tensor:
    return torch.arange(height * width, dtype=torch.int32).view(height, width)


@pytest.mark.parametrize(
    "views",
    [
        lambda x: [x[:, :3], x[:, 2:]],
        lambda x: [x[:3], x[2:5]],
        lambda x: [x[:3], x[:3, :3]],
        lambda x: [x[:3].T, x[3:7].reshape(-1)[:12].view(4, 3), x[:4, :3]],
    ],
)
def test_partial_overlap_is_an_error_and_nothing_moves(views: object) -> None:
    parent = _buffer(8)
    with pytest.raises(ValueError, match="partial overlap"):
        compact_topk_indices(views(parent), torch.tensor([1, 0]))
    assert torch.equal(parent, _buffer(8))


@pytest.mark.parametrize("bad", [-1, 2, 3])
def test_check_mode_raises_on_a_row_id_out_of_range(
    bad: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIGHTNING_INDEXER_CHECK", "1")
    buffer = _buffer()
    with pytest.raises(ValueError, match=r"^rows must"):
        compact_topk_indices(buffer, torch.tensor([1, bad]), num_rows=2)
    assert torch.equal(buffer, _buffer())
    compact_topk_indices(buffer, torch.tensor([1, 0]), num_rows=2)
    assert buffer[0, 0] == 4


def test_op_passes_opcheck() -> None:
    torch.library.opcheck(COMPACT_OP, ([_buffer(), _buffer(3, 7)], torch.tensor([2, 0]), 3))


def test_compiles_without_graph_breaks() -> None:
    compiled = torch.compile(compact_topk_indices, fullgraph=True, backend="aot_eager")
    buffers, expected = ([_buffer(), _buffer(3, 7)] for _ in range(2))
    compiled(buffers, torch.tensor([2, 0]))
    compact_topk_indices(expected, torch.tensor([2, 0]))
    assert all(torch.equal(a, b) for a, b in zip(buffers, expected, strict=True))
    buffer = _buffer()
    compiled([buffer, buffer], torch.tensor([1, 2]))
    assert buffer[:, 0].tolist() == [4, 8, 8]


def test_writing_moves_the_version_of_every_buffer() -> None:
    buffers = [_buffer(), _buffer()]
    before = [b._version for b in buffers]
    compact_topk_indices(buffers, torch.tensor([1]))
    assert all(b._version > v for b, v in zip(buffers, before, strict=True))
