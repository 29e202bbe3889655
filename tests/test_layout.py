"""The house of docs/design.md: folders, links, arrows between packages, file sizes, names."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.once

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "lightning_indexer"
LINKED = ("kernels", "indexer", "speculator")

# What each part may import of the package; a part missing here may import all of it.
ARROWS = {
    "kernels": {"kernels"},
    "indexer": {"kernels", "indexer"},
    "speculator": {"kernels", "indexer", "speculator"},
    "testing": {"kernels", "indexer", "speculator", "testing"},
    "offline": {"kernels", "offline"},
    "adapters": {"kernels", "indexer", "speculator", "adapters"},
}
LIBRARIES = {"torch", "triton", "einops"} | sys.stdlib_module_names


def sources(folder: Path) -> list[Path]:
    """Python files below `folder`, links not followed: each file is seen once."""
    return sorted(folder.rglob("*.py"))


def imports(path: Path, module: str) -> Iterator[str]:
    """Absolute names of what the file of dotted name `module` imports."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join([*(above if node.level else []), *filter(None, [node.module])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def module_name(path: Path) -> str:
    """`kernels/topk.py` is `lightning_indexer.kernels.topk`, links notwithstanding."""
    base = PACKAGE if path.is_relative_to(PACKAGE) else ROOT
    parts = path.relative_to(base).with_suffix("").parts
    return ".".join(["lightning_indexer", *(p for p in parts if p != "__init__")])


def names_us(module: str | None) -> bool:
    return (module or "").split(".")[0] == "lightning_indexer"


@pytest.mark.parametrize("name", LINKED)
def test_package_links_to_the_root_folder(name: str) -> None:
    link = PACKAGE / name
    assert link.is_symlink()
    assert link.readlink().as_posix() == f"../../{name}"
    assert (ROOT / name).is_dir() and not (ROOT / name).is_symlink()


def test_root_kernels_folder_shadows_no_installed_package() -> None:
    # With an __init__.py it would hide Hugging Face's `kernels` from anything started here.
    assert not (ROOT / "kernels" / "__init__.py").exists()


@pytest.mark.parametrize("part", sorted(ARROWS))
def test_imports_follow_the_arrows(part: str) -> None:
    folder = ROOT / part if part in LINKED else PACKAGE / part
    wrong = []
    for path in sources(folder):
        for name in imports(path, module_name(path)):
            if names_us(name) and name.split(".")[1] not in ARROWS[part]:
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not wrong


@pytest.mark.parametrize("part", LINKED)
def test_library_parts_need_torch_triton_and_einops_only(part: str) -> None:
    allowed = LIBRARIES | {"lightning_indexer"}
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sources(ROOT / part)
        for name in imports(path, module_name(path))
        if name.split(".")[0] not in allowed
    ]
    assert not wrong


def test_package_imports_itself_relatively() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for folder in (*(ROOT / name for name in LINKED), PACKAGE)
        for path in sources(folder)
        for node in ast.walk(ast.parse(path.read_text()))
        if (isinstance(node, ast.ImportFrom) and not node.level and names_us(node.module))
        or (isinstance(node, ast.Import) and any(names_us(alias.name) for alias in node.names))
    ]
    assert not wrong


def test_no_file_is_longer_than_400_lines() -> None:
    folders = (*LINKED, "src", "tests", "bench")
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text().splitlines())
        for folder in folders
        for path in sources(ROOT / folder)
    }
    assert {name: n for name, n in lengths.items() if n > 400} == {}


@pytest.mark.parametrize("op", ["mqa_logits", "topk", "compact"])
def test_same_name_three_times(op: str) -> None:
    names = (f"kernels/{op}.py", f"tests/test_{op}.py", f"bench/bench_{op}.py")
    assert [name for name in names if not (ROOT / name).is_file()] == []
