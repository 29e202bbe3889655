"""vLLM's real `MTPSpeculator` drives a draft of ours: hooks, rows, slots and tokens of a round.

Real are the configuration, the speculator with all its steps, block tables, metadata builders,
forward context and Triton kernels (in the interpreter). Only the loading of weights is replaced.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm_engine as engine
from vllm.config import set_current_vllm_config
from vllm.v1.worker.gpu.spec_decode.mtp.speculator import MTPSpeculator
from vllm_draft import HIDDEN, Draft, Predictor, attend

import lightning_indexer as li
from lightning_indexer.adapters import vllm as li_vllm
from lightning_indexer.testing import reference

K = 3
VOCABULARY = engine.HF_CONFIG["vocab_size"]


@dataclass(frozen=True)
class Round:
    """Requests in vLLM's order: first those that verify drafts, then prefills."""

    lengths: tuple[int, ...]
    scheduled: tuple[int, ...]
    rejected: tuple[int, ...]
    seed: int = 0

    @classmethod
    def random(cls, seed: int) -> "Round":
        g = torch.Generator().manual_seed(seed)

        def draw(low: int, high: int) -> int:
            return int(torch.randint(low, high + 1, (1,), generator=g))

        decodes, prefills = draw(0, 3), draw(0, 1)
        scheduled = [draw(1, K + 1) for _ in range(decodes)]
        scheduled += [draw(K + 2, 12) for _ in range(max(prefills, decodes == 0))]
        lengths = [draw(q, 150) for q in scheduled]
        rejected = [draw(0, min(q - 1, K)) for q in scheduled]
        return cls(tuple(lengths), tuple(scheduled), tuple(rejected), seed)

    @property
    def last_rows(self) -> list[int]:
        ends = torch.tensor(self.scheduled).cumsum(0).tolist()
        return [end - 1 - gone for end, gone in zip(ends, self.rejected, strict=True)]


class Bench:
    """A speculator of vLLM with our draft, and the story of each request told by hand."""

    def __init__(self, folder: Path, draft_tokens: int = K) -> None:
        config = engine.engine_config(folder, draft_tokens)
        self.speculator = MTPSpeculator(config, engine.CPU)
        with set_current_vllm_config(config):
            engine.one_process_group(folder)
            engine.load_draft(self.speculator, lambda: self._draft(config.cache_config))
        self.draft_tokens = draft_tokens

    def _draft(self, cache_config: Any) -> Draft:
        self.draft = Draft(cache_config, seed=0).requires_grad_(False)
        self.buffers = li_vllm.share_topk_indices(self.draft)
        self._log_calls(self.draft.model)
        return self.draft

    @property
    def model(self) -> Predictor:
        return self.draft.model

    @staticmethod
    def _log_calls(model: Any) -> None:
        set_skip_topk, compact_topk_indices = model.set_skip_topk, model.compact_topk_indices

        def logged_skip(skip: bool) -> None:
            model.log.append(("skip", skip))
            set_skip_topk(skip)

        def logged_compact(rows: torch.Tensor) -> None:
            model.log.append(("compact", rows.tolist()))
            compact_topk_indices(rows)

        model.set_skip_topk, model.compact_topk_indices = logged_skip, logged_compact

    def propose(self, case: Round, draft_tokens: int | None = None, fused: bool = True) -> Any:
        """Draws the requests, fills the cache with what came before, and runs a round."""
        g = torch.Generator().manual_seed(case.seed)
        self.model.log.clear()
        self.tables = engine.block_tables(list(case.lengths), K, g)
        engine.attach(self.speculator, self.tables)
        assert self.speculator.supports_decode_metadata_update is (self.draft_tokens > 1)
        if not fused:
            self.speculator.supports_decode_metadata_update = False
        tokens = sum(case.scheduled)
        ids = torch.randint(VOCABULARY, (tokens,), generator=g)
        hidden = torch.randn(tokens, HIDDEN, generator=g)
        sampled = torch.randint(VOCABULARY, (engine.MAX_REQS,), generator=g)
        self.x = self._past_and_present(case, ids, hidden, sampled, g)
        batch = engine.input_batch(list(case.lengths), list(case.scheduled), ids)
        metadata, slots = engine.step_metadata(self.speculator.attn_groups, batch, self.tables)
        requests = len(case.lengths)
        return self.speculator.propose(
            batch,
            metadata,
            slots,
            hidden,
            None,
            torch.ones(requests, dtype=torch.int32),
            torch.tensor(case.rejected, dtype=torch.int32),
            sampled,
            torch.zeros(engine.MAX_REQS, dtype=torch.int32),
            torch.zeros(engine.MAX_REQS),
            torch.zeros(engine.MAX_REQS, dtype=torch.int64),
            num_speculative_tokens=draft_tokens,
        )

    def _past_and_present(
        self,
        case: Round,
        ids: torch.Tensor,
        hidden: torch.Tensor,
        sampled: torch.Tensor,
        g: torch.Generator,
    ) -> list[torch.Tensor]:
        """x of every position that a request keeps; those before this step go to the caches."""
        stories, row = [], 0
        for request, (length, count) in enumerate(zip(case.lengths, case.scheduled, strict=True)):
            past = length - count
            old = torch.randn(past, HIDDEN, generator=g)
            slots = torch.tensor([self._slot(request, p) for p in range(past)], dtype=torch.int64)
            if past:
                self.model.cache.write(self.model.indexer.key(old, torch.arange(past)), slots)
                self.model.values[slots] = self.model.value(old)
            kept = count - case.rejected[request]
            shifted = torch.cat([ids[row + 1 : row + kept], sampled[request : request + 1]])
            new = self.model.inputs(shifted, hidden[row : row + kept])
            stories.append(torch.cat([old, new]))
            row += count
        return stories

    def _slot(self, request: int, position: int) -> int:
        return engine.slot(self.tables, request, position)

    def cached_keys(self, request: int, length: int) -> torch.Tensor:
        """Keys [length, D] float64 from vLLM's cache, position by position."""
        pairs = []
        for position in range(length):
            page, token = divmod(self._slot(request, position), engine.PAGE)
            sizes = engine.PAGE, engine.HEAD_DIM
            pairs.append(reference.cached_key(self.model.k_cache.kv_cache, page, token, *sizes))
        return torch.stack([value * scale for value, scale in pairs])

    def selection(self, request: int) -> list[int]:
        """What the request's last kept token selects, from the cache's bytes, in float64."""
        x = self.x[request]
        length, last = x.shape[0], x[-1:]
        position = torch.tensor([length - 1])
        q = self.model.indexer.query(self.model.compress(last), position)
        weights = self.model.indexer.head_weights(last)
        window = torch.tensor([0]), torch.tensor([length])
        scores = reference.mqa_logits(q, self.cached_keys(request, length), weights, *window)
        return reference.topk_indices(scores, engine.TOPK)[0].tolist()

    def drafts(self, request: int) -> list[int]:
        """Greedy drafts of a request with its one selection, without pages, batch or buffer."""
        x, chosen = self.x[request], torch.tensor([self.selection(request)])
        values = self.model.value(x)
        hidden, tokens = attend(x[-1:], values, chosen), []
        for _ in range(self.draft_tokens):
            tokens.append(int(self.draft.compute_logits(hidden).argmax()))
            hidden = attend(self.model.inputs(torch.tensor(tokens[-1:]), hidden), values, chosen)
        return tokens


@pytest.fixture(scope="module", autouse=True)
def cpu_platform():
    with pytest.MonkeyPatch.context() as patch:
        engine.give_the_platform_a_cpu(patch)
        yield


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


SEEDS = range(8)


def test_vllm_finds_the_callables_and_shares(bench: Bench) -> None:
    assert bench.speculator.share_mtp_topk_indices
    assert bench.buffers == [bench.model.buffer]
    assert bench.speculator.draft_attn_layer_names == {engine.LAYER}


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "step by step"])
@pytest.mark.parametrize("seed", SEEDS)
def test_round_keeps_the_hook_order_the_rows_and_the_tokens(
    bench: Bench, seed: int, fused: bool
) -> None:
    case = Round.random(seed)
    requests, tokens = len(case.lengths), sum(case.scheduled)
    got = bench.propose(case, fused=fused)
    assert bench.model.log == [
        ("skip", False),
        ("forward", tokens, False),
        ("compact", case.last_rows),
        ("skip", True),
        *[("forward", requests, True)] * (K - 1),
        ("skip", False),
    ]
    buffer = bench.model.buffer
    assert buffer.state.kind is li.SelectionKind.UNTRACKED
    assert torch.equal(buffer.indices[:requests], bench.model.step0_rows[case.last_rows])
    for request in range(requests):
        length = bench.x[request].shape[0]
        keys = bench.model.indexer.key(bench.x[request], torch.arange(length)).double()
        near = keys.abs().amax(1, keepdim=True) / 8  # e4m3: 1/16 of a value, scales up to twice
        assert ((bench.cached_keys(request, length) - keys).abs() <= near).all()
        assert buffer.indices[request].tolist() == bench.selection(request)
        assert got[request].tolist() == bench.drafts(request)


def test_draft_steps_leave_the_buffer_and_the_index_keys_alone(bench: Bench) -> None:
    case = Round((70, 9, 140), (4, 2, 25), (1, 0, 0))
    before: list[tuple[torch.Tensor, torch.Tensor]] = []
    cache, buffer = bench.model.k_cache.kv_cache, bench.model.buffer.indices
    bench.model.register_forward_pre_hook(lambda *_: before.append((buffer.clone(), cache.clone())))
    bench.propose(case)
    (_, keys1), (_, keys2) = before[1:]
    assert torch.equal(before[1][0], before[2][0]) and torch.equal(before[2][0], buffer)
    assert torch.equal(keys1, keys2) and torch.equal(keys2, cache)


@pytest.mark.parametrize("draft_tokens", [0, 1, 2])
def test_shorter_round_compacts_and_stops(bench: Bench, draft_tokens: int) -> None:
    """vLLM compacts by the configured K, and may then draft fewer."""
    case = Round((70, 9), (4, 2), (1, 0))
    got = bench.propose(case, draft_tokens)
    names = [entry[0] for entry in bench.model.log]
    steps = ["skip", "forward", "skip"] if draft_tokens == 2 else []
    assert names == ["skip", "forward", "compact", *steps]
    assert not bench.model.indexer.skip_topk
    if draft_tokens == 0:
        assert (got == -1).all()
    else:
        for request in range(2):
            assert got[request, :draft_tokens].tolist() == bench.drafts(request)[:draft_tokens]


def test_single_draft_token_neither_compacts_nor_skips(tmp_path: Path) -> None:
    bench = Bench(tmp_path, draft_tokens=1)
    got = bench.propose(Round((70, 9), (2, 1), (1, 0)))
    assert [entry[0] for entry in bench.model.log] == ["skip", "forward"]
    assert [row.tolist() for row in got] == [bench.drafts(0), bench.drafts(1)]


def test_round_after_one_that_died_selects_anew(bench: Bench) -> None:
    """vLLM leaves the flag on when a draft step raises, and clears it in the next round."""
    forward = bench.model.forward

    def fails_in_draft_steps(*args: Any) -> torch.Tensor:
        if bench.model.indexer.skip_topk:
            raise RuntimeError("out of pages")
        return forward(*args)

    bench.model.forward = fails_in_draft_steps
    with pytest.raises(RuntimeError, match="out of pages"):
        bench.propose(Round((70, 9), (4, 2), (1, 0)))
    assert bench.model.indexer.skip_topk
    bench.model.forward = forward
    case = Round((30, 100), (3, 4), (0, 2), seed=1)
    got = bench.propose(case)
    assert bench.model.log[:2] == [("skip", False), ("forward", 7, False)]
    assert [row.tolist() for row in got] == [bench.drafts(0), bench.drafts(1)]


def test_share_topk_indices_says_what_a_draft_lacks(bench: Bench) -> None:
    with pytest.raises(TypeError, match=r"draft\.model must be a torch\.nn\.Module, got NoneType"):
        li_vllm.share_topk_indices(torch.nn.Linear(1, 1))
    empty = torch.nn.Module()
    empty.model = torch.nn.Linear(1, 1)
    with pytest.raises(ValueError, match="must hold a LightningIndexer, got Linear"):
        li_vllm.share_topk_indices(empty)
    with pytest.raises(ValueError, match="must not have set_skip_topk"):
        li_vllm.share_topk_indices(bench.draft)
