"""A local repository for Hugging Face's `kernels` package, made from the installed sources.

    lightning-indexer build-kernels --out DIR

    from kernels import LocalLayerRepository, Mode, kernelize, replace_kernel_forward_from_hub
    from kernels import use_kernel_mapping

    replace_kernel_forward_from_hub(GlmMoeDsaIndexer, "GlmMoeDsaIndexer")  # transformers' class
    layer = LocalLayerRepository(Path("DIR"), layer_name="GlmMoeDsaIndexer")
    with use_kernel_mapping({"GlmMoeDsaIndexer": {"cuda": layer}}):
        kernelize(model, mode=Mode.INFERENCE, device="cuda")

One variant serves every backend: `build/torch-universal/`, Python and Triton alone. `kernels` runs
it under a module name of its own, beside an installed lightning_indexer. torch's registry of ops
is one for the process, so the ops of a build are registered under that name too.
"""

from __future__ import annotations

import ast
import hashlib
import json
import shutil
import tempfile
from pathlib import Path

NAME = "lightning-indexer"
PACKAGE = "lightning_indexer"
VARIANT = "torch-universal"
#: The file and the line that give the ops their namespace.
REGISTRY, NAMESPACE_LINE = "kernels/registry.py", f'NAMESPACE = "{PACKAGE}"\n'
FOLDERS = ("kernels", "indexer")
ADAPTERS = ("__init__.py", "huggingface_kernels_layers.py", "transformers_indexer.py")


def build(out: Path) -> Path:
    """Writes `out/build/torch-universal/` and returns that folder.

    Args:
        out: the repository, made if need be. An earlier build of ours there is replaced.

    Raises:
        ValueError: the variant's folder exists and is none of ours. Nothing is written then.

    Guarantees:
        The same sources give the same bytes, whose hash is in the ops' namespace,
        `lightning_indexer_<hash>`: two builds that differ share no registration.

    Source:
        The layout that `kernels` 0.17 loads: metadata.json beside a package with `layers`.
    """
    variant = Path(out) / "build" / VARIANT
    if variant.exists() and not _is_ours(variant):
        raise ValueError(f"out must not hold another kernel's {VARIANT} build, got {variant}")
    files = _sources()
    namespace = f"{PACKAGE}_{_digest(files)}"
    files[REGISTRY] = _renamed(files[REGISTRY], namespace)
    variant.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=variant.parent) as folder:
        fresh = Path(folder) / VARIANT
        for name, text in files.items():
            path = fresh / PACKAGE / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        (fresh / "metadata.json").write_text(_metadata(namespace), encoding="utf-8")
        if variant.exists():
            shutil.rmtree(variant)
        fresh.rename(variant)
    return variant


def _is_ours(variant: Path) -> bool:
    try:
        return json.loads((variant / "metadata.json").read_text(encoding="utf-8"))["name"] == NAME
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _sources() -> dict[str, str]:
    """Contents by name within the package, which keeps its folders: relative imports stay right."""
    root = Path(__file__).resolve().parents[1]
    paths = [path for folder in FOLDERS for path in sorted((root / folder).glob("*.py"))]
    paths += [root / "adapters" / name for name in ADAPTERS]
    files = {path.relative_to(root).as_posix(): path.read_text(encoding="utf-8") for path in paths}
    files["__init__.py"] = _door((root / "__init__.py").read_text(encoding="utf-8"))
    return files


def _door(door: str) -> str:
    """The package's __init__: `layers`, and the public names that come from the copied folders."""
    imports = [
        ast.unparse(node)
        for node in ast.parse(door).body
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in FOLDERS
    ]
    first = '"""Layers and ops of lightning-indexer, for Hugging Face kernels."""'
    layers = "from .adapters import huggingface_kernels_layers as layers"
    return "\n".join([first, layers, *imports, ""])


def _digest(files: dict[str, str]) -> str:
    content = hashlib.sha256()
    for name in sorted(files):
        content.update(f"{name}\0{files[name]}\0".encode())
    return content.hexdigest()[:12]


def _renamed(registry: str, namespace: str) -> str:
    if registry.count(NAMESPACE_LINE) != 1:
        raise ValueError(f"{REGISTRY} must hold the line {NAMESPACE_LINE!r} once")
    return registry.replace(NAMESPACE_LINE, f'NAMESPACE = "{namespace}"\n')


def _metadata(namespace: str) -> str:
    fields = {
        "id": namespace,  # the module's name in sys.modules
        "name": NAME,
        "version": 1,
        "license": "Apache-2.0",
        "python-depends": ["einops"],
        "backend": {"type": "cpu"},  # needs a value; a universal variant loads on all of them
    }
    return json.dumps(fields, indent=2) + "\n"
