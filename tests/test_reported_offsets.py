"""Public reports of offsets that left 32 bits, as inputs of our own; each names its source.

They wanted gigabytes on a GPU. Here most of those are mapped and never touched; on a GPU the same
tests allocate them.
"""

import pytest
import torch

from lightning_indexer.kernels.backend import INTERPRET
from lightning_indexer.kernels.mqa_logits import mqa_logits
from lightning_indexer.kernels.paged_mqa_logits import paged_mqa_logits
from lightning_indexer.kernels.read_index_k import read_index_k
from lightning_indexer.kernels.topk import topk_indices
from lightning_indexer.kernels.write_index_k import write_index_k
from lightning_indexer.testing import reference
from lightning_indexer.testing.compare import assert_matches
from scoring import score_bound
from virtual_memory import DEVICES, far_apart, hardly_backed, linux_only

pytestmark = linux_only


def int32(values: object, device: str) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("length, reach", [(16, 2**29), (130, 2**29), (16, 2**31)])
def test_row_2_31_bytes_into_the_scores_is_written(length: int, reach: int, device: str) -> None:
    # ROCm/aiter#4244: row 512 of stride 2²⁰ is the first whose store was dropped. (And 2³¹ elements
    # into them, where an offset of 32 bits wraps.)
    torch.manual_seed(0)
    rows = 9 if INTERPRET else 513
    q, k = torch.randn(rows, 2, 8, device=device), torch.randn(length, 8, device=device)
    weights, starts = torch.rand(rows, 2, device=device), int32([0] * rows, device)
    stale = torch.full((rows, length), 12345.0, device=device)
    out = far_apart(stale, 0, reach)
    assert out.stride(0) * (rows - 1) >= reach
    inputs = {"q": q, "k": k, "weights": weights, "row_starts": starts, "row_ends": starts + length}
    mqa_logits(**inputs, out=out)
    near = {name: x[-2:] if len(x) == rows else x for name, x in inputs.items()}
    expected = reference.mqa_logits(**{name: x.cpu() for name, x in near.items()})
    bound = score_bound(*(near[name].cpu() for name in ("q", "k", "weights")), None)
    assert_matches(out[-2:].cpu(), expected, bound)
    assert torch.equal(out, mqa_logits(**inputs))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("last, stride", [(4564, 1_435_968), (301, 2**24)])
def test_page_6_gigabytes_into_the_pool_is_written_read_and_scored(
    last: int, stride: int, device: str
) -> None:
    # ROCm/aiter#4427 (page 4564 of stride 1,435,968 scored NaN), vllm-project/vllm#46222 (the
    # insert and the gather of such a pool).
    torch.manual_seed(0)
    compact = torch.zeros(last + 1, 4, 1, 12, dtype=torch.uint8, device=device)
    pool = far_apart(compact, 0, last * stride - 64)
    assert pool.stride(0) == stride
    k, slots = torch.randn(3, 8, device=device), int32([last * 4, last * 4 + 3, 9], device)
    table, lens = int32([[last, 2]], device), int32([6], device)
    q, weights = torch.randn(1, 1, 2, 8, device=device), torch.rand(1, 2, device=device)
    found = []
    for cache in (compact, pool):
        write_index_k(cache, k, slots, page_size=4)
        values, scales = read_index_k(cache, table, lens, page_size=4, total=6)
        scores = paged_mqa_logits(q, cache, weights, lens, table, max_context_len=6, page_size=4)
        found.append((values.float(), scales, scores))
    assert torch.equal(pool, compact)
    assert all(map(torch.equal, *found))
    assert (found[1][0][[0, 3, 5]].abs().amax(1) == 448).all()
    assert torch.isfinite(found[1][2]).all()


@pytest.mark.parametrize("device", DEVICES)
def test_keys_in_a_wide_buffer_score_like_packed_ones(device: str) -> None:
    # thu-ml/SageAttention#390: row 99864 of a buffer 21504 wide overflowed row·stride.
    length, width = (1_001, 2_150_400) if INTERPRET else (99_865, 21_504)
    keys = hardly_backed(length * width, torch.float32, device).view(length, width)[:, 64:72]
    # whole numbers: the interpreter's dots round by a key's place in its tile
    keys[-65:] = torch.randint(-3, 4, (65, 8), device=device).float()
    q = torch.randint(-3, 4, (1, 2, 8), device=device).float()
    weights = torch.tensor([[2.0, -1.0]], device=device)
    starts, ends = int32([length - 65], device), int32([length], device)
    scores = mqa_logits(q, keys, weights, starts, ends)
    packed = mqa_logits(q, keys[-65:].contiguous(), weights, starts * 0, starts * 0 + 65)
    assert torch.equal(scores[:, -65:], packed)
    assert torch.isneginf(scores[:, :-65]).all()
    assert len(packed.unique()) > 10


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows, columns, k", [(70_000, 4, 2), (66_000, 7, 3), (60_000, 10, 1)])
def test_each_of_many_short_rows_is_selected_from(
    rows: int, columns: int, k: int, device: str
) -> None:
    # pytorch/pytorch#82569 (60,000 rows failed); 70,000 also exceed a grid dimension of 65,535.
    rows = rows // 700 if INTERPRET else rows
    first = torch.arange(rows, device=device)[:, None]
    logits = ((torch.arange(columns, device=device) - first) % columns).float()
    best = (first - 1 - torch.arange(k, device=device)) % columns
    assert torch.equal(topk_indices(logits, k), best.sort(1).values.int())


@pytest.mark.gpu
def test_a_billion_scores_are_selected_from_row_by_row() -> None:
    # pytorch/pytorch#95455: position 2,033,619,248 of 500,000 columns, from 1.06e9 elements.
    logits = torch.rand(2120, 500_000, device="cuda")
    got = topk_indices(logits, 20)
    assert ((got >= 0) & (got < 500_000)).all()
    chosen = logits.gather(1, got.long()).sort(1, descending=True).values
    assert torch.equal(chosen, logits.topk(20).values)
