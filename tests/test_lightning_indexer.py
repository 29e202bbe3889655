"""`LightningIndexer` against the formulas in float64: projections, RoPE, scores, selection."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from counting import AGREEMENT, counts_examples, tallies
from lightning_indexer.indexer.block_table import BlockTable
from lightning_indexer.indexer.buffer import TopkIndicesBuffer
from lightning_indexer.indexer.config import IndexerConfig
from lightning_indexer.indexer.index_k_cache import IndexKCache
from lightning_indexer.indexer.lightning_indexer import LightningIndexer
from lightning_indexer.speculator.batch import RequestRows, StepBatch, target_batch
from lightning_indexer.speculator.recorded import RecordedRunner
from lightning_indexer.testing import reference

CONFIG = IndexerConfig(
    hidden_size=12,
    q_lora_rank=10,
    index_n_heads=4,
    index_head_dim=16,
    index_topk=5,
    qk_rope_head_dim=8,
    rope_style="half_split",
    max_position_embeddings=32,
)
PAGE, LENGTH, ROWS = 4, 24, 16


def _indexer(config=CONFIG, *, width=CONFIG.index_topk, dtype=torch.float32, seed=0, **options):
    torch.manual_seed(seed)
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        indexer = LightningIndexer(config, TopkIndicesBuffer(ROWS, width), **options)
    finally:
        torch.set_default_dtype(default)
    nn.init.normal_(indexer.k_norm.weight)
    nn.init.normal_(indexer.k_norm.bias)
    return indexer.requires_grad_(False)


def _cache(dtype=torch.float32) -> IndexKCache:
    return IndexKCache(18, CONFIG.index_head_dim, page_size=PAGE, dtype=dtype)


def _table(requests: int = 3) -> BlockTable:
    table = BlockTable(requests, LENGTH, num_pages=18, page_size=PAGE)
    for request in reversed(range(requests)):
        table.allocate(request, LENGTH)
    return table


def _inputs(batch: StepBatch, dtype=torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states and compressed queries that belong to a row's request and position."""
    hidden, q_resid = [], []
    for request, position in zip(
        batch.block_table[batch.row_to_request.long(), 0].tolist(),
        batch.positions.tolist(),
        strict=True,
    ):
        generator = torch.Generator().manual_seed(1000 * request + position)
        hidden.append(torch.randn(CONFIG.hidden_size, generator=generator, dtype=torch.float64))
        q_resid.append(torch.randn(CONFIG.q_lora_rank, generator=generator, dtype=torch.float64))
    if not hidden:
        return torch.zeros(0, CONFIG.hidden_size, dtype=dtype), torch.zeros(
            0, CONFIG.q_lora_rank, dtype=dtype
        )
    return torch.stack(hidden).to(dtype), torch.stack(q_resid).to(dtype)


def _run(indexer, cache, batch, hidden=None, q_resid=None, **options) -> torch.Tensor:
    if hidden is None:
        hidden, q_resid = _inputs(batch, indexer.wk.weight.dtype)
    return indexer(
        hidden,
        q_resid,
        batch.positions,
        cache=cache,
        slot_mapping=batch.slot_mapping,
        block_table=batch.block_table,
        row_to_request=batch.row_to_request,
        context_lens=batch.context_lens(),
        max_context_len=batch.max_context_len,
        **options,
    )


def _fill(indexer, cache, batch) -> None:
    """Caches the keys of the rows and selects nothing: selecting is slow in the interpreter."""
    hidden, _ = _inputs(batch, indexer.wk.weight.dtype)
    cache.write(indexer.key(hidden, batch.positions).to(torch.float32), batch.slot_mapping)


def _batch(table: BlockTable, *rows: tuple[int, int, int]) -> StepBatch:
    """Rows (request, start, count)."""
    return target_batch(
        [RequestRows(request, start, [0] * count) for request, start, count in rows],
        table.table,
        PAGE,
    )


def _rotate(x: torch.Tensor, position: int, config: IndexerConfig) -> torch.Tensor:
    """RoPE of one head [D], pair by pair."""
    rotary, out = config.qk_rope_head_dim, x.clone()
    for i in range(rotary // 2):
        a, b = (i, i + rotary // 2) if config.rope_style == "half_split" else (2 * i, 2 * i + 1)
        angle = torch.tensor(position * config.rope_theta ** (-2 * i / rotary), dtype=torch.float64)
        out[a] = x[a] * angle.cos() - x[b] * angle.sin()
        out[b] = x[b] * angle.cos() + x[a] * angle.sin()
    return out


def _oracle_key(indexer, hidden: torch.Tensor, position: int) -> torch.Tensor:
    x = indexer.wk.weight.double() @ hidden
    x = (x - x.mean()) / (x.var(unbiased=False) + indexer.config.k_norm_eps).sqrt()
    x = x * indexer.k_norm.weight.double() + indexer.k_norm.bias.double()
    return _rotate(x, position, indexer.config)


def _oracle_scores(indexer, hidden, q_resid, position, keys) -> tuple[torch.Tensor, float]:
    """Scores [L] of one row in float64, and how far fp32 operands and sums may be off."""
    config = indexer.config
    heads, dim = config.index_n_heads, config.index_head_dim
    q = (indexer.wq_b.weight.double() @ q_resid).reshape(heads, dim)
    q = torch.stack([_rotate(head, position, config) for head in q])
    w = (indexer.weights_proj.weight.double() @ hidden) * heads**-0.5 * dim**-0.5
    scores = (w[:, None] * torch.relu(q @ keys.T)).sum(0)
    magnitude = (w.abs()[:, None] * (q.abs() @ keys.abs().T)).sum(0).max()
    return scores, float((heads + dim + 8) * 2.0**-24 * magnitude)


def _assert_selects(selected: list[int], scores: torch.Tensor, k: int, bound: float) -> None:
    """The k best, up to what scores off by `bound` can confuse."""
    count = min(k, scores.numel())
    chosen = selected[:count]
    assert chosen == sorted(set(chosen))
    assert set(selected[count:]) <= {-1}
    threshold = float(scores.sort(descending=True).values[count - 1])
    left_out = [s for s in range(scores.numel()) if s not in chosen]
    assert all(0 <= s < scores.numel() and scores[s] >= threshold - 2 * bound for s in chosen)
    assert all(scores[s] <= threshold + 2 * bound for s in left_out)


@dataclass(frozen=True)
class Case:
    rope_style: str
    lengths: tuple[int, ...]
    seed: int


cases = st.builds(
    Case,
    rope_style=st.sampled_from(["half_split", "interleaved"]),
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=2).map(tuple),
    seed=st.integers(0, 2**31 - 1),
)


@pytest.mark.once
@given(cases)
@counts_examples("LightningIndexer")
@tallies(AGREEMENT, "LightningIndexer")
def test_selection_equals_the_float64_chain(case: Case):
    config = replace(CONFIG, rope_style=case.rope_style, index_topk=3)
    indexer = _indexer(config, dtype=torch.float64, seed=case.seed)
    cache, table = _cache(), _table()
    prompts = _batch(table, *[(r, 0, n) for r, n in enumerate(case.lengths)])
    hidden, q_resid = _inputs(prompts, torch.float64)
    indexer.buffer = TopkIndicesBuffer(max(ROWS, len(hidden)), config.index_topk)
    rows = _run(indexer, cache, prompts, hidden, q_resid)
    assert rows.data_ptr() == indexer.buffer.indices.data_ptr()
    for t, (request, position) in enumerate(
        zip(prompts.row_to_request.tolist(), prompts.positions.tolist(), strict=True)
    ):
        start = int(prompts.query_start_loc[request])
        keys = torch.stack(
            [_oracle_key(indexer, hidden[start + s], s) for s in range(position + 1)]
        )
        scores, bound = _oracle_scores(indexer, hidden[t], q_resid[t], position, keys)
        _assert_selects(rows[t].tolist(), scores, config.index_topk, bound)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float32])
def test_selection_is_exact_on_what_the_cache_holds(dtype):
    indexer, cache, table = _indexer(), _cache(dtype), _table()
    _fill(indexer, cache, _batch(table, (0, 0, 7), (2, 0, 3)))
    batch = _batch(table, (0, 7, 2), (2, 3, 2))
    hidden, q_resid = _inputs(batch)
    rows = _run(indexer, cache, batch, hidden, q_resid)
    q, w = indexer.query(q_resid, batch.positions), indexer.head_weights(hidden)
    scores = reference.paged_mqa_logits(
        q.unsqueeze(1), cache.data, w, batch.context_lens(), batch.block_table,
        max_context_len=LENGTH, row_to_request=batch.row_to_request, page_size=PAGE,
    )  # fmt: skip
    for t, length in enumerate(batch.context_lens().tolist()):
        magnitude = float(w[t].abs() @ q[t].abs().sum(1)) * 8  # keys are below 8
        bound = (CONFIG.index_n_heads + CONFIG.index_head_dim + 8) * 2.0**-24 * magnitude
        _assert_selects(rows[t].tolist(), scores[t, :length], CONFIG.index_topk, bound)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rope_styles_select_differently(dtype):
    selected = []
    for style in ("half_split", "interleaved"):
        indexer = _indexer(replace(CONFIG, rope_style=style), dtype=dtype)
        cache, table = _cache(), _table()
        _fill(indexer, cache, _batch(table, (0, 0, 14)))
        selected.append(_run(indexer, cache, _batch(table, (0, 14, 2))).clone())
    assert not torch.equal(*selected)


def test_head_weights_carry_both_scales():
    indexer = _indexer(dtype=torch.float64)
    hidden = torch.randn(3, CONFIG.hidden_size, dtype=torch.float64)
    heads, dim = CONFIG.index_n_heads, CONFIG.index_head_dim
    expected = hidden @ indexer.weights_proj.weight.T / (heads * dim) ** 0.5
    assert torch.allclose(indexer.head_weights(hidden), expected, rtol=1e-14, atol=1e-14)


class _RowLinear(nn.Linear):
    """Computes every row by itself: nn.Linear's bits may depend on how many there are."""

    def forward(self, x):
        return torch.cat([F.linear(row.unsqueeze(0), self.weight) for row in x])


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float32])
def test_bits_of_a_row_do_not_depend_on_the_batch(dtype):
    indexer = _indexer(linear=_RowLinear)
    whole, table = _cache(dtype), _table()
    rows = [(1, 0, 2), (0, 0, 1), (2, 7, 3)]
    alone = _cache(dtype)
    for cache in (whole, alone):
        _fill(indexer, cache, _batch(table, (2, 0, 7)))
    batch = _batch(table, *rows)
    together = _run(indexer, whole, batch).clone()
    for r, (request, start, count) in enumerate(rows):
        first = int(batch.query_start_loc[r])
        for i in range(count):
            row = _run(indexer, alone, _batch(table, (request, start + i, 1)))
            assert torch.equal(row[0], together[first + i])
    assert torch.equal(alone.data, whole.data)


class _Count(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_skipping_does_no_work_and_changes_no_byte():
    indexer, cache, table = _indexer(), _cache(torch.float8_e4m3fn), _table()
    computed = _run(indexer, cache, _batch(table, (0, 0, 3), (1, 0, 1))).clone()
    keys, writes = cache.data.clone(), indexer.buffer.write_count
    batch = _batch(table, (0, 3, 1), (1, 1, 1))
    hidden, q_resid = _inputs(batch)
    arguments = {
        "cache": cache,
        "slot_mapping": batch.slot_mapping,
        "block_table": batch.block_table,
        "row_to_request": batch.row_to_request,
        "context_lens": batch.context_lens(),
        "max_context_len": LENGTH,
    }
    indexer.set_skip_topk(True)
    with _Count() as counted:
        rows = indexer(hidden, q_resid, batch.positions, **arguments)
    assert counted.ops == ["slice"]
    assert rows.data_ptr() == indexer.buffer.indices.data_ptr()
    assert torch.equal(rows, computed[:2])
    assert torch.equal(cache.data, keys)
    assert indexer.buffer.write_count == writes


def test_rows_reused_after_compaction_are_those_of_the_last_tokens():
    indexer, cache, table = _indexer(), _cache(), _table()
    step_0 = _batch(table, (0, 0, 3), (1, 0, 2))
    computed = _run(indexer, cache, step_0).clone()
    indexer.compact_topk_indices(torch.tensor([2, 4]))
    indexer.set_skip_topk(True)
    rows = _run(indexer, cache, _batch(table, (0, 3, 1), (1, 2, 1)))
    assert torch.equal(rows, computed[[2, 4]])
    indexer.set_skip_topk(False)
    again = _run(indexer, cache, step_0)
    assert torch.equal(again, computed)


def test_rows_past_the_batch_are_left_alone():
    # vllm-project/vllm#32175: decode lengths [2,1], padded to 4 rows, clobbered a prefill row
    indexer, table = _indexer(width=CONFIG.index_topk + 2), _table()
    indexer.buffer.indices.fill_(77)
    rows = _run(indexer, _cache(), _batch(table, (0, 4, 2), (1, 0, 1)))
    assert rows.shape == (3, CONFIG.index_topk + 2)
    assert (indexer.buffer.indices[3:] == 77).all()
    assert (indexer.buffer.indices[:3, CONFIG.index_topk :] == 77).all()
    assert (indexer.buffer.indices[:3, : CONFIG.index_topk] != 77).all()


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("owner", [0, -1])
def test_dummy_rows_select_nothing_and_write_nothing(owner, checked, monkeypatch):
    # sgl-project/sglang#28785: warm-up with lengths below k must not fail
    if checked:
        monkeypatch.setenv("LIGHTNING_INDEXER_CHECK", "1")
    indexer, cache, table = _indexer(), _cache(torch.float8_e4m3fn), _table()
    _fill(indexer, cache, _batch(table, (0, 0, 6)))
    before = cache.data.clone()
    batch = _batch(table, (0, 0, 3))
    dummy = replace(
        batch,
        slot_mapping=torch.full_like(batch.slot_mapping, -1),
        seq_lens=torch.zeros_like(batch.seq_lens),
        row_to_request=torch.full_like(batch.row_to_request, owner),
        block_table=torch.full_like(batch.block_table, -1),
    )
    rows = _run(indexer, cache, dummy, *_inputs(batch))
    assert (rows == -1).all()
    assert torch.equal(cache.data, before)


def test_no_rows_is_no_work():
    indexer, cache = _indexer(), _cache()
    assert _run(indexer, cache, _batch(_table())).shape == (0, CONFIG.index_topk)
    assert not cache.data.any()


def test_bitwise_equal_over_twenty_runs():
    indexer, table = _indexer(), _table()
    cache = _cache(torch.float8_e4m3fn)
    _fill(indexer, cache, _batch(table, (0, 0, 12)))
    batch = _batch(table, (0, 12, 1))
    first = _run(indexer, cache, batch).clone()
    for _ in range(20):
        assert torch.equal(_run(indexer, cache, batch), first)


def test_tables_of_the_caller_replace_plain_rope():
    table = _table()
    plain, cache = _indexer(), _cache()
    _fill(plain, cache, _batch(table, (0, 0, 10)))
    batch = _batch(table, (0, 10, 2))
    expected = _run(plain, cache, batch).clone()
    scaled = _indexer(replace(CONFIG, external_rope=True))
    with pytest.raises(ValueError, match="rope must be given"):
        _run(scaled, cache, batch)
    given_tables = plain.rope_tables(batch.positions)
    assert torch.equal(_run(scaled, cache, batch, rope=given_tables), expected)


def test_too_narrow_or_too_short_a_buffer_is_refused():
    with pytest.raises(TypeError, match="buffer must be a TopkIndicesBuffer, got NoneType"):
        LightningIndexer(_indexer().config, None)
    with pytest.raises(ValueError, match="buffer must be at least index_topk=5 wide, got 4"):
        _indexer(width=4)
    indexer, cache = _indexer(), _cache()
    with pytest.raises(ValueError, match="num_rows must be at most 16, got 17"):
        _run(indexer, cache, _batch(_table(), (0, 0, 9), (1, 0, 8)))
    assert not cache.data.any()


def test_forward_is_captured_and_replayed_on_new_inputs():
    # it reads no device value back, and a flag in force while capturing is baked in
    indexer, cache, eager_cache, table = _indexer(), _cache(), _cache(), _table()
    for c in (cache, eager_cache):
        _fill(indexer, c, _batch(table, (0, 0, 7), (1, 0, 7)))
    batch = _batch(table, (0, 7, 2))
    hidden, q_resid = _inputs(batch)
    runner = RecordedRunner()
    runner.capture(
        "step", lambda: _run(indexer, cache, batch, hidden, q_resid), state=(), num_rows=2
    )
    other = _batch(table, (1, 7, 2))
    for name in ("positions", "slot_mapping", "block_table", "seq_lens"):
        getattr(batch, name).copy_(getattr(other, name))
    for mine, now in zip((hidden, q_resid), _inputs(other), strict=True):
        mine.copy_(now)
    indexer.set_skip_topk(True)
    runner.run("step", pytest.fail, state=(), num_rows=2)
    replayed = indexer.buffer.rows(2).clone()
    indexer.set_skip_topk(False)
    assert torch.equal(replayed, _run(indexer, eager_cache, other))


def test_checkpoint_names_are_those_of_the_models():
    names = {"wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias", "weights_proj.weight"}
    assert set(_indexer().state_dict()) == names
