"""Test set-up: one thread, hypothesis profiles, and counts of what ran (counting.py).

Plain `pytest` tests the CPU path; `TRITON_INTERPRET=1 pytest` runs the same tests through the
Triton kernels, but for those marked `once`, and those marked `interpreter` besides. Tests marked
`gpu` are deselected where there is none. `HYPOTHESIS_PROFILE` picks few, dev (default), ci or soak.
"""

import json
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # 4-9 times faster dots in the interpreter

import pytest
import torch
from hypothesis import HealthCheck, settings

import counting
from counting import DONE, EXAMPLES, FIGURES, RIGHT
from lightning_indexer.kernels.backend import INTERPRET
from lightning_indexer.testing import canary

torch.set_num_threads(1)
canary.observers.append(counting.count_canaries)

_COMMON = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
}
settings.register_profile("dev", max_examples=25, **_COMMON)
settings.register_profile("few", max_examples=5, derandomize=True, **_COMMON)
settings.register_profile("ci", max_examples=120, derandomize=True, **_COMMON)
settings.register_profile("verify", max_examples=250, derandomize=True, **_COMMON)
settings.register_profile("soak", max_examples=20_000, **_COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--figures-json", type=Path, metavar="FILE", help="write counts there")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects the tests that are for another backend than this pass is on."""
    dropped = ["once" if INTERPRET else "interpreter"]
    if INTERPRET or not torch.cuda.is_available():
        dropped.append("gpu")
    deselected = {i for i in items if any(map(i.get_closest_marker, dropped))}
    config.hook.pytest_deselected(items=list(deselected))
    items[:] = [i for i in items if i not in deselected]


@pytest.fixture
def uncounted(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of kernels that are wrong on purpose: the bytes these change are no figure."""
    monkeypatch.setattr(canary, "observers", [])


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Under pytest-xdist, a worker hands its counts to the controller…"""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["counts"] = counting.rows()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """…which adds them up."""
    counting.add(getattr(node, "workeroutput", {}).get("counts", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    line = terminalreporter.write_line
    if EXAMPLES:
        terminalreporter.section("property examples executed")
        for op, count in counting.totals(EXAMPLES).items():
            line(f"{op:28} {count:6}")
    for figure in FIGURES:
        kinds = sorted(kind for name, kind in DONE if name == figure)
        if kinds:
            terminalreporter.section(figure)
            for kind in kinds:
                line(f"{kind:28} {DONE[figure, kind]:6} / {RIGHT[figure, kind]}")
            done, right = (counting.totals(counter)[figure] for counter in (DONE, RIGHT))
            line(f"{'all':28} {done:6} / {right}")
    file = terminalreporter.config.getoption("figures_json")
    if file:
        file.write_text(json.dumps(counting.rows()) + "\n")
