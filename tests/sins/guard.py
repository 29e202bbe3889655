"""A pytest plugin for a copy of the tree: it is the copy that is tested, quickly and repeatably."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import Phase, settings

import lightning_indexer


def pytest_configure(config: pytest.Config) -> None:
    """Refuses another package than the copy's, and takes no time to shrink what failed."""
    package = Path(lightning_indexer.__file__).resolve()
    if not package.is_relative_to(config.rootpath):
        raise pytest.UsageError(f"lightning_indexer must be that of {config.rootpath}: {package}")
    phases = (Phase.explicit, Phase.generate)
    settings.register_profile("sins", phases=phases, derandomize=True, database=None)
    settings.load_profile("sins")
