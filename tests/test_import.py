"""Importing the package is cheap, has no side effect and needs no Triton."""

import json
import statistics
import subprocess
import sys

import pytest

pytestmark = pytest.mark.once


def run(code: str) -> str:
    """Standard output of `code` in a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_adds_at_most_300_ms_to_torch_and_triton() -> None:
    # Processor time: a busy machine stretches the clock's, and the tests keep theirs busy.
    code = """
import time, torch, triton
began = time.process_time()
import lightning_indexer
print(time.process_time() - began)
"""
    assert statistics.median(float(run(code)) for _ in range(3)) <= 0.3


def test_import_loads_no_heavy_module() -> None:
    code = "import sys, json, lightning_indexer; print(json.dumps(sorted(sys.modules)))"
    heavy = ("typer", "rich", "safetensors", "matplotlib", "transformers", "torch._dynamo")
    assert set(json.loads(run(code))).isdisjoint(heavy)


def test_import_touches_no_device() -> None:
    code = "import torch, lightning_indexer; print(torch.cuda.is_initialized())"
    assert run(code).strip() == "False"


def test_cpu_path_needs_no_triton() -> None:
    code = """
import importlib, pkgutil, sys

class NoTriton:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "triton":
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, NoTriton())
import torch, lightning_indexer
for part in ("kernels", "indexer", "speculator"):
    package = importlib.import_module(f"lightning_indexer.{part}")
    for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
from lightning_indexer.kernels.topk import topk_indices
assert not any(name.split(".")[0] == "triton" for name in sys.modules)
print(topk_indices(torch.tensor([[0.0, 2.0, 1.0, 2.0]]), 2).tolist())
"""
    assert run(code).strip() == "[[1, 3]]"
