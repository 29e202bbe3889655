"""The plugin: vLLM builds our layer for its `SparseAttnIndexer`, and gets exact selections."""

import importlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm_engine as engine
from vllm.config import CompilationConfig, DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.config.compilation import CUDAGraphMode
from vllm.forward_context import set_forward_context
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.sparse_attn_indexer import SparseAttnIndexer
from vllm.plugins import DEFAULT_PLUGINS_GROUP, load_plugins_by_group
from vllm.v1.attention.backends.mla.indexer import DeepseekV32IndexerBackend
from vllm.v1.worker.utils import AttentionGroup

import lightning_indexer as li
from lightning_indexer.adapters import vllm as li_vllm
from lightning_indexer.adapters import vllm_indexer, vllm_rows
from lightning_indexer.adapters.vllm_rows import ragged_decodes
from lightning_indexer.testing import reference

HEADS, HIDDEN, POISON = 4, 16, 7
FUSED = vllm_indexer.FUSED_MODULE


@dataclass(frozen=True)
class Batch:
    """Tokens a request runs, of how many it has; `extra` rows pad the batch."""

    lengths: tuple[int, ...]
    scheduled: tuple[int, ...]
    draft_tokens: int
    extra: int = 0


#: By what vLLM's builder makes of them without a GPU.
BATCHES = {
    "decode, native": Batch((70, 9, 130, 1), (1, 1, 1, 1), 1, extra=3),
    "verification, native": Batch((70, 9, 130), (2, 2, 2), 1, extra=2),
    "verification, flattened": Batch((70, 9), (4, 4), 3),
    "verification of unequal lengths": Batch((70, 9, 130), (4, 1, 3), 3, extra=4),
    "prefill": Batch((18, 9), (18, 9), 1),
    "chunked prefill": Batch((130, 70), (6, 11), 3, extra=1),
    "all of them": Batch((70, 130, 7, 66), (4, 2, 7, 5), 3, extra=2),
}


@pytest.fixture(autouse=True)
def plugin() -> Iterator[None]:
    """Registered for a test, and taken back."""
    with pytest.MonkeyPatch.context() as patch:
        engine.give_the_platform_a_cpu(patch)
        patch.setattr(CompilationConfig, "_attention_ops", [*CompilationConfig._attention_ops])
        li_vllm.register()
        yield
    op_registry_oot.pop("SparseAttnIndexer", None)


class Step:
    """A batch with its cache, in which values make ties and all sums are exact."""

    def __init__(
        self, batch: Batch, folder: Path, logits_bytes: int | None = None, **options: Any
    ) -> None:
        g = torch.Generator().manual_seed(sum(batch.lengths))
        self.batch, self.tokens = batch, sum(batch.scheduled)
        self.config: VllmConfig = engine.engine_config(folder, batch.draft_tokens, **options)
        self.cache = torch.zeros(engine.NUM_PAGES, engine.PAGE, engine.HEAD_DIM + 4).byte()
        self.buffer = torch.full((engine.MAX_TOKENS, engine.TOPK), POISON, dtype=torch.int32)
        self.tables = engine.block_tables(list(batch.lengths), batch.draft_tokens, g)
        group = AttentionGroup(DeepseekV32IndexerBackend, [engine.LAYER], engine.cache_spec(), 0)
        group.create_metadata_builders(self.config, engine.CPU)
        if logits_bytes is not None:
            limit_logits(group.metadata_builders[0], logits_bytes)
        ids = torch.zeros(self.tokens)
        vllm_batch = engine.input_batch(list(batch.lengths), list(batch.scheduled), ids)
        self.metadata, _ = engine.step_metadata([[group]], vllm_batch, self.tables)
        self.keys = [draw(g, length, engine.HEAD_DIM) for length in batch.lengths]
        old = zip(self.keys, batch.scheduled, strict=True)
        for request, (keys, count) in enumerate(old):
            self._write(request, keys[: keys.shape[0] - count])
        rows = self.tokens + batch.extra
        self.k = draw(g, rows, engine.HEAD_DIM).bfloat16()
        new = zip(self.keys, batch.scheduled, strict=True)
        self.k[: self.tokens] = torch.cat([keys[keys.shape[0] - count :] for keys, count in new])
        self.q = draw(g, rows, HEADS, engine.HEAD_DIM).to(torch.float8_e4m3fn)
        self.weights = draw(g, rows, HEADS)
        self.hidden = torch.zeros(rows, HIDDEN)

    def _write(self, request: int, keys: torch.Tensor) -> None:
        slots = torch.tensor([engine.slot(self.tables, request, p) for p in range(keys.shape[0])])
        sizes = {"page_size": engine.PAGE, "scale_format": "ue8m0"}
        li.write_index_k(self.cache, keys, slots.long(), **sizes)

    def layer(self, **options: Any) -> SparseAttnIndexer:
        k_cache = SimpleNamespace(prefix=engine.LAYER, kv_cache=self.cache)
        sizes = {"quant_block_size": engine.HEAD_DIM, "head_dim": engine.HEAD_DIM}
        with set_current_vllm_config(self.config):
            return SparseAttnIndexer(
                k_cache,
                **(sizes | options),
                scale_fmt="ue8m0",
                topk_tokens=engine.TOPK,
                max_model_len=engine.MAX_MODEL_LEN,
                max_total_seq_len=4096,
                topk_indices_buffer=self.buffer,
            )

    def context(self, metadata: Any, mode: CUDAGraphMode = CUDAGraphMode.NONE) -> Any:
        return set_forward_context(
            metadata, self.config, num_tokens=self.hidden.shape[0], cudagraph_runtime_mode=mode
        )

    def run(self, forward: Any, mode: CUDAGraphMode = CUDAGraphMode.NONE) -> None:
        with self.context(self.metadata, mode):
            got = forward(self.hidden, self.q, self.k, self.weights)
        assert got is self.buffer

    def assert_selected(self) -> None:
        row = 0
        for keys, count in zip(self.keys, self.batch.scheduled, strict=True):
            length = keys.shape[0]
            starts = torch.zeros(count, dtype=torch.int32)
            ends = torch.arange(length - count + 1, length + 1)
            rows = slice(row, row + count)
            scores = reference.mqa_logits(self.q[rows], keys, self.weights[rows], starts, ends)
            want = reference.topk_indices(scores, engine.TOPK)
            assert torch.equal(self.buffer[rows], want)
            row += count
        assert (self.buffer[row : self.hidden.shape[0]] == -1).all()
        assert (self.buffer[self.hidden.shape[0] :] == POISON).all()


def limit_logits(builder: Any, size: int) -> None:
    """vLLM's builder, as it would be with scores of at most `size` bytes (it asks for whole MB)."""
    split = builder._split_indexer_prefill_chunks

    def limited(lengths: Any, queries: Any, workspace: int, _: int, **options: int) -> Any:
        return split(lengths, queries, workspace, size, **options)

    builder._split_indexer_prefill_chunks = limited


def draw(g: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randint(-1, 2, shape, generator=g).float()


def test_importing_an_adapter_imports_no_runtime() -> None:
    code = """
import sys
import lightning_indexer
from lightning_indexer.adapters import huggingface_kernels, huggingface_kernels_layers, vllm
print({"vllm", "kernels", "transformers"} & set(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_vllm_loads_the_plugin_by_its_entry_point() -> None:
    plugins = load_plugins_by_group(DEFAULT_PLUGINS_GROUP)
    assert plugins["lightning_indexer"] is li_vllm.register


def test_register_twice_is_register_once() -> None:
    li_vllm.register()
    assert op_registry_oot["SparseAttnIndexer"] is vllm_indexer.LightningSparseAttnIndexer
    assert CompilationConfig._attention_ops.count(vllm_indexer.QUALIFIED_NAME) == 1


def test_piecewise_graphs_split_at_our_op() -> None:
    ours = "vllm_sparse_attn_indexer"
    assert hasattr(torch.ops.lightning_indexer, ours)
    config = VllmConfig(device_config=DeviceConfig(device="cpu"))  # compiles, unless told not to
    assert f"lightning_indexer::{ours}" in config.compilation_config.splitting_ops


def test_register_leaves_another_plugin_and_another_vllm_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = type("Other", (), {})
    monkeypatch.setitem(op_registry_oot, "SparseAttnIndexer", other)
    with pytest.warns(RuntimeWarning, match=r"must be vLLM's own, got .*\.Other"):
        li_vllm.register()
    assert op_registry_oot["SparseAttnIndexer"] is other
    monkeypatch.delitem(op_registry_oot, "SparseAttnIndexer")
    monkeypatch.setattr(li_vllm, "version", lambda _: "0.34.1+cu130")
    with pytest.warns(RuntimeWarning, match=r"vLLM must be 0\.33\.x, got 0\.34\.1"):
        li_vllm.register()
    assert "SparseAttnIndexer" not in op_registry_oot


@pytest.mark.parametrize("name", BATCHES)
def test_layer_writes_the_keys_and_selects_exactly(name: str, tmp_path: Path) -> None:
    step = Step(BATCHES[name], tmp_path)
    layer = step.layer()
    assert type(layer) is vllm_indexer.LightningSparseAttnIndexer and layer.covered
    step.run(layer)
    step.assert_selected()


@pytest.mark.parametrize(
    ("logits_bytes", "skipped"), [(4 * 6 * 130, [False, False]), (4 * 2 * 130, [False, True, True])]
)
def test_prefill_in_chunks_of_requests_and_of_rows(
    logits_bytes: int, skipped: list[bool], tmp_path: Path
) -> None:
    """Several chunks of one request share the keys that the first has gathered."""
    step = Step(BATCHES["chunked prefill"], tmp_path, logits_bytes)
    chunks = step.metadata[engine.LAYER].prefill.chunks
    assert [chunk.skip_kv_gather for chunk in chunks][: len(skipped)] == skipped
    step.run(step.layer())
    step.assert_selected()


@pytest.mark.parametrize("mode", [CUDAGraphMode.NONE, CUDAGraphMode.FULL], ids=lambda m: m.name)
def test_full_graph_is_recorded_for_the_longest_context(
    mode: CUDAGraphMode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its grids and scratch serve replays on longer contexts than that of the capture."""
    widths: list[int] = []

    def spy(*args: Any, max_context_len: int, **options: Any) -> torch.Tensor:
        widths.append(max_context_len)
        return li.paged_select_topk(*args, max_context_len=max_context_len, **options)

    monkeypatch.setattr(vllm_rows, "paged_select_topk", spy)
    step = Step(BATCHES["verification, flattened"], tmp_path)
    step.run(step.layer(), mode)
    longest = max(step.batch.lengths)
    assert widths == [longest if mode is CUDAGraphMode.NONE else engine.MAX_MODEL_LEN]
    step.assert_selected()


def test_verification_of_unequal_lengths_in_vllms_native_form(tmp_path: Path) -> None:
    """What its builder makes where kernels take several rows a request: padded, [requests, N]."""
    step = Step(BATCHES["verification of unequal lengths"], tmp_path)
    metadata, counts = step.metadata[engine.LAYER], step.batch.scheduled
    offsets = torch.arange(1 - max(counts), 1)
    lengths = torch.tensor(step.batch.lengths)[:, None] + offsets
    metadata.decode = replace(
        metadata.decode,
        seq_lens=lengths.clamp(min=0).to(torch.int32),
        decode_lens=torch.tensor(counts, dtype=torch.int32),
        block_table=metadata.block_table,
        requires_padding=True,
    )
    step.run(step.layer())
    step.assert_selected()


def test_layer_that_inserts_no_keys_leaves_the_cache_alone(tmp_path: Path) -> None:
    step = Step(BATCHES["all of them"], tmp_path)
    for request, keys in enumerate(step.keys):
        step._write(request, keys)
    before = step.cache.clone()
    step.k = torch.full_like(step.k, 3)
    step.run(step.layer(skip_k_cache_insert=True))
    assert torch.equal(step.cache, before)
    step.assert_selected()


@pytest.mark.parametrize("custom_ops", ["none", "all"])
def test_layer_is_one_opaque_op_to_the_compiler(custom_ops: str, tmp_path: Path) -> None:
    step = Step(BATCHES["all of them"], tmp_path, custom_ops=[custom_ops])
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    step.run(torch.compile(step.layer(), fullgraph=True, backend=backend))
    calls = [node.target for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert torch.ops.lightning_indexer.vllm_sparse_attn_indexer.default in calls
    step.assert_selected()


def test_profile_run_of_vllm_writes_nothing(tmp_path: Path) -> None:
    step = Step(BATCHES["prefill"], tmp_path)
    before = step.cache.clone()
    with step.context(None):
        step.layer()(step.hidden, step.q, step.k, step.weights)
    assert torch.equal(step.cache, before) and (step.buffer == POISON).all()


@pytest.mark.parametrize(
    "options",
    [
        {"use_fp4_cache": True},
        {"quant_block_size": 64},
        {"candidate_blocks": torch.zeros(1, dtype=torch.int32), "candidate_block_size": 8},
    ],
    ids=lambda o: next(iter(o)),
)
def test_what_ours_does_not_cover_runs_vllms_own_path(options: dict, tmp_path: Path) -> None:
    """…which, without a GPU, is its refusal."""
    step = Step(BATCHES["prefill"], tmp_path, custom_ops=["none"])
    layer = step.layer(**options)
    assert not layer.covered
    with pytest.raises(NotImplementedError, match="SparseAttnIndexer native forward is only"):
        step.run(layer)


@pytest.mark.parametrize("insert", [True, False])
def test_fused_layers_of_vllm_call_ours(
    insert: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its DeepSeek-V3.2 and GLM-5 layers build the layer, and call the function beneath it."""
    fused = importlib.import_module(FUSED)
    monkeypatch.setattr(fused, "sparse_attn_indexer", vllm_indexer.stock_sparse_attn_indexer)
    step = Step(BATCHES["all of them"], tmp_path)
    if not insert:
        for request, keys in enumerate(step.keys):
            step._write(request, keys)
    layer = step.layer()
    assert fused.sparse_attn_indexer is vllm_indexer.sparse_attn_indexer

    def forward(hidden: Any, q: Any, k: Any, weights: Any) -> torch.Tensor:
        return fused.sparse_attn_indexer(
            hidden,
            layer.k_cache.prefix,
            layer.k_cache.kv_cache,
            q,
            None,
            k if insert else None,
            weights,
            layer.quant_block_size,
            layer.scale_fmt,
            layer.topk_tokens,
            layer.head_dim,
            layer.max_model_len,
            layer.max_total_seq_len,
            step.buffer,
            skip_k_cache_insert=not insert,
            use_pcp=False,
            pcp_shard_decode_requests=False,
            dense_mha_metadata_layer_name="",
            dcp_rank=0,
            dcp_world_size=1,
            cp_kv_cache_interleave_size=1,
            skip_topk_buffer_clear=True,
            topk_backend=layer.topk_backend,
        )

    step.run(forward)
    step.assert_selected()


def test_ragged_decodes_count_from_each_requests_end() -> None:
    lengths = torch.tensor([[68, 69, 70], [0, 0, 0], [7, 8, 9], [198, 199, 200]])
    seen, requests = ragged_decodes(lengths.int(), torch.tensor([3, 0, 1, 2]).int(), 8)
    assert seen.tolist()[:6] == [68, 69, 70, 9, 199, 200]
    assert requests.tolist() == [0, 0, 0, 2, 3, 3, 4, 4]  # 4: no request, as padding is
