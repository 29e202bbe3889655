"""pytest plugin: `pytest --lightning-indexer-kernel=module:function` judges a kernel.

A plugin is imported in every pytest run of its environment, before any conftest: it must import
neither torch nor triton, which reads TRITON_INTERPRET when kernels are decorated. The suites are
loaded when the option is given, once the conftests have been.
"""

from __future__ import annotations

import argparse

import pytest

OPS = ("topk", "mqa_logits", "paged_mqa_logits", "compact", "slots", "sparse_attention")


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options."""
    group = parser.getgroup("lightning-indexer", "conformance of sparse-attention kernels")
    group.addoption(
        "--lightning-indexer-kernel",
        action="append",
        default=[],
        metavar="MODULE:FUNCTION",
        help="judge this kernel by its contract, FUNCTION.lightning_indexer_contract or the"
        " default of its op (may be repeated)",
    )
    group.addoption(
        "--lightning-indexer-op",
        choices=OPS,
        help="what the kernels are; else told from the contract, the name and the parameters",
    )
    group.addoption(
        "--lightning-indexer-examples",
        type=_at_least_one,
        default=50,
        metavar="N",
        help="cases tried for each property (default 50)",
    )


def _at_least_one(text: str) -> int:
    count = int(text)
    if count < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {count}")
    return count


@pytest.hookimpl(tryfirst=True)  # before -k and -m deselect
def pytest_collection_modifyitems(
    session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Adds an item for each property of each kernel."""
    kernels = config.getoption("--lightning-indexer-kernel")
    if not kernels:
        return
    from lightning_indexer.testing.pytest_items import conformance_items

    op = config.getoption("--lightning-indexer-op")
    examples = config.getoption("--lightning-indexer-examples")
    for kernel in kernels:
        made = list(conformance_items(session, kernel, op, examples))
        items.extend(made)
        report = pytest.CollectReport(kernel, "passed", None, [*made])
        config.hook.pytest_collectreport(report=report)  # they count as collected
