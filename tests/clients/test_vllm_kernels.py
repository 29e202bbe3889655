"""vLLM's own functions beside ours: index conversion, its PyTorch and its Triton logits."""

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.attention.backends.mla.sparse_utils import triton_convert_req_index_to_global_index
from vllm.v1.attention.ops import rocm_aiter_mla_sparse as peer

import lightning_indexer as li
from peers.interpreter import bool_masks
from scoring import share

NEG_INF = float("-inf")
PAGE, HEAD_DIM = 64, 128


@dataclass(frozen=True)
class IndexCase:
    """Random page maps: repeated pages, page 0, positions of −1 and past the table."""

    rows: int
    requests: int
    pages: int
    width: int
    page_size: int
    seed: int


index_cases = st.builds(
    IndexCase,
    rows=st.integers(1, 6),
    requests=st.integers(1, 5),
    pages=st.integers(1, 7),
    width=st.sampled_from((128, 256)),
    page_size=st.sampled_from((16, 64)),
    seed=st.integers(0, 2**31),
)


@share(2)
@given(index_cases)
def test_index_conversion_agrees_with_vllm(case: IndexCase) -> None:
    g = torch.Generator().manual_seed(case.seed)
    span = case.pages * case.page_size
    shape = case.rows, case.width
    indices = torch.randint(-1, span + 40, shape, generator=g).to(torch.int32)
    table = torch.randint(0, 10**6, (case.requests, case.pages), generator=g).to(torch.int32)
    requests = torch.randint(case.requests, (case.rows,), generator=g).to(torch.int32)
    want, valid = triton_convert_req_index_to_global_index(
        requests,
        table,
        indices.clone(),
        BLOCK_SIZE=case.page_size,
        NUM_TOPK_TOKENS=case.width,
        return_valid_counts=True,
    )
    got = li.indices_to_slots(indices, table, requests, case.page_size)
    # Asked for counts, vLLM moves the valid slots to the front, in no promised order.
    assert torch.equal(got.sort(descending=True).values, want.sort(descending=True).values)
    assert torch.equal((got >= 0).sum(1).to(torch.int32), valid)
    in_place = triton_convert_req_index_to_global_index(
        requests, table, indices, BLOCK_SIZE=case.page_size, NUM_TOPK_TOKENS=case.width
    )
    assert torch.equal(got, in_place)


@dataclass(frozen=True)
class LogitsCase:
    """Requests of unequal lengths on scattered pages; rows of a request end where they like."""

    lengths: tuple[int, ...]
    next_n: int
    heads: int
    seed: int

    def inputs(self) -> dict[str, torch.Tensor]:
        g = torch.Generator().manual_seed(self.seed)
        requests, rows = len(self.lengths), len(self.lengths) * self.next_n
        each = [-(-length // PAGE) for length in self.lengths]
        num_pages = sum(each) + 2
        order = torch.randperm(num_pages, generator=g).to(torch.int32)
        table = torch.zeros(requests, max(each), dtype=torch.int32)
        for request, (first, count) in enumerate(
            zip(torch.tensor([0, *each]).cumsum(0).tolist(), each, strict=False)
        ):
            table[request, :count] = order[first : first + count]
        cache = li.IndexKCache(num_pages, HEAD_DIM, page_size=PAGE)
        keys = torch.randn(num_pages * PAGE, HEAD_DIM, generator=g)
        cache.write(keys, torch.arange(num_pages * PAGE))
        fraction = torch.rand(requests, self.next_n, generator=g)
        ends = 1 + fraction * (torch.tensor(self.lengths)[:, None] - 1)
        q = torch.randn(requests, self.next_n, self.heads, HEAD_DIM, generator=g)
        return {
            "q": q.to(torch.float8_e4m3fn),
            "cache": cache.data.squeeze(2),
            "weights": torch.randn(rows, self.heads, generator=g),
            "context_lens": ends.to(torch.int32),
            "block_table": table,
        }


logits_cases = st.builds(
    LogitsCase,
    lengths=st.lists(st.integers(1, 200), min_size=1, max_size=3).map(tuple),
    next_n=st.integers(1, 3),
    heads=st.sampled_from((16, 32, 64)),
    seed=st.integers(0, 2**31),
)


def paged(inputs: dict[str, torch.Tensor], width: int) -> torch.Tensor:
    return li.paged_mqa_logits(**inputs, max_context_len=width, page_size=PAGE)


def assert_close_rows(got: torch.Tensor, want: torch.Tensor) -> None:
    """The same −inf, and errors within 1e-5 of the row's greatest magnitude."""
    hidden = want == NEG_INF
    assert torch.equal(got == NEG_INF, hidden)
    got, want = got.masked_fill(hidden, 0), want.masked_fill(hidden, 0)
    assert ((got - want).abs() <= 1e-5 * want.abs().amax(1, keepdim=True)).all()


@share(12)
@given(logits_cases)
def test_logits_agree_with_vllms_pytorch_on_the_same_cache_bytes(case: LogitsCase) -> None:
    inputs = case.inputs()
    rows, width = case.next_n * len(case.lengths), inputs["block_table"].shape[1] * PAGE
    got = paged(inputs, width)
    # For several tokens a request vLLM's function reads another layout of the page: so row by row.
    want = peer.fp8_paged_mqa_logits_torch(
        inputs["q"].flatten(0, 1).unsqueeze(1),
        inputs["cache"],
        inputs["weights"],
        inputs["context_lens"].flatten(),
        inputs["block_table"].repeat_interleave(case.next_n, 0),
        width,
    )
    assert got.shape == (rows, width)
    assert_close_rows(got, want)


@pytest.fixture
def peer_launch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """vLLM's launcher of its Triton kernel, where neither a GPU nor its workspace exists."""

    def fresh(*specs: tuple[tuple[int, ...], torch.dtype]) -> list[torch.Tensor]:
        return [torch.full(shape, NEG_INF, dtype=dtype) for shape, dtype in specs]

    workspace = SimpleNamespace(get_simultaneous=fresh)
    monkeypatch.setattr(peer, "current_workspace_manager", lambda: workspace)
    monkeypatch.setattr(peer, "_decode_cu_count", lambda: 2)
    with bool_masks():
        yield peer.rocm_fp8_paged_mqa_logits_triton


CASES = [
    LogitsCase(lengths, next_n, heads, seed)
    for seed, (lengths, next_n, heads) in enumerate(
        [
            ((200, 1, 64), 1, 16),
            ((65, 190), 3, 64),
            ((128,), 2, 32),
            ((3, 63, 129), 2, 64),
            ((199, 70, 127), 3, 16),
            ((64, 64), 1, 64),
        ]
    )
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_logits_agree_with_vllms_triton_kernel(case: LogitsCase, peer_launch: Any) -> None:
    inputs = case.inputs()
    width = inputs["block_table"].shape[1] * PAGE
    want = peer_launch(*inputs.values(), width)
    assert_close_rows(paged(inputs, width), want)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_ragged_windows_agree_with_vllms_triton_kernel(case: LogitsCase, peer_launch: Any) -> None:
    """All requests' keys side by side, and each row's window of them."""
    inputs = case.inputs()
    lengths = torch.tensor(case.lengths, dtype=torch.int32)
    keys, scales = li.read_index_k(
        inputs["cache"], inputs["block_table"], lengths, page_size=PAGE, head_dim=HEAD_DIM
    )
    first = (lengths.cumsum(0) - lengths).repeat_interleave(case.next_n).to(torch.int32)
    seen = inputs["context_lens"].flatten()
    q = inputs["q"].flatten(0, 1)
    got = li.mqa_logits(q, keys, inputs["weights"], first, first + seen, k_scale=scales)
    width = inputs["block_table"].shape[1] * PAGE
    want = peer_launch(*inputs.values(), width)
    moved = torch.full_like(got, NEG_INF)
    for row, (start, count) in enumerate(zip(first.tolist(), seen.tolist(), strict=True)):
        moved[row, start : start + count] = want[row, :count]
    assert_close_rows(got, moved)
