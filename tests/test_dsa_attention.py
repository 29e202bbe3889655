"""`DSAAttention` against unabsorbed attention in float64, and what holds across its batches."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from counting import AGREEMENT, BATCHES, counts_examples, tallies
from lightning_indexer.indexer.block_table import BlockTable
from lightning_indexer.indexer.buffer import TopkIndicesBuffer
from lightning_indexer.indexer.config import IndexerConfig
from lightning_indexer.indexer.dsa_attention import DSAAttention, DSACache
from lightning_indexer.indexer.dsa_config import DSAConfig
from lightning_indexer.kernels.backend import INTERPRET
from lightning_indexer.speculator.batch import RequestRows, StepBatch, target_batch
from lightning_indexer.tinylm.linear import RowBlockLinear, in_row_blocks

CONFIG = DSAConfig(
    num_attention_heads=3,
    kv_lora_rank=16,
    qk_nope_head_dim=6,
    v_head_dim=10,
    indexer=IndexerConfig(
        hidden_size=12,
        q_lora_rank=10,
        index_n_heads=4,
        index_head_dim=16,
        index_topk=5,
        qk_rope_head_dim=8,
        rope_style="half_split",
        max_position_embeddings=32,
    ),
)
PAGE, LENGTH, ROWS, PAGES = 4, 24, 64, 30


@dataclass(frozen=True)
class Case:
    """Requests of these lengths, each longer than index_topk; the layer's role and RoPE style."""

    seed: int
    lengths: tuple[int, ...]
    role: str = "full"
    style: str = "interleaved"

    def layer(self) -> DSAAttention:
        torch.manual_seed(self.seed)
        layer = DSAAttention(
            replace(CONFIG, rope_style=self.style),
            self.role,
            TopkIndicesBuffer(ROWS, CONFIG.indexer.index_topk),
            linear=RowBlockLinear,
            rowwise=in_row_blocks,
        )
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter, std=0.5)
        return layer.eval().requires_grad_(False)

    def cache(self) -> DSACache:
        kinds = {"dtype": torch.float32, "index_k_dtype": torch.float32}
        return DSACache.make(CONFIG, self.role, PAGES, page_size=PAGE, **kinds)

    def table(self) -> BlockTable:
        table = BlockTable(len(self.lengths), LENGTH, num_pages=PAGES, page_size=PAGE)
        for request in reversed(range(len(self.lengths))):
            table.allocate(request, LENGTH)
        return table

    def hidden(self, request: int) -> torch.Tensor:
        g = torch.Generator().manual_seed(1000 * self.seed + request)
        return torch.randn(self.lengths[request], 12, generator=g)


CASES = st.builds(
    Case,
    seed=st.integers(0, 2**16),
    lengths=st.lists(st.integers(6, 20), min_size=1, max_size=3).map(tuple),
    role=st.sampled_from(["full", "full", "shared"]),
    style=st.sampled_from(["interleaved", "half_split"]),
)


def run(layer: DSAAttention, cache: DSACache, case: Case, rows: list[RequestRows]) -> torch.Tensor:
    batch = target_batch(rows, case.table().table, PAGE)
    x = [case.hidden(r.request)[r.start : r.start + len(r.token_ids)] for r in rows]
    return call(layer, cache, batch, torch.cat(x))


def call(layer: DSAAttention, cache: DSACache, batch: StepBatch, x: torch.Tensor) -> torch.Tensor:
    return layer(
        x,
        batch.positions,
        cache=cache,
        slot_mapping=batch.slot_mapping,
        block_table=batch.block_table,
        row_to_request=batch.row_to_request,
        context_lens=batch.context_lens(),
        max_context_len=batch.max_context_len,
    )


def prompts(case: Case) -> list[RequestRows]:
    return [RequestRows(r, 0, [0] * n) for r, n in enumerate(case.lengths)]


def share(layer: DSAAttention, case: Case) -> None:
    """Rows that the layer before would have left: any positions a row sees, some missing."""
    g = torch.Generator().manual_seed(case.seed)
    for row, seen in enumerate(n for length in case.lengths for n in range(1, length + 1)):
        chosen = torch.randperm(seen, generator=g)[:4].sort().values
        layer.buffer.indices[row] = -1
        layer.buffer.indices[row, : len(chosen)] = chosen


def rotate(x: torch.Tensor, positions: torch.Tensor, style: str) -> torch.Tensor:
    """RoPE of the last dimension, as complex numbers in float64."""
    half = x.shape[-1] // 2
    freqs = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    turn = torch.polar(torch.ones(1, dtype=torch.float64), positions[:, None].double() * freqs)
    pairs = x.unflatten(-1, (half, 2)) if style == "interleaved" else x.unflatten(-1, (2, half)).mT
    pairs = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
    return pairs.flatten(-2) if style == "interleaved" else pairs.mT.flatten(-2)


def unabsorbed(layer: DSAAttention, x: torch.Tensor, selection: torch.Tensor) -> torch.Tensor:
    """One request in float64: keys and values of every head multiplied out, a mask of the rest."""
    w = {name: p.double() for name, p in layer.named_parameters() if "indexer" not in name}
    norm = lambda y, name: y * (y.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * w[name]  # noqa: E731
    x, length, style = x.double(), x.shape[0], layer.config.rope_style
    positions = torch.arange(length)
    q = norm(x @ w["q_a_proj.weight"].T, "q_a_layernorm.weight") @ w["q_b_proj.weight"].T
    q = q.view(length, 3, 14).transpose(0, 1)
    q = torch.cat([q[..., :6], rotate(q[..., 6:], positions, style)], -1)
    compressed = x @ w["kv_a_proj_with_mqa.weight"].T
    kv = norm(compressed[:, :16], "kv_a_layernorm.weight") @ w["kv_b_proj.weight"].T
    kv = kv.view(length, 3, 16).transpose(0, 1)
    shared = rotate(compressed[:, 16:], positions, style).expand(3, -1, -1)
    k, v = torch.cat([kv[..., :6], shared], -1), kv[..., 6:]
    seen = torch.zeros(length, length, dtype=torch.bool)
    for t, row in enumerate(selection.tolist()):
        seen[t, [p for p in row if p >= 0]] = True
    scores = (q @ k.mT / math.sqrt(14)).masked_fill(~seen, float("-inf"))
    mixed = scores.softmax(-1) @ v
    return mixed.transpose(0, 1).flatten(1) @ w["o_proj.weight"].T


@settings(max_examples=4 if INTERPRET else 40)  # a layer is many programs there
@given(CASES)
@counts_examples("DSAAttention")
@tallies(AGREEMENT, "DSAAttention")
def test_output_is_that_of_unabsorbed_attention_over_the_selected_keys(case: Case) -> None:
    layer = case.layer()
    share(layer, case)
    out = run(layer, case.cache(), case, prompts(case))
    first = 0
    for request, length in enumerate(case.lengths):
        rows = slice(first, first + length)
        selection = layer.buffer.indices[rows]
        assert (selection >= 0).sum(1).tolist() == [
            min(n, 5 if case.role == "full" else 4) for n in range(1, length + 1)
        ]
        expected = unabsorbed(layer, case.hidden(request), selection)
        # fp32 sums of at most 48 terms, five matrix products deep, scores as large as their norms
        bound = 1e-4 * expected.abs().max()
        assert (out[rows].double() - expected).abs().max() <= bound
        first += length


@settings(max_examples=1 if INTERPRET else 15)
@given(CASES)
@counts_examples("DSAAttention")
@tallies(BATCHES, "DSAAttention")
def test_rows_have_the_same_bits_in_prefill_chunks_and_decode(case: Case) -> None:
    case = replace(case, role="full")
    layer, cache = case.layer(), case.cache()
    whole = run(layer, cache, case, prompts(case))
    again, parts = case.cache(), [[] for _ in case.lengths]
    for start in range(max(case.lengths)):  # one row a request
        live = [RequestRows(r, start, [0]) for r, n in enumerate(case.lengths) if start < n]
        for row, one in zip(live, run(layer, again, case, live), strict=True):
            parts[row.request].append(one)
    assert torch.equal(whole, torch.cat([torch.stack(rows) for rows in parts]))
    assert torch.equal(cache.latent.rows, again.latent.rows)


def test_a_shared_layer_reads_the_rows_of_the_layer_before() -> None:
    case = Case(1, (12,))
    full, shared = case.layer(), replace(case, role="shared", seed=2).layer()
    run(full, case.cache(), case, prompts(case))
    shared.buffer = full.buffer
    cache = replace(case, role="shared").cache()
    kept = full.buffer.indices.clone()
    out = run(shared, cache, case, prompts(case))
    assert torch.equal(full.buffer.indices, kept)
    expected = unabsorbed(shared, case.hidden(0), kept[:12])
    assert (out.double() - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_rows_that_nobody_selected_are_never_read() -> None:
    case = Case(4, (16,))
    layer, cache = case.layer(), case.cache()
    run(layer, cache, case, prompts(case))
    last = [RequestRows(0, 15, [0])]
    expected = run(layer, cache, case, last)
    selected = layer.buffer.indices[0].tolist()
    slots = case.table().table[0].long()
    for position in {*range(15)} - {*selected}:
        cache.latent.rows[slots[position // PAGE] * PAGE + position % PAGE] = float("nan")
    assert torch.equal(run(layer, cache, case, last), expected)


def test_a_row_without_a_request_is_zero_and_writes_nothing() -> None:
    case = Case(5, (9,))
    layer, cache = case.layer(), case.cache()
    before = cache.latent.rows.clone()
    batch = target_batch([RequestRows(0, 8, [0])], case.table().table, PAGE)
    nobody = replace(
        batch,
        slot_mapping=torch.full_like(batch.slot_mapping, -1),
        row_to_request=torch.full_like(batch.row_to_request, -1),
    )
    out = call(layer, cache, nobody, case.hidden(0)[:1])
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(cache.latent.rows, before)


def test_fp8_latents_give_the_output_of_the_rows_that_were_stored() -> None:
    wide = replace(
        CONFIG,
        kv_lora_rank=512,
        indexer=replace(CONFIG.indexer, qk_rope_head_dim=64, index_head_dim=64),
    )
    torch.manual_seed(0)
    layer = DSAAttention(wide, "full", TopkIndicesBuffer(ROWS, 5)).eval().requires_grad_(False)
    layer.to(torch.bfloat16)
    case = Case(7, (18,))
    x = case.hidden(0).to(torch.bfloat16)
    batch = target_batch(prompts(case), case.table().table, PAGE)
    caches = [
        DSACache.make(wide, "full", PAGES, page_size=PAGE, dtype=dtype)
        for dtype in (torch.float8_e4m3fn, torch.bfloat16)
    ]
    fp8, exact = (call(layer, cache, batch, x).float() for cache in caches)
    scale = exact.abs().max()
    assert (fp8 != exact).any()
    assert (fp8 - exact).abs().max() < 0.1 * scale  # e4m3 is off by 2^-4 at most
    stored = caches[0].latent.rows
    values = stored[:, :512].view(torch.float8_e4m3fn).float().view(-1, 4, 128)
    scales = stored[:, 512:528].contiguous().view(torch.float32)
    rope = stored[:, 528:].contiguous().view(torch.bfloat16)
    caches[1].latent.rows.copy_(torch.cat([(values * scales[..., None]).flatten(1), rope], dim=1))
    caches[1].latent.write = lambda latent, slots: None
    again = call(layer, caches[1], batch, x).float()  # attends to what fp8 has kept
    assert (again - fp8).abs().max() < 0.02 * scale  # bf16 rounds those once more


def test_errors_name_what_is_wrong() -> None:
    buffer = TopkIndicesBuffer(ROWS, 5)
    with pytest.raises(ValueError, match="role must be full or shared, got 'both'"):
        DSAAttention(CONFIG, "both", buffer)
    case = Case(0, (6,))
    without = replace(case, role="shared").cache()
    with pytest.raises(ValueError, match="got index_k=None"):
        run(case.layer(), without, case, prompts(case))
    scaled = replace(CONFIG, indexer=replace(CONFIG.indexer, external_rope=True))
    layer = DSAAttention(scaled, "shared", buffer)
    with pytest.raises(ValueError, match="rope must be given"):
        run(layer, without, case, prompts(case))
    with pytest.raises(ValueError, match="width must be 576 for float8_e4m3fn, got 24"):
        DSACache.make(CONFIG, "full", 2, dtype=torch.float8_e4m3fn)
    with pytest.raises(TypeError, match="dtype must be bfloat16, float16, float32 or float8_e4m3"):
        DSACache.make(CONFIG, "full", 2, dtype=torch.float64)
