"""A wheel built from the sdist holds the whole package and works on its own."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.once

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "lightning_indexer"
LINKED = ("kernels", "indexer", "speculator")
#: Holds a subclass of a client's own class; `tests/clients` imports it beside that client.
NEEDS_CLIENT = "lightning_indexer.adapters.vllm_indexer"
NOT_SOURCE = shutil.ignore_patterns(
    ".git", ".venv*", "build", "dist", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis"
)


def run(*command: str | Path, cwd: Path) -> str:
    """Runs a command without the checkout or the interpreter's settings in its environment."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "TRITON"))}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def package_files() -> set[str]:
    """Every module and data file of the checkout, as paths inside the installed package."""
    data = {".py", ".typed", ".safetensors", ".json", ".md"}
    found = {
        path.relative_to(base)
        for base, top in [(PACKAGE, PACKAGE), *((ROOT, ROOT / name) for name in LINKED)]
        for path in top.rglob("*")
        if path.suffix in data
    }
    beside = {"lightning_indexer_pytest.py"}
    return {f"lightning_indexer/{path.as_posix()}" for path in found} | beside


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The sdist and the wheel built from it, from a copy: a build leaves files in its tree."""
    folder = tmp_path_factory.mktemp("build")
    shutil.copytree(ROOT, folder / "source", symlinks=True, ignore=NOT_SOURCE)
    command = (sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "dist")
    run(*command, folder / "source", cwd=folder)
    (sdist,) = (folder / "dist").glob("*.tar.gz")
    (wheel,) = (folder / "dist").glob("*.whl")
    return {"sdist": sdist, "wheel": wheel}


@pytest.fixture(scope="module")
def installed(built: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a new environment that has the wheel, and sees this one's other packages."""
    folder = tmp_path_factory.mktemp("installed") / "venv"
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--no-index", "--no-deps")
    run(*pip, built["wheel"], cwd=folder)
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder)
    # A path in a .pth is appended to sys.path, and .pth files there (the editable install of the
    # checkout among them) are not read.
    Path(site.strip(), "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def test_wheel_holds_the_package_and_nothing_else(built: dict[str, Path]) -> None:
    names = set(zipfile.ZipFile(built["wheel"]).namelist())
    assert {name for name in names if ".dist-info/" not in name} == package_files()
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_sdist_holds_every_module(built: dict[str, Path]) -> None:
    with tarfile.open(built["sdist"]) as archive:
        members = {m.name.partition("/")[2]: m for m in archive.getmembers()}
    missing = {f"src/{name}" for name in package_files()} - set(members)
    assert not missing
    assert not [name for name, member in members.items() if member.issym() or member.islnk()]


def test_wheel_imports_every_module_away_from_the_checkout(installed: Path, tmp_path: Path) -> None:
    # Names from the file list: pkgutil does not see `kernels`, a namespace package.
    files = sorted(name for name in package_files() if name.endswith(".py"))
    names = [name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in files]
    code = (
        "import importlib, sys; [print(importlib.import_module(m).__file__) for m in sys.argv[1:]]"
    )
    modules = [name for name in names if not name.endswith("__main__") and name != NEEDS_CLIENT]
    assert NEEDS_CLIENT in names
    origins = run(installed, "-c", code, *modules, cwd=tmp_path).splitlines()
    assert len(origins) == len(modules)
    assert [f for f in origins if not Path(f).is_relative_to(installed.parents[1])] == []


def test_installed_command_generates_text(installed: Path, tmp_path: Path) -> None:
    options = ("generate", "--max-new-tokens", "4", "--prompt", "The for statement")
    printed = run(installed, "-m", "lightning_indexer", *options, cwd=tmp_path)
    assert "all texts identical" in printed
    assert run(installed.parent / "lightning-indexer", "--help", cwd=tmp_path)
