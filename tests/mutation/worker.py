"""Judges mutants quickly: a process that has imported all libraries forks for each run of tests.

    python -m mutation.worker warm|fresh

One request a line on standard input, one answer a line on standard output, both JSON. A mutated
source is never written to disk. A fresh worker's children import the package, with it in the place
of the module's own; a warm worker has imported package and tests, and a child exchanges functions.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import math
import os
import select
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any

from .patch import patch, serve_lines

#: Imported before any fork, by either kind of worker.
LIBRARIES = (
    "torch torch._dynamo torch.utils._pytree triton triton.language triton.runtime.interpreter"
    " numpy einops safetensors typer rich.table pytest _pytest.skipping _pytest.tmpdir"
    " _pytest.monkeypatch _pytest.capture _pytest.assertion.rewrite hypothesis"
    " hypothesis.strategies hypothesis.stateful"
)
#: Only what the tests need, and no rewriting of asserts: half of the time of a short run.
OPTIONS = (
    "-q --tb=line --assert=plain -p no:cacheprovider -p _hypothesis_pytestplugin"
    " -p lightning_indexer_pytest"
)
#: The code that stands for a mutant which must be imported afresh.
UNPATCHED = -1
#: A test may compute for `cpu_limit` seconds; a run may last this many times that.
WALL_LIMIT = 60
SETTINGS = "_hypothesis_internal_use_settings"


class Loader(SourceFileLoader):
    """Imports one module from a text instead of its file."""

    def __init__(self, name: str, path: str, text: str) -> None:
        super().__init__(name, path)
        self.text = text

    def get_code(self, fullname: str) -> CodeType:
        serve_lines(self.path, self.text)
        return compile(self.text, self.path, "exec", dont_inherit=True)


class Finder:
    """Finds the mutated module before anything else does."""

    def __init__(self, name: str, text: str) -> None:
        self.name, self.text = name, text

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != self.name:
            return None
        spec = PathFinder.find_spec(name, path)
        spec.loader = Loader(name, spec.origin, self.text)
        return spec


class Watcher:
    """A pytest plugin that writes which test runs, and which fails and why."""

    def __init__(self, pipe: int, examples: int, seconds: int) -> None:
        self.pipe, self.examples, self.seconds = pipe, examples, seconds

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """A property's settings are those of its import: other profiles come too late."""
        for item in items:
            function = getattr(item, "obj", None)
            function = getattr(function, "__func__", function)
            if hasattr(function, SETTINGS):
                setattr(function, SETTINGS, few(self.examples, getattr(function, SETTINGS)))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        tell(self.pipe, test=nodeid)
        limit_time(self.seconds)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            tell(self.pipe, failed=report.nodeid, why=_last_line(report))

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            tell(self.pipe, failed=report.nodeid, why=_last_line(report))

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        if exitstatus in (0, 1):  # what comes after it is tidying up
            tell(self.pipe, code=int(exitstatus))


def limit_time(seconds: int) -> None:
    """Ends this process if it computes for so many seconds from now on."""
    import resource

    used = math.ceil(time.process_time())
    resource.setrlimit(resource.RLIMIT_CPU, (used + seconds, resource.RLIM_INFINITY))


def tell(pipe: int, **what: object) -> None:
    os.write(pipe, (json.dumps(what) + "\n").encode())


def module_name(file: str) -> str:
    """`indexer/__init__.py` is `lightning_indexer.indexer`."""
    return "lightning_indexer." + file[:-3].replace("/", ".").removesuffix(".__init__")


def judge(request: dict[str, Any], root: Path) -> dict[str, Any]:
    """Forks, lets the child run the tests, and says how that ended."""
    reading, writing = os.pipe()
    folder = tempfile.mkdtemp(prefix="mutant-")
    start = time.monotonic()
    child = os.fork()
    if child == 0:
        try:
            os.setpgid(0, 0)  # a group of its own, which ends as a whole
            os.close(reading)
            _run_child(request, root, folder, writing)
        finally:
            os._exit(99)  # only if something outside pytest went wrong
    os.close(writing)
    said, stopped = _listen(reading, child, start + WALL_LIMIT * request["cpu_limit"], request)
    os.close(reading)
    if stopped or any("failed" in line or "code" in line for line in said):
        _kill_group(child)  # else it has ended by itself, and its status says how
    _, status = os.waitpid(child, 0)
    _kill_group(child)  # and what it has started
    output = Path(folder, "output")
    text = output.read_text(errors="replace")[-4000:] if output.exists() else ""
    shutil.rmtree(folder, ignore_errors=True)
    return {**_answer(said, status, stopped), "output": text, "seconds": time.monotonic() - start}


def _run_child(request: dict[str, Any], root: Path, folder: str, pipe: int) -> None:
    import pytest
    import torch

    output = os.open(f"{folder}/output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    limit_time(request["cpu_limit"])
    torch.set_num_threads(1)
    os.chdir(root)
    try:
        if request["file"] and not _mutate(request):
            tell(pipe, code=UNPATCHED)
            return
    except BaseException as error:
        tell(pipe, failed="import", why=f"{type(error).__name__}: {error}"[:200])
        return
    options = [*OPTIONS.split(), f"--basetemp={folder}/tmp"]
    watcher = Watcher(pipe, request["examples"], request["cpu_limit"])
    tell(pipe, code=int(pytest.main([*options, *request["tests"]], plugins=[watcher])))


def _mutate(request: dict[str, Any]) -> bool:
    name = module_name(request["file"])
    if "lightning_indexer" in sys.modules:
        return patch(sys.modules[name], request["old"], request["source"])
    sys.meta_path.insert(0, Finder(name, request["source"]))
    importlib.import_module("lightning_indexer")
    importlib.import_module(name)
    return True


def few(examples: int, parent: Any = None) -> Any:
    """Settings of so many examples, always the same ones, that take no time to shrink."""
    from hypothesis import HealthCheck, Phase, settings

    return settings(
        parent,
        max_examples=examples,
        phases=(Phase.explicit, Phase.generate),
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


def _listen(
    pipe: int, child: int, until: float, request: dict[str, Any]
) -> tuple[list[dict[str, Any]], str]:
    """What the child says up to its end or, unless all is asked for, a failure; why it stopped.

    Memory is watched and not limited, because some tests map far more than they touch.
    """
    text = b""
    while True:
        if time.monotonic() > until:
            return _parsed(text), "time"
        if _resident(child) > request["memory"]:
            return _parsed(text), "memory"
        if not select.select([pipe], [], [], 0.5)[0]:
            continue
        part = os.read(pipe, 1 << 16)
        text += part
        if not part or b'"code"' in part or (b'"failed"' in part and not request["whole"]):
            return _parsed(text), ""


def _resident(process: int) -> int:
    """Bytes of memory that a process holds, where the system says so."""
    try:
        pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def _parsed(text: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.decode().splitlines() if line.endswith("}")]


def _answer(said: Sequence[dict[str, Any]], status: int, stopped: str) -> dict[str, Any]:
    """How it ended: passed, failed, import, crashed, hung, nothing ran or unpatched."""
    last = next((line["test"] for line in reversed(said) if "test" in line), "")
    failed = {line["failed"]: line["why"] for line in said if "failed" in line}
    code = next((line["code"] for line in said if "code" in line), None)
    ran = sum("test" in line for line in said)
    by, why = next(iter(failed.items()), (last, stopped))
    if failed:
        verdict = "failed" if ran else "import"
    elif code == UNPATCHED:
        verdict, by = "unpatched", ""
    elif code is not None:
        verdict, by = ("passed" if code == 0 and ran else "nothing ran"), ""
    else:
        overtime = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU
        overtime |= stopped == "time"
        verdict = "hung" if overtime else "crashed"
        why = why or f"status {status}"
    return {"verdict": verdict, "by": by, "why": why, "ran": ran, "failed": list(failed)}


def _last_line(report: Any) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(crash.message if crash else report.longrepr).partition("\n")[0][:200]


def _kill_group(child: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)


def main(kind: str) -> None:
    root = Path.cwd()
    sys.path.insert(0, str(root / "tests"))
    for name in LIBRARIES.split():
        importlib.import_module(name)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    if kind == "warm":
        importlib.import_module("conftest")
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if kind == "warm":
            for test in request["tests"]:
                with contextlib.suppress(Exception):  # the child's pytest will say why
                    importlib.import_module(Path(test.partition("::")[0]).stem)
        gc.collect()
        gc.freeze()  # a child's collections shall not walk, and so copy, what it shares
        print(json.dumps(judge(request, root)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
