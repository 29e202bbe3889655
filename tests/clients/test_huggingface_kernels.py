"""The build for Hugging Face `kernels`, loaded by that library into real transformers models."""

import ast
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import kernels
import pytest
import torch
from kernels import LocalLayerRepository, Mode, kernelize, use_kernel_mapping
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    DeepseekV32Config,
    DeepseekV32ForCausalLM,
    GlmMoeDsaConfig,
    GlmMoeDsaForCausalLM,
)

import lightning_indexer as li
from lightning_indexer.adapters import huggingface_kernels, huggingface_kernels_layers
from lightning_indexer.adapters.huggingface_kernels import PACKAGE, build

SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "qk_nope_head_dim": 16,
    "max_position_embeddings": 256,
    "index_topk": 12,
    "index_head_dim": 32,
    "index_n_heads": 16,  # all scores of a key 0, and so a tie: once in 65,536
    "first_k_dense_replace": 1,
    "bos_token_id": 0,
    "eos_token_id": None,
}
FAMILIES = {
    "DeepseekV32Indexer": (DeepseekV32ForCausalLM, DeepseekV32Config, {}),
    "GlmMoeDsaIndexer": (
        GlmMoeDsaForCausalLM,
        GlmMoeDsaConfig,
        {"indexer_types": ["full", "shared", "full"]},
    ),
}


class Namespaces(TorchDispatchMode):
    """Counts the calls of this package's ops by namespace."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        namespace = func.namespace
        if namespace.startswith(PACKAGE):
            self.calls[namespace] = self.calls.get(namespace, 0) + 1
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("kernels")
    build(out)
    return out


@pytest.fixture(scope="module")
def package(repository: Path):
    return kernels.get_local_kernel(repository)


def tiny_model(layer: str, seed: int) -> torch.nn.Module:
    model, config, extra = FAMILIES[layer]
    torch.manual_seed(seed)
    return model(config(**SIZES, **extra)).eval()


def indexers(model: torch.nn.Module, layer: str) -> list[torch.nn.Module]:
    return [module for module in model.modules() if type(module).__name__ == layer]


@pytest.fixture
def stock_class(request: pytest.FixtureRequest) -> Iterator[str]:
    """Names the family's indexer to `kernels`, and takes the name away again."""
    layer = request.param
    kind = type(indexers(tiny_model(layer, 0), layer)[0])
    kernels.replace_kernel_forward_from_hub(kind, layer)
    yield layer
    del kind.kernel_layer_name, kind.kernel_condition


def kernelized(model: torch.nn.Module, layer: str, repository: Path) -> torch.nn.Module:
    source = LocalLayerRepository(repository, layer_name=layer)
    with use_kernel_mapping({layer: {"cpu": source}}, inherit_mapping=False):
        return kernelize(model, mode=Mode.INFERENCE, device="cpu", use_fallback=False)


def with_installed(model: torch.nn.Module, layer: str) -> torch.nn.Module:
    """The same layer of the installed package, bound by hand."""
    kind = getattr(huggingface_kernels_layers, layer)
    for module in indexers(model, layer):
        module.forward = kind.forward.__get__(module)
    return model


def prompt(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, SIZES["vocab_size"], (2, 60), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, :9] = 0  # left padding
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("stock_class", FAMILIES, indirect=True)
@pytest.mark.parametrize("seed", range(3))
def test_build_gives_the_logits_of_the_installed_package_and_of_stock(
    stock_class: str, seed: int, repository: Path, package
) -> None:
    inputs = prompt(seed)
    stock = tiny_model(stock_class, seed)
    ours = with_installed(tiny_model(stock_class, seed), stock_class)
    built = kernelized(tiny_model(stock_class, seed), stock_class, repository)
    with torch.no_grad():
        want, installed = stock(**inputs).logits, ours(**inputs).logits
        with Namespaces() as seen:
            got = built(**inputs).logits
    assert seen.calls.keys() == {package.__name__}
    assert len(indexers(built, stock_class)) <= seen.calls[package.__name__]
    assert torch.equal(got, installed)
    real = inputs["attention_mask"].bool()
    torch.testing.assert_close(got[real], want[real], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("stock_class", FAMILIES, indirect=True)
def test_build_generates_what_the_installed_package_generates(
    stock_class: str, repository: Path
) -> None:
    options = {"max_new_tokens": 12, "do_sample": False}
    ours = with_installed(tiny_model(stock_class, 5), stock_class)
    built = kernelized(tiny_model(stock_class, 5), stock_class, repository)
    want = ours.generate(**prompt(5), **options)
    assert torch.equal(built.generate(**prompt(5), **options), want)


def test_layer_of_the_other_family_selects_other_keys(repository: Path, package) -> None:
    """Without a difference, the logits above would not tell a mix-up of the two layers."""
    stock = tiny_model("DeepseekV32Indexer", 0)
    mixed = tiny_model("DeepseekV32Indexer", 0)
    for module in indexers(mixed, "DeepseekV32Indexer"):
        module.forward = package.layers.GlmMoeDsaIndexer.forward.__get__(module)
    with torch.no_grad():
        a, b = stock(**prompt(0)).logits, mixed(**prompt(0)).logits
    assert (a - b).abs().max() > 1e-3


@pytest.mark.parametrize("stock_class", FAMILIES, indirect=True)
def test_layers_compile_without_a_graph_break(stock_class: str, repository: Path) -> None:
    """What `can_torch_compile` promises."""
    model = kernelized(tiny_model(stock_class, 0), stock_class, repository)
    indexer = indexers(model, stock_class)[0]
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(2, 40, SIZES["hidden_size"], generator=generator)
    q_resid = torch.randn(2, 40, SIZES["q_lora_rank"], generator=generator)
    angle = torch.randn(2, 40, SIZES["qk_rope_head_dim"] // 2, generator=generator).repeat(1, 1, 2)
    rope = (angle.cos(), angle.sin())
    mask = torch.ones(2, 40, 40, dtype=torch.bool).tril()
    arguments = (hidden, q_resid, rope, mask, None)
    want = indexer(*arguments)
    compiled = torch.compile(indexer.forward, fullgraph=True, backend="eager")
    assert torch.equal(compiled(*arguments), want)


def test_installed_ops_and_those_of_the_build_are_two_registrations(package) -> None:
    installed, built = torch.ops.lightning_indexer, getattr(torch.ops, package.__name__)
    schemas = torch._C._jit_get_all_schemas()
    ours = {s.name.split("::")[1] for s in schemas if s.name.startswith(f"{PACKAGE}::")}
    theirs = {s.name.split("::")[1] for s in schemas if s.name.startswith(f"{package.__name__}::")}
    assert {"topk_indices", "select_topk", "mqa_logits"} <= theirs <= ours
    for name in theirs:
        assert getattr(built, name).default is not getattr(installed, name).default


def test_ops_of_the_build_give_the_same_bits_by_their_own_code(package) -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randint(-1, 2, (5, 4, 32), generator=generator).float()  # many ties
    k = torch.randint(-1, 2, (70, 32), generator=generator).float()
    weights = torch.randn(5, 4, generator=generator)
    starts, ends = torch.zeros(5, dtype=torch.int32), torch.arange(66, 71, dtype=torch.int32)
    results = {}
    for namespace, module in ((PACKAGE, li), (package.__name__, package)):
        with Namespaces() as seen:
            scores = module.mqa_logits(q, k, weights, starts, ends)
            chosen = module.select_topk(q, k, weights, starts, ends, 16)
        assert seen.calls.keys() == {namespace}
        results[namespace] = scores.view(torch.int32), chosen
    (scores, chosen), (their_scores, their_chosen) = results.values()
    assert torch.equal(scores, their_scores) and torch.equal(chosen, their_chosen)


def test_build_imports_itself_relatively_and_needs_its_declared_packages_only(
    repository: Path,
) -> None:
    allowed = {"torch", "triton", "einops"} | sys.stdlib_module_names  # torch brings triton
    wrong = []
    for path in sorted(repository.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            wrong += [f"{path.name}: {name}" for name in names if name.split(".")[0] not in allowed]
    assert not wrong


def test_every_module_of_the_build_imports(repository: Path, package) -> None:
    root = Path(package.__file__).parent
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        name = ".".join([package.__name__, *(p for p in parts if p != "__init__")])
        assert Path(importlib.import_module(name).__file__).is_relative_to(repository)


def test_same_sources_build_the_same_bytes_and_others_another_namespace(
    tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def contents(root: Path) -> dict[str, bytes]:
        return {
            path.relative_to(root).as_posix(): path.read_bytes()
            for path in root.rglob("*")
            if path.is_file() and "__pycache__" not in path.parts
        }

    again = build(tmp_path)
    assert contents(tmp_path) == contents(repository)
    before = json.loads((again / "metadata.json").read_text())["id"]
    (again / "stale.py").write_text("")
    sources = huggingface_kernels._sources()
    changed = sources | {"kernels/topk.py": sources["kernels/topk.py"] + "\n# changed\n"}
    monkeypatch.setattr(huggingface_kernels, "_sources", lambda: dict(changed))
    build(tmp_path)
    assert json.loads((again / "metadata.json").read_text())["id"] != before
    assert not (again / "stale.py").exists()


def test_build_leaves_another_kernel_alone(tmp_path: Path) -> None:
    other = tmp_path / "build" / "torch-universal"
    other.mkdir(parents=True)
    (other / "metadata.json").write_text('{"name": "activation"}')
    with pytest.raises(ValueError, match=r"out must not hold another kernel's torch-universal"):
        build(tmp_path)
    assert [path.name for path in other.iterdir()] == ["metadata.json"]
