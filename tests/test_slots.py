import pytest
import torch
from hypothesis import given

from counting import AGREEMENT, POISONED, counts_examples, tallies
from lightning_indexer.kernels.slots import indices_to_slots
from lightning_indexer.testing import SlotsContract, reference, relations
from lightning_indexer.testing.calls import call_for_result
from lightning_indexer.testing.cases import SlotsCase as Case
from lightning_indexer.testing.strategies import slots_cases

POISON = -77


cases = slots_cases(SlotsContract(empty_sizes=False))


def inputs_of(case: Case) -> dict:
    names = ("indices", "block_table", "row_to_request")
    return dict(zip(names, case.tensors(), strict=True)) | {"page_size": case.page_size}


@given(case=cases)
@counts_examples("indices_to_slots")
@tallies(AGREEMENT, "indices_to_slots")
@tallies(POISONED, "indices_to_slots")
def test_slot_is_page_times_size_plus_offset(case: Case) -> None:
    inputs = inputs_of(case)
    out = (case.rows, case.width), case.slot_dtype
    got = call_for_result(indices_to_slots, inputs, out=out, layout="strided")
    assert torch.equal(got, reference.indices_to_slots(**inputs).to(case.slot_dtype))


@given(case=cases)
@counts_examples("indices_to_slots")
def test_table_expanded_to_tokens_gives_the_same_slots_with_page_size_1(case: Case) -> None:
    # ROCm/ATOM#658: an expanded table taken for block ids applies the page arithmetic twice.
    relations.table_expanded(lambda inputs: indices_to_slots(**inputs), inputs_of(case))


def test_returns_the_out_that_it_was_given() -> None:
    indices, table, requests = _int32([[3]], [[1]], [0])
    out = torch.empty(1, 1, dtype=torch.int64)
    assert indices_to_slots(indices, table, requests, 4, out=out) is out


def _int32(*values: object) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor(v, dtype=torch.int32) for v in values)


def test_raw_and_expanded_table_of_the_report_agree() -> None:
    # ROCm/ATOM#658
    indices, raw, request = _int32([[0, 3, 4, 7]], [[5, 2]], [0])
    (expanded,) = _int32([[20, 21, 22, 23, 8, 9, 10, 11]])
    slots = indices_to_slots(indices, raw, request, 4)
    assert slots.tolist() == [[20, 23, 8, 11]]
    assert torch.equal(indices_to_slots(indices, expanded, request, 1), slots)


def test_position_past_the_table_is_minus_one() -> None:
    # ROCm/ATOM#1831 (clamped to slot 0 there), NVIDIA/TensorRT-LLM#12657 (stale request map):
    # the words behind the table are poison that a stray read would turn into a slot.
    (buffer,) = _int32([[3, 1, 555, 555], [2, 0, 555, 555]])
    indices, request = _int32([[9, 7, -1, 2**31 - 1], [0, 8, 4, -(2**31)], [1, 1, 1, 1]], [0, 1, 2])
    slots = indices_to_slots(indices, buffer[:, :2], request, 4)
    assert slots.tolist() == [[-1, 7, -1, -1], [8, -1, 0, -1], [-1, -1, -1, -1]]


def test_slot_beyond_int32_is_minus_one_there_and_kept_in_int64() -> None:
    indices, table, request = _int32([[5, 70]], [[2**26, 1]], [0])
    assert indices_to_slots(indices, table, request, 64).tolist() == [[-1, 70]]
    out = torch.empty((1, 2), dtype=torch.int64)
    assert indices_to_slots(indices, table, request, 64, out=out).tolist() == [[2**32 + 5, 70]]


@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    "page_size, page, offset",
    [(1, 2**31 - 1, 0), (48, 44_739_242, 31), (64, 2**25 - 1, 63), (2**30, 1, 2**30 - 1)],
)
def test_greatest_int32_slot_is_kept(
    page_size: int, page: int, offset: int, slot_dtype: torch.dtype
) -> None:
    indices, table, request = _int32([[offset]], [[page]], [0])
    out = torch.empty((1, 1), dtype=slot_dtype)
    assert indices_to_slots(indices, table, request, page_size, out=out).item() == 2**31 - 1


@pytest.mark.parametrize("page_size", [48, 64])
def test_slot_after_the_greatest_int32_needs_int64(page_size: int) -> None:
    page, offset = divmod(2**31, page_size)
    indices, table, request = _int32([[offset]], [[page]], [0])
    out = torch.empty((1, 1), dtype=torch.int64)
    assert indices_to_slots(indices, table, request, page_size).item() == -1
    assert indices_to_slots(indices, table, request, page_size, out=out).item() == 2**31


def test_table_longer_than_int32_positions_serves_all_of_them() -> None:
    indices, request = _int32([[2**31 - 1, 2**31 - 64, -(2**31)]], [0])
    table = torch.tensor([[7]], dtype=torch.int32).expand(1, 2**26)
    assert indices_to_slots(indices, table, request, 64).tolist() == [[7 * 64 + 63, 7 * 64, -1]]


def test_row_wider_than_a_program_is_converted_whole() -> None:
    indices = torch.arange(-1, 2499, dtype=torch.int32)[None]
    table = torch.arange(40, dtype=torch.int32).flip(0)[None]
    (request,) = _int32([0])
    expected = reference.indices_to_slots(indices, table, request, 64)
    assert torch.equal(indices_to_slots(indices, table, request, 64), expected)


@pytest.mark.parametrize("rows, width, blocks", [(0, 4, 2), (3, 0, 2), (3, 4, 0)])
def test_empty_sizes_give_no_slot(rows: int, width: int, blocks: int) -> None:
    indices = torch.zeros((rows, width), dtype=torch.int32)
    requests = torch.zeros(rows, dtype=torch.int32)
    for table in (torch.ones((2, blocks)).int(), torch.ones((0, blocks)).int()):
        slots = indices_to_slots(indices, table, requests, 4)
        assert slots.shape == (rows, width)
        if table.numel() == 0:
            assert (slots == -1).all()


@pytest.mark.parametrize(
    "name, indices, table, requests",
    [
        ("indices", [[0, 8]], [[0, 1]], [0]),
        ("indices", [[-2, 0]], [[0, 1]], [0]),
        ("row_to_request", [[0, 1]], [[0, 1]], [1]),
        ("block_table", [[0, 4]], [[0, -2]], [0]),
    ],
)
def test_check_mode_rejects_garbage_before_writing(
    monkeypatch: pytest.MonkeyPatch, name: str, indices: list, table: list, requests: list
) -> None:
    monkeypatch.setenv("LIGHTNING_INDEXER_CHECK", "1")
    out = torch.full((1, 2), POISON, dtype=torch.int32)
    with pytest.raises(ValueError, match=name):
        indices_to_slots(*_int32(indices, table, requests), 4, out=out)
    assert (out == POISON).all()


def test_check_mode_accepts_absent_positions_requests_and_pages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LIGHTNING_INDEXER_CHECK", "1")
    tensors = _int32([[-1, 3], [0, 1]], [[2, -1]], [0, -1])
    assert indices_to_slots(*tensors, 4).tolist() == [[-1, 11], [-1, -1]]


def test_op_passes_opcheck() -> None:
    case = Case(2, 5, 2, 3, 4, torch.int32, garbage=True, layout="strided", seed=1)
    out = torch.empty(case.rows, case.width, dtype=torch.int32)
    op = torch.ops.lightning_indexer.indices_to_slots.default
    torch.library.opcheck(op, (*case.tensors(), case.page_size), {"out": out})


def test_compiles_without_graph_breaks() -> None:
    case = Case(2, 5, 2, 3, 4, torch.int32, garbage=True, layout="contiguous", seed=2)
    compiled = torch.compile(indices_to_slots, fullgraph=True, backend="aot_eager")
    tensors = case.tensors()
    assert torch.equal(compiled(*tensors, 4), indices_to_slots(*tensors, 4))
