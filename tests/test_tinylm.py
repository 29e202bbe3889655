"""The demo model's forward: row independence, paged against whole-window, skipping, weights."""

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from counting import AGREEMENT, BATCHES, counts_examples, tallies
from lightning_indexer.indexer.block_table import BlockTable
from lightning_indexer.speculator.batch import RequestRows, StepBatch, target_batch
from lightning_indexer.tinylm.checkpoint import load
from lightning_indexer.tinylm.config import MINIATURE
from lightning_indexer.tinylm.linear import BLOCK_ROWS, RowBlockLinear, in_row_blocks
from lightning_indexer.tinylm.model import TinyLM, random_model
from lightning_indexer.tinylm.runtime import TinyDraft, TinyTarget, build
from lightning_indexer.tinylm.window import run_layer

PAGE = 8

pytestmark = pytest.mark.once


@dataclass(frozen=True)
class Case:
    seed: int
    lengths: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    @property
    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed)

    def tokens(self) -> list[list[int]]:
        g = self.generator
        return [torch.randint(0, 128, (n,), generator=g).tolist() for n in self.lengths]


CASES = st.builds(
    Case,
    seed=st.integers(0, 2**31),
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=3).map(tuple),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)


class Run:
    """Runs the rows of some sequences in any chunks and order; keeps every row's output."""

    def __init__(
        self,
        case: Case,
        *,
        lm: TinyLM | None = None,
        index_k_dtype: torch.dtype = torch.float8_e4m3fn,
    ) -> None:
        lm = random_model(case.seed) if lm is None else lm
        self.tokens = case.tokens()
        self.target, self.draft = build(
            lm,
            num_pages=32,
            page_size=PAGE,
            max_num_tokens=128,
            dtype=case.dtype,
            index_k_dtype=index_k_dtype,
        )
        self.table = BlockTable(
            len(self.tokens), lm.config.max_model_len, num_pages=32, page_size=PAGE
        )
        for request, ids in enumerate(self.tokens):
            self.table.allocate(request, len(ids))
        shape = (len(self.tokens), max(case.lengths), lm.config.hidden_size)
        self.inputs = torch.randn(shape, generator=case.generator, dtype=case.dtype)
        self.rows: dict[tuple[str, int, int], torch.Tensor] = {}

    def batch(self, chunks: list[tuple[int, int, int]]) -> StepBatch:
        """The batch of chunks (request, first position, count), draft input included."""
        rows = [RequestRows(r, s, self.tokens[r][s : s + n]) for r, s, n in chunks]
        batch = target_batch(rows, self.table.table, PAGE)
        owner = torch.tensor([r for r, _, n in chunks for _ in range(n)])
        return replace(batch, hidden=self.inputs[owner, batch.positions])

    def step(self, chunks: list[tuple[int, int, int]]) -> None:
        batch = self.batch(chunks)
        places = [(r, s + i) for r, s, n in chunks for i in range(n)]
        for name, model in (("target", self.target), ("draft", self.draft)):
            hidden = model(batch)
            logits = model.compute_logits(hidden)
            for row, (request, position) in enumerate(places):
                self.rows[name, request, position] = torch.cat([hidden[row], logits[row]])

    def one_by_one(self) -> "Run":
        for request, ids in enumerate(self.tokens):
            for position in range(len(ids)):
                self.step([(request, position, 1)])
        return self

    def all_at_once(self) -> "Run":
        self.step([(request, 0, len(ids)) for request, ids in enumerate(self.tokens)])
        return self

    def in_random_chunks(self, generator: torch.Generator) -> "Run":
        done = [0] * len(self.tokens)
        while any(d < len(ids) for d, ids in zip(done, self.tokens, strict=True)):
            chunks = []
            for request in torch.randperm(len(done), generator=generator).tolist():
                left = len(self.tokens[request]) - done[request]
                count = min(left, int(torch.randint(0, 12, (), generator=generator)))
                if count:
                    chunks.append((request, done[request], count))
                    done[request] += count
            if chunks:
                self.step(chunks)
        return self


@settings(max_examples=15)  # an example runs a whole model many times
@given(CASES)
@counts_examples("tinylm")
@tallies(BATCHES, "tinylm")
def test_rows_have_the_same_bits_whatever_else_is_in_the_batch(case: Case) -> None:
    expected = Run(case).all_at_once().rows
    for other in (Run(case).one_by_one(), Run(case).in_random_chunks(case.generator)):
        assert other.rows.keys() == expected.keys()
        for key, row in other.rows.items():
            assert torch.equal(row, expected[key]), key


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_have_the_same_bits_with_two_threads(dtype: torch.dtype) -> None:
    torch.set_num_threads(2)
    try:
        case = Case(2, (9, 3), dtype)
        expected = Run(case).all_at_once().rows
        for key, row in Run(case).one_by_one().rows.items():
            assert torch.equal(row, expected[key]), key
    finally:
        torch.set_num_threads(1)


def test_rows_of_the_shipped_model_have_the_same_bits_in_any_chunks() -> None:
    lm, _ = load()
    case = Case(4, (45, 21))
    expected = Run(case, lm=lm).all_at_once().rows
    for seed in range(5):
        chunks = torch.Generator().manual_seed(seed)
        for key, row in Run(case, lm=lm).in_random_chunks(chunks).rows.items():
            assert torch.equal(row, expected[key]), key


#: Latents and attention are fp32 whatever the model's dtype: a layer's sums of some hundred terms
#: of size about 1, each rounded by 2^-24, and four layers of them.
LATENTS_FP32 = 4 * 300 * 2.0**-24


@settings(max_examples=15)  # an example runs a whole model many times
@given(CASES)
@counts_examples("tinylm")
@tallies(AGREEMENT, "tinylm")
def test_paged_forward_equals_the_training_forward(case: Case) -> None:
    case = replace(case, dtype=torch.float64, lengths=case.lengths[:1])
    run = Run(case, index_k_dtype=torch.float32).all_at_once()
    model = random_model(case.seed).to(torch.float64)
    ids, count = torch.tensor(run.tokens), case.lengths[0]
    positions = torch.arange(count)
    x, mask = model.model.embed_tokens(ids), None
    for layer in model.hidden_layers:
        shared = mask if layer.self_attn.indexer is None else None
        out = run_layer(layer, x, positions, sparse=True, learn_index=False, mask=shared)
        x, mask = out.rows, out.keys.mask
    paged = torch.stack([run.rows["target", 0, p] for p in range(count)])
    expected = torch.cat([model.model.norm(x), model.lm_head(model.model.norm(x))], dim=-1)
    torch.testing.assert_close(paged, expected[0], atol=LATENTS_FP32, rtol=0)

    mtp = model.mtp_layer
    combined = mtp.combine(model.model.embed_tokens(ids), run.inputs[:1, :count])
    out = run_layer(mtp, combined, positions, sparse=True, learn_index=False)
    paged = torch.stack([run.rows["draft", 0, p] for p in range(count)])
    hidden = mtp.shared_head.norm(out.rows)
    expected = torch.cat([hidden, model.lm_head(hidden)], dim=-1)
    torch.testing.assert_close(paged, expected[0], atol=LATENTS_FP32, rtol=0)


@settings(max_examples=15)  # an example runs a whole model many times
@given(CASES)
@counts_examples("tinylm")
@tallies(BATCHES, "tinylm")
def test_padding_rows_change_neither_caches_nor_live_rows(case: Case) -> None:
    run = Run(case).all_at_once()
    batch = run.batch([(r, len(ids) - 1, 1) for r, ids in enumerate(run.tokens)])
    padded = _pad(batch, 5)
    for model, caches in ((run.target, run.target.caches), (run.draft, [run.draft.cache])):
        expected = model(batch)
        before = [cache.latent.rows.clone() for cache in caches]
        hidden = model(padded)
        assert torch.equal(hidden[: batch.num_tokens], expected)
        assert hidden.isfinite().all()
        for cache, rows in zip(caches, before, strict=True):
            assert torch.equal(cache.latent.rows, rows)


def test_a_row_that_selects_nothing_attends_to_nothing() -> None:
    case = Case(3, (9,))
    run = Run(case).all_at_once()
    run.draft.set_skip_topk(True)
    batch = run.batch([(0, 8, 1)])
    run.draft.topk_buffers[0].indices.fill_(-1)
    empty = run.draft(batch)
    for cache in (run.draft.cache.latent.rows,):
        cache[:8].fill_(float("nan"))  # of no consequence: nothing is selected
    assert torch.equal(run.draft(batch), empty)


def test_skipping_draft_reads_the_buffer_and_still_writes_latents() -> None:
    case = Case(5, (20, 7))
    run = Run(case).all_at_once()
    draft = run.draft
    rows = draft.topk_buffers[0].indices
    batch = run.batch([(0, 19, 1), (1, 6, 1)])
    draft.compact_topk_indices(torch.tensor([19, 26]))
    kept = rows.clone()
    same = draft(batch)
    assert torch.equal(rows[:2], kept[:2])  # what the last rows select, selected again

    draft.set_skip_topk(True)
    index_k = draft.cache.index_k.data.clone()
    draft.cache.latent.rows.zero_()
    draft(run.batch([(0, 0, 20), (1, 0, 7)]))  # skipping writes every latent anew
    draft.topk_buffers[0].indices.copy_(kept)
    assert torch.equal(draft(batch), same)
    assert torch.equal(rows, kept)
    assert torch.equal(draft.cache.index_k.data, index_k)

    rows[:2] = torch.tensor([0, 1, 2, -1], dtype=torch.int32)
    assert not torch.equal(draft(batch), same)


def test_target_and_draft_have_separate_buffers_of_fixed_address() -> None:
    run = Run(Case(1, (12,)))
    (target,), (draft,) = run.target.topk_buffers, run.draft.topk_buffers
    before = target.indices.data_ptr(), draft.indices.data_ptr()
    assert before[0] != before[1]
    run.all_at_once()
    assert (target.indices.data_ptr(), draft.indices.data_ptr()) == before


def test_shared_layer_reads_the_rows_of_the_layer_before() -> None:
    run = Run(Case(7, (20,)))
    roles = [layer.self_attn.indexer is not None for layer in run.target.layers]
    assert roles == [True, False, True]
    seen = []
    shared = run.target.layers[1].self_attn
    shared.register_forward_hook(lambda *_: seen.append(shared.buffer.rows(20).clone()))
    first = run.target.layers[0].self_attn
    first.register_forward_hook(lambda *_: seen.append(first.buffer.rows(20).clone()))
    run.all_at_once()
    assert len(seen) == 2
    assert torch.equal(seen[0], seen[1])


@pytest.mark.parametrize("rows", [0, 1, BLOCK_ROWS, BLOCK_ROWS + 1, 3 * BLOCK_ROWS])
def test_row_blocks_cover_every_row_once(rows: int) -> None:
    x = torch.arange(rows * 2.0).reshape(rows, 2)
    sizes = []

    def double(block: torch.Tensor) -> torch.Tensor:
        sizes.append(block.shape[0])
        return 2 * block

    assert torch.equal(in_row_blocks(double, x), 2 * x)
    assert set(sizes) == {BLOCK_ROWS}


def test_row_block_linear_is_a_plain_linear_in_training() -> None:
    layer = RowBlockLinear(6, 4, bias=False)
    x = torch.randn(2, 11, 6)
    assert torch.equal(layer(x), torch.nn.functional.linear(x, layer.weight))


def test_build_copies_the_weights() -> None:
    model = random_model(0)
    target, draft = build(model, num_pages=2, max_num_tokens=8, page_size=PAGE, append_columns=2)
    assert isinstance(target, TinyTarget)
    assert isinstance(draft, TinyDraft)
    model.lm_head.weight.data.zero_()
    assert target.lm_head.weight.abs().sum() > 0
    assert draft.topk_buffers[0].width == MINIATURE.index_topk + 2
    assert target.topk_buffers[0].width == MINIATURE.index_topk


def _pad(batch: StepBatch, rows: int) -> StepBatch:
    """`batch` with `rows` more rows that stand for nothing."""

    def more(tensor: torch.Tensor, value: int) -> torch.Tensor:
        return torch.cat([tensor, tensor.new_full((rows, *tensor.shape[1:]), value)])

    return replace(
        batch,
        input_ids=more(batch.input_ids, 0),
        positions=more(batch.positions, 0),
        hidden=more(batch.hidden, 0),
        slot_mapping=more(batch.slot_mapping, -1),
        row_to_request=more(batch.row_to_request, -1),
        num_tokens_padded=batch.num_tokens + rows,
    )
