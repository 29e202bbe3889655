"""Test set-up: one thread, hypothesis profiles, and counts of property examples and faults.

Plain `pytest` tests the CPU path; `TRITON_INTERPRET=1 pytest` runs the same tests through the
Triton kernels, but for those marked `once`, and those marked `interpreter` besides. Tests marked
`gpu` are deselected where there is none. `HYPOTHESIS_PROFILE` picks dev (default), ci or soak.
"""

import os
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # 4-9 times faster dots in the interpreter

import pytest
import torch
from hypothesis import HealthCheck, settings

from counting import COUNTERS, EXAMPLES, INJECTED, RECOVERED
from lightning_indexer.kernels.backend import INTERPRET

torch.set_num_threads(1)

_COMMON = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
}
settings.register_profile("dev", max_examples=25, **_COMMON)
settings.register_profile("ci", max_examples=200, derandomize=True, **_COMMON)
settings.register_profile("soak", max_examples=20_000, **_COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects the tests that are for another backend than this pass is on."""
    dropped = ["once" if INTERPRET else "interpreter"]
    if INTERPRET or not torch.cuda.is_available():
        dropped.append("gpu")
    deselected = {i for i in items if any(map(i.get_closest_marker, dropped))}
    config.hook.pytest_deselected(items=list(deselected))
    items[:] = [i for i in items if i not in deselected]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Under pytest-xdist, a worker hands its counts to the controller…"""
    if hasattr(session.config, "workeroutput"):
        counts = {name: dict(counter) for name, counter in COUNTERS.items()}
        session.config.workeroutput["counts"] = counts


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """…which adds them up."""
    for name, counts in getattr(node, "workeroutput", {}).get("counts", {}).items():
        COUNTERS[name].update(counts)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if EXAMPLES:
        terminalreporter.section("property examples executed")
        for op, count in sorted(EXAMPLES.items()):
            terminalreporter.write_line(f"{op:28} {count:6}")
    if INJECTED:
        terminalreporter.section("faults injected / recovered")
        for step, count in sorted(INJECTED.items()):
            terminalreporter.write_line(f"{step:28} {count:6} / {RECOVERED[step]}")
        terminalreporter.write_line(f"{'all':28} {INJECTED.total():6} / {RECOVERED.total()}")
