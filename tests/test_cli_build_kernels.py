"""`build-kernels` writes a repository that stands alone, and never over somebody else's."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lightning_indexer.cli import app

pytestmark = pytest.mark.once


def run(out: Path):
    return CliRunner().invoke(app, ["build-kernels", "--out", str(out)])


def test_the_build_runs_without_the_installed_package(tmp_path):
    result = run(tmp_path / "repo")
    assert result.exit_code == 0, result.output
    variant = tmp_path / "repo" / "build" / "torch-universal"
    assert str(variant) in result.output.replace("\n", "")
    name = json.loads((variant / "metadata.json").read_text())["id"]
    (variant / "lightning_indexer").rename(tmp_path / name)  # as it would be called in a process
    script = (
        f"import sys, torch, {name} as built;"
        "rows = built.topk_indices(torch.tensor([[1.0, 3.0, 3.0, 2.0]]), 2);"
        "assert rows.tolist() == [[1, 2]];"
        f"assert hasattr(torch.ops.{name}, 'topk_indices');"
        "assert 'lightning_indexer' not in sys.modules"
    )
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    subprocess.run([sys.executable, "-c", script], check=True, env=environment, cwd=tmp_path)


def test_a_second_build_has_the_same_bytes(tmp_path):
    contents = []
    for _ in range(2):
        assert run(tmp_path).exit_code == 0
        files = sorted(path for path in tmp_path.rglob("*") if path.is_file())
        contents.append({str(path): path.read_bytes() for path in files})
    assert contents[0] == contents[1]


def test_somebody_elses_build_is_left_alone(tmp_path):
    theirs = tmp_path / "build" / "torch-universal" / "metadata.json"
    theirs.parent.mkdir(parents=True)
    theirs.write_text('{"name": "flash-attn"}')
    result = run(tmp_path)
    assert result.exit_code == 2
    assert "another kernel's" in " ".join(result.output.replace("│", " ").split())
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [theirs]
