"""What compiled kernels cost gets no worse than the checked-in report says."""

import json
from pathlib import Path

import pytest

from compiled import compiled_for
from lightning_indexer.offline.case import TARGETS
from lightning_indexer.offline.report import Row, report

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.once

TABLE = Path(__file__).resolve().parents[1] / "bench" / "compiled" / "report.json"
TOLERANCE = 1.02
FIGURES = ("registers", "spill_bytes", "shared_bytes", "instructions_per_unit", "bytes_per_unit")
UPDATE = "if that is meant, run `make compile-report` and commit what it writes"


def by_name(rows: list[Row]) -> dict[tuple[str, ...], Row]:
    named = {(r["target"], r["op"], r["kernel"], r["case"], str(r["shape"])): r for r in rows}
    assert len(named) == len(rows), "two rows of the report have the same name"
    return named


def worse(old: Row, new: Row) -> list[str]:
    """What a row has lost since the table was made."""
    if new["error"]:
        return [new["error"]]
    lost = [
        f"{name} {old[name]} → {new[name]}" for name in FIGURES if new[name] > old[name] * TOLERANCE
    ]
    if old["tensor_op"] and not new["tensor_op"]:
        lost.append("no tensor-core instruction")
    return lost


@pytest.mark.parametrize("target", TARGETS)
def test_no_figure_is_worse_than_in_the_table(target: str) -> None:
    table = json.loads(TABLE.read_text())
    assert triton.__version__ == table["triton"], f"the table is of another Triton; {UPDATE}"
    old = by_name([row for row in table["rows"] if row["target"] == target])
    new = by_name(report(compiled_for(target))["rows"])
    assert old.keys() == new.keys(), f"other kernels or shapes than in the table; {UPDATE}"
    problems = [
        f"{' '.join(name)}: {', '.join(lost)}"
        for name, row in new.items()
        if (lost := worse(old[name], row))
    ]
    assert not problems, "\n".join([*problems, UPDATE])


@pytest.mark.parametrize(
    ("change", "is_worse"),
    [
        ({}, False),
        ({"instructions_per_unit": 101.9}, False),
        ({"instructions_per_unit": 102.1}, True),
        ({"instructions_per_unit": 50.0}, False),
        ({"spill_bytes": 4}, True),
        ({"registers": 66}, True),
        ({"registers": 32}, False),
        ({"tensor_op": None}, True),
        ({"error": "CompilationError"}, True),
    ],
)
def test_only_losses_count(change: dict[str, object], is_worse: bool) -> None:
    row = {
        **{"registers": 64, "spill_bytes": 0, "shared_bytes": 0, "bytes_per_unit": 8.0},
        **{"instructions_per_unit": 100.0, "tensor_op": "wgmma", "error": None},
    }
    assert bool(worse(row, row | change)) is is_worse
