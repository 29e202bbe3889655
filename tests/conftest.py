"""Test set-up: one thread, hypothesis profiles, and a count of property examples per op.

Plain `pytest` tests the CPU path; `TRITON_INTERPRET=1 pytest` runs the same tests through the
Triton kernels. `HYPOTHESIS_PROFILE` picks dev (default), ci or soak.
"""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # 4-9 times faster dots in the interpreter

import pytest
import torch
from hypothesis import HealthCheck, settings

from counting import EXAMPLES

torch.set_num_threads(1)

_COMMON = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
}
settings.register_profile("dev", max_examples=25, **_COMMON)
settings.register_profile("ci", max_examples=200, derandomize=True, **_COMMON)
settings.register_profile("soak", max_examples=20_000, **_COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if EXAMPLES:
        terminalreporter.section("property examples executed")
        for op, count in sorted(EXAMPLES.items()):
            terminalreporter.write_line(f"{op:28} {count:6}")
