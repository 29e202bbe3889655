"""The report on compiled kernels: its rows, its estimate, its cache and its command."""

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from lightning_indexer.cli import app
from lightning_indexer.offline import pool
from lightning_indexer.offline.case import TARGETS, Work
from lightning_indexer.offline.compile import CompiledKernel, all_cases
from lightning_indexer.offline.count import Count
from lightning_indexer.offline.machine import estimate, resident_programs
from lightning_indexer.offline.report import report, to_json

pytest.importorskip("triton")
pytestmark = pytest.mark.once

FIELDS = {
    *("op", "kernel", "case", "target", "dtype", "default", "shape", "config", "error"),
    *("registers", "spill_bytes", "shared_bytes", "occupancy", "tensor_op", "unit"),
    *("instructions_per_unit", "loop_instructions_per_unit", "fallback_instructions"),
    *("bytes_per_unit", "estimate_us", "estimate_parts_us"),
}
DTYPES = {"bf16", "fp16", "fp32", "fp8", "int32"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("compiled")


def run(folder, *arguments: str):
    return CliRunner().invoke(
        app, ["compile-report", "--cache", str(folder), *arguments], env={"COLUMNS": "120"}
    )


def test_report_is_printed_and_written(folder, tmp_path):
    file = tmp_path / "report.json"
    options = ["--op", "indices_to_slots", "--targets", "sm_90,gfx942"]
    result = run(folder, *options, "--json", str(file))
    assert result.exit_code == 0, result.output
    for word in (
        "indices_to_slots, per index",
        "sm_90",
        "gfx942",
        "estimate",
        "132 SMs",
        "4.8 TB/s",
    ):
        assert word in result.output
    assert max(map(len, result.output.splitlines())) <= 120

    written = json.loads(file.read_text())
    assert written["machine"]["flops"]["fp8"] == 1979e12
    rows = written["rows"]
    assert {row["target"] for row in rows} == {"sm_90", "gfx942"}
    for row in rows:
        assert row.keys() == FIELDS
        assert row["kernel"] == "_indices_to_slots_kernel"
        assert row["dtype"] in DTYPES
        assert row["registers"] > 0 and row["spill_bytes"] == 0
        assert row["instructions_per_unit"] > 1
        assert row["occupancy"]["programs"] > 0
        assert (row["estimate_us"] is not None) == (row["target"] == "sm_90")

    kept = {file: file.stat().st_mtime_ns for file in (folder / "kernels").iterdir()}
    again = run(folder, *options, "--json", "-")
    assert json.loads(again.stdout) == written
    assert "indices_to_slots, per index" in again.stderr
    assert {file: file.stat().st_mtime_ns for file in (folder / "kernels").iterdir()} == kept


def test_a_damaged_cache_entry_is_made_again(folder):
    case, known = pool.compile_all(["sm_90"], "indices_to_slots", folder=folder)[0]
    for file in (folder / "kernels").iterdir():
        file.write_text("{")
    assert pool.compile_all(["sm_90"], "indices_to_slots", folder=folder)[0] == (case, known)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--targets", "sm_90,sm_70"], "got 'sm_70'"),
        (["--op", "softmax", "--targets", "sm_90"], "no kernel of an op 'softmax'"),
        (["--jobs", "0"], "greater than or equal to 1"),
    ],
)
def test_a_bad_request_is_refused_with_exit_code_2(folder, arguments, says):
    result = run(folder, *arguments)
    assert result.exit_code == 2
    assert says in " ".join(result.output.replace("│", " ").split())


@pytest.mark.parametrize("target", TARGETS)
def test_every_case_states_its_work_and_has_a_name_of_its_own(target):
    cases = list(all_cases(TARGETS[target]))
    names = {(case.op, case.kernel.__name__, case.label) for case in cases}
    assert len(names) == len(cases)
    for case in cases:
        assert case.work, f"{case.op} [{case.label}] states no work"
        assert case.dtype in DTYPES
        shapes = [str(work.shape) for work in case.work]
        assert len(set(shapes)) == len(shapes)
        for work in case.work:
            assert work.units > 0 and work.programs > 0 and work.bytes > 0
            assert work.flops > 0 or case.tensor_op is None


WORK = Work("query x key", {"T": 4096, "L": 65536}, 1024, 262144, bytes=44, flops=2 * 64 * 128)
CASE = replace(next(all_cases(TARGETS["sm_90"])), label="toy", dtype="bf16", work=(WORK,))
KERNEL = CompiledKernel(
    *("mqa_logits", "toy", "sm_90"),
    **{"registers": 128, "shared_bytes": 32768, "warps": 4},
    counts=(Count(1000.0, 900.0, 50),),
)


@pytest.mark.parametrize(
    "broken",
    [
        replace(KERNEL, spill_bytes=8),
        replace(KERNEL, error="no way", counts=()),
        replace(KERNEL, uncounted="no trips", counts=()),
    ],
)
def test_what_spills_or_does_not_compile_ends_with_exit_code_1(folder, monkeypatch, broken):
    monkeypatch.setattr(pool, "compile_all", lambda *_, **__: [(CASE, broken)])
    result = run(folder)
    assert result.exit_code == 1
    assert (broken.error or broken.uncounted or " 8 ") in result.output


def test_a_compiler_that_crashes_costs_one_row(folder, monkeypatch):
    known = list(all_cases(TARGETS["sm_90"]))
    monkeypatch.setattr(pool, "all_cases", lambda _: [*known, replace(CASE, op="no such case")])
    ((_, kernel),) = pool.compile_all(["sm_90"], "no such case", folder=folder)
    assert kernel.error is not None
    assert "ended with code 1" in kernel.error and "IndexError" in kernel.error


@pytest.mark.parametrize(
    ("target", "registers", "shared", "warps", "programs"),
    [
        ("sm_90", 128, 0, 4, 4),  # 65536 registers
        ("sm_90", 129, 0, 4, 3),  # … given out 8 a thread
        ("sm_90", 32, 100 << 10, 4, 2),  # 228 KiB
        ("sm_90", 32, 0, 4, 16),  # 64 warps
        ("sm_90", 32, 0, 1, 32),  # 32 programs
        ("sm_120", 32, 0, 4, 12),
        ("gfx942", 128, 0, 4, 4),
        ("gfx942", 64, 33 << 10, 4, 1),
    ],
)
def test_occupancy_is_what_the_scarcest_resource_allows(target, registers, shared, warps, programs):
    kernel = replace(KERNEL, target=target, registers=registers, shared_bytes=shared, warps=warps)
    assert resident_programs(kernel) == programs


def test_estimate_follows_the_machine():
    (count,) = KERNEL.counts
    parts = estimate(KERNEL, WORK, count, "fp8")
    assert parts["issue"] == pytest.approx(1000 * 4 * 262144 / (132 * 4 * 1.83e3))
    assert parts["memory"] == pytest.approx(44 * 4096 * 65536 / 4.8e6)
    assert parts["tensor"] == pytest.approx(2220, rel=0.01)
    assert estimate(KERNEL, WORK, count, "bf16")["tensor"] == pytest.approx(2 * 2220, rel=0.01)
    assert "tensor" not in estimate(KERNEL, replace(WORK, flops=0), count, "int32")


def test_a_row_says_what_a_unit_costs():
    both = replace(CASE, dtype="fp8", work=(WORK, replace(WORK, shape={"L": 128}, reads=1.5)))
    first, second = report([(both, replace(KERNEL, counts=KERNEL.counts * 2))])["rows"]
    assert first["instructions_per_unit"] == 1000 * 128 / 1024
    assert first["loop_instructions_per_unit"] == 900 * 128 / 1024
    assert first["estimate_us"] == max(first["estimate_parts_us"].values())
    assert "reads" not in first and second["reads"] == 1.5
    assert second["shape"] == {"L": 128}
    assert (
        len(to_json(report([(both, replace(KERNEL, counts=KERNEL.counts * 2))])).splitlines()) == 4
    )
