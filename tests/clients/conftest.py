"""Tests against real runtimes, each in an environment that has the runtime.

`test_<client>.py` and `test_<client>_….py` need the package that CLIENTS names. Where it is not
installed they are not collected, so that the ordinary suite does not see them; named on the
command line they are, and fail.
"""

import importlib.util
from pathlib import Path

CLIENTS = {"transformers": "transformers", "huggingface_kernels": "kernels", "vllm": "vllm"}


def installed(package: str) -> bool:
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None  # our own folder `kernels` has no origin


collect_ignore = [
    path.name
    for client, package in CLIENTS.items()
    if not installed(package)
    for pattern in (f"test_{client}.py", f"test_{client}_*.py")
    for path in Path(__file__).parent.glob(pattern)
]
