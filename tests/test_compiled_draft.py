"""A draft under `torch.compile`: two graphs, one for each value of the flag, and no more."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from fake_cuda import GRAPH_RUNNERS, graph_runners
from lightning_indexer.indexer.buffer import TopkIndicesBuffer
from lightning_indexer.indexer.config import IndexerConfig
from lightning_indexer.indexer.index_k_cache import IndexKCache
from lightning_indexer.indexer.lightning_indexer import LightningIndexer
from lightning_indexer.kernels.slots import indices_to_slots
from lightning_indexer.speculator.batch import with_hidden
from lightning_indexer.speculator.mtp import MTPSpeculator
from toy import HIDDEN, VOCAB, num_slots, simple_round, toy_block_table, toy_config, toy_draft

pytestmark = pytest.mark.once
CONFIG = IndexerConfig(
    hidden_size=HIDDEN,
    q_lora_rank=HIDDEN,
    index_n_heads=2,
    index_head_dim=4,
    index_topk=2,
    qk_rope_head_dim=2,
    rope_style="half_split",
    max_position_embeddings=32,
)
#: Of 8 rows and 3 requests each, so that nothing but the flag asks for another graph.
ROUNDS = [[3, 1, 4], [1, 5, 2], [2, 2, 4], [4, 3, 1]]
TOGGLES = 20
BACKENDS = ["eager", "aot_eager", "inductor"]


class Draft(nn.Module):
    """An indexer, and a sum over the latents of what it selected; in float64."""

    def __init__(self, slots: int, max_rows: int) -> None:
        super().__init__()
        self.config = {"index_share_for_mtp_iteration": True}
        torch.manual_seed(0)
        self.indexer = LightningIndexer(CONFIG, TopkIndicesBuffer(max_rows, CONFIG.index_topk))
        self.cache = IndexKCache(
            slots // 4, CONFIG.index_head_dim, page_size=4, dtype=torch.float32
        )
        self.register_buffer("latents", torch.zeros(slots + 1, HIDDEN))
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.to(torch.float64).requires_grad_(False)

    @property
    def topk_buffers(self) -> list[TopkIndicesBuffer]:
        return [self.indexer.buffer]

    def set_skip_topk(self, skip: bool) -> None:
        self.indexer.set_skip_topk(skip)

    def compact_topk_indices(self, rows: torch.Tensor) -> None:
        self.indexer.compact_topk_indices(rows)

    def forward(self, batch):
        x = self.embed(batch.input_ids) + batch.hidden.to(torch.float64).sin()
        unused = self.latents.shape[0] - 1
        own = torch.where(batch.slot_mapping < 0, unused, batch.slot_mapping)
        self.latents.index_copy_(0, own, x)
        selection = self.indexer(
            x,
            x,
            batch.positions,
            cache=self.cache,
            slot_mapping=batch.slot_mapping,
            block_table=batch.block_table,
            row_to_request=batch.row_to_request,
            context_lens=batch.context_lens(),
            max_context_len=batch.max_context_len,
        )
        slots = indices_to_slots(selection, batch.block_table, batch.row_to_request, 4)
        seen = self.latents[slots.clamp_min(0)].masked_fill((slots < 0).unsqueeze(-1), 0.0)
        return (x + seen.sum(1)).tanh()

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.embed.weight.t()


class Counting(Draft):
    """What a draft must not do."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.forwards = 0

    def forward(self, batch):
        self.forwards += 1
        return super().forward(batch)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def _compiled(
    draft: Draft, backend: str = "eager", *, fullgraph: bool = True
) -> tuple[nn.Module, CompileCounterWithBackend]:
    counter = CompileCounterWithBackend(backend)
    return torch.compile(draft, backend=counter, fullgraph=fullgraph), counter


def _state(draft: Draft) -> tuple[torch.Tensor, ...]:
    return draft.indexer.buffer.indices.clone(), draft.cache.data.clone()


@torch.no_grad()
def _toggle(draft: Draft, compiled: nn.Module, counter: CompileCounterWithBackend) -> None:
    """Asserts that each forward takes the branch of the flag, and two are ever compiled."""
    config = toy_config(3)
    plain, table = toy_draft(config, Draft), toy_block_table(config)
    for toggle in range(TOGGLES):
        skip = toggle % 2 == 1
        batch = simple_round(table, ROUNDS[toggle % len(ROUNDS)])[0]
        batch = with_hidden(batch, torch.randn(batch.hidden.shape))
        before = _state(draft)
        for model in (plain, compiled):
            model.set_skip_topk(skip)
        got, expected = compiled(batch), plain(batch)
        torch.testing.assert_close(got, expected)
        for ours, theirs, old in zip(_state(draft), _state(plain), before, strict=True):
            torch.testing.assert_close(ours, theirs)
            assert torch.equal(ours, old) == skip  # keys and selection, or neither
        assert counter.frame_count == min(toggle + 1, 2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_toggling_runs_the_branch_of_the_flag_and_reuses_two_graphs(backend):
    draft = toy_draft(toy_config(3), Draft)
    _toggle(draft, *_compiled(draft, backend))
    assert not torch._dynamo.utils.counters["graph_break"]


def test_branch_frozen_for_want_of_guards_would_be_noticed():
    draft, counter = toy_draft(toy_config(3), Draft), CompileCounterWithBackend("eager")
    no_guards = {"guard_filter_fn": lambda guards: [False] * len(guards)}
    frozen = torch.compile(draft, backend=counter, fullgraph=True, options=no_guards)
    with pytest.raises(AssertionError):
        _toggle(draft, frozen, counter)
    assert counter.frame_count == 1


@torch.no_grad()
def test_layers_compiled_one_by_one_share_the_two_graphs():
    # all layers of one code have a limit of recompiles in common, beyond which none is compiled
    config = toy_config(3)
    counter = CompileCounterWithBackend("eager")
    drafts = [toy_draft(config, Draft) for _ in range(10)]
    layers = [torch.compile(d.indexer, backend=counter, fullgraph=True) for d in drafts]
    batch = simple_round(toy_block_table(config), ROUNDS[0])[0]
    x = batch.hidden.to(torch.float64).sin()
    for skip in (False, True, False, True):
        for draft, layer in zip(drafts, layers, strict=True):
            draft.set_skip_topk(skip)
            version = draft.indexer.buffer.write_count
            rows = layer(
                x,
                x,
                batch.positions,
                cache=draft.cache,
                slot_mapping=batch.slot_mapping,
                block_table=batch.block_table,
                row_to_request=batch.row_to_request,
                context_lens=batch.context_lens(),
                max_context_len=batch.max_context_len,
            )
            assert rows.data_ptr() == draft.indexer.buffer.indices.data_ptr()
            assert (draft.indexer.buffer.write_count == version) == skip
    assert counter.frame_count == 2


@torch.no_grad()
def test_counting_in_forward_would_be_noticed():
    config = toy_config(3)
    compiled, counter = _compiled(toy_draft(config, Counting), fullgraph=False)
    batch = simple_round(toy_block_table(config), ROUNDS[0])[0]
    for toggle in range(TOGGLES):
        compiled.set_skip_topk(toggle % 2 == 1)
        compiled(batch)
    assert counter.frame_count > 2


def _rounds(speculator, table):
    for lengths in ([3, 1, 4], [2], [1, 5, 1, 1], [4, 4], [1, 1]):  # requests come and go
        yield speculator.propose(*simple_round(table, lengths)).cpu()


def _speculator(draft, runner=None, **options):
    config = toy_config(4, prefill_sizes=(8,), decode_sizes=(4,), dtype=torch.float64)
    return MTPSpeculator(draft, config, runner=runner, **options), toy_block_table(config)


def _new_draft() -> Draft:
    config = toy_config(4)
    return Draft(num_slots(config), config.max_num_tokens)


@pytest.mark.parametrize("backend", BACKENDS)
def test_speculator_drafts_the_same_with_a_compiled_draft(backend):
    compiled, counter = _compiled(_new_draft(), backend)
    speculator, table = _speculator(compiled)
    assert speculator.share_mtp_topk_indices
    for _ in range(2):  # dynamo keeps no generation, no round and no number of requests
        for got, expected in zip(
            _rounds(speculator, table), _rounds(*_speculator(_new_draft())), strict=True
        ):
            assert torch.equal(got, expected)
        assert counter.frame_count == 2
    recomputing, _ = _speculator(compiled, draft_config={})
    fresh, _ = _speculator(_new_draft(), draft_config={})
    for got, expected in zip(_rounds(recomputing, table), _rounds(fresh, table), strict=True):
        assert torch.equal(got, expected)
    assert counter.frame_count <= 3  # 4 rows that select are new


@pytest.mark.parametrize("kind", GRAPH_RUNNERS)
def test_compiled_draft_is_captured_with_the_flag(kind, monkeypatch):
    with graph_runners(kind, monkeypatch) as runner_class:
        expected = list(_rounds(*_speculator(_new_draft())))
        on_gpu = kind == "gpu"  # elsewhere ops are recorded as they come, and nothing is compiled
        backend = "inductor" if on_gpu else "eager"
        compiled, _ = _compiled(_new_draft(), backend, fullgraph=on_gpu)
        speculator, table = _speculator(compiled, runner_class())
        speculator.capture()
        speculator.model = None  # replays run no Python
        for got, wanted in zip(_rounds(speculator, table), expected, strict=True):
            assert torch.equal(got, wanted)
