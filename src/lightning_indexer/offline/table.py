"""The report of compiled kernels as a person reads it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from .report import Row

_COLUMNS = ("target", "regs", "spill", "shared", "per SM", "tensor op", "instr", "bytes")
_TENSOR_OP = re.compile(r"(wgmma|tcgen05|mma|mfma)")


@contextmanager
def compile_bar() -> Iterator[Callable[[int, int], None]]:
    """A progress bar on standard error; yields the callback to hand to the compiler pool."""
    columns = (TextColumn("compiling"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def print_report(report: dict[str, Any], console: Console) -> None:
    """A table for each op, and what its figures mean."""
    for op in dict.fromkeys(row["op"] for row in report["rows"]):
        console.print(_table(op, [row for row in report["rows"] if row["op"] == op]))
    errors = {
        f"{row['op']} [{row['case']}] {row['target']}: {row['error']}"
        for row in report["rows"]
        if row["error"]
    }
    for error in sorted(errors):
        console.print(error, style="red", markup=False, highlight=False)
    machine = report["machine"]
    rates = ", ".join(f"{rate / 1e12:.4g} TF {dtype}" for dtype, rate in machine["flops"].items())
    console.print(
        f"Triton {report['triton']}. instr: thread-instructions, bytes: bytes moved, both per unit"
        " of work; per SM: resident programs (warps).\n"
        "The time is an [bold]estimate[/bold], the greatest of issue, memory and tensor time on an"
        f" {machine['name']}: {machine['multiprocessors']} SMs × {machine['issue_slots']} issue"
        f" slots at {machine['clock_hz'] / 1e9} GHz, {machine['memory_bytes_per_s'] / 1e12} TB/s,"
        f" {rates}. Real times are longer."
    )


def _table(op: str, rows: list[Row]) -> Table:
    units = list(dict.fromkeys(row["unit"] for row in rows))
    kernels = {row["kernel"] for row in rows}
    table = Table(title=f"{op}, per {' or '.join(units)}", title_justify="left", box=None)
    table.add_column("kernel", max_width=38)
    for name in _COLUMNS:
        left = name in ("target", "tensor op")
        table.add_column(name, justify="left" if left else "right", no_wrap=not left)
    table.add_column("estimate µs, H200", justify="right", min_width=8, max_width=16)
    by_launch = sorted(rows, key=lambda row: _launch(rows, row))
    for _, group in groupby(by_launch, key=_name):
        launch = list(group)
        names = _described(
            launch[0], several_kernels=len(kernels) > 1, several_units=len(units) > 1
        )
        for i in range(max(len(names), len(launch))):
            cells = _cells(launch[i]) if i < len(launch) else []
            table.add_row(names[i] if i < len(names) else "", *cells)
        table.add_row()
    return table


def _launch(rows: list[Row], row: Row) -> int:
    """The place of the first row with the same case and shape: targets side by side."""
    return next(i for i, other in enumerate(rows) if _name(other) == _name(row))


def _name(row: Row) -> tuple[str, str, str]:
    return row["kernel"], row["case"], str(row["shape"])


def _described(row: Row, several_kernels: bool, several_units: bool) -> list[str]:
    """The kernel, the case, what of the shape that leaves out, and the unit, where they differ."""
    shape = [f"{name}={size}" for name, size in row["shape"].items()]
    case = row["case"].split()
    lines = [row["kernel"]] if several_kernels else []
    lines += [row["case"], " ".join(size for size in shape if size not in case)]
    if "reads" in row:
        lines[-1] += f" reads={row['reads']:g}"
    if several_units:
        lines.append(f"per {row['unit']}")
    return lines


def _cells(row: Row) -> list[str]:
    if row["error"]:
        return [row["target"], "[red]error[/red]"]
    spill = row["spill_bytes"]
    occupancy = row["occupancy"]
    parts = row["estimate_parts_us"]
    limit = max(parts, key=parts.get) if parts else ""
    return [
        row["target"],
        str(row["registers"]),
        f"[red]{spill}[/red]" if spill else "0",
        str(row["shared_bytes"]),
        f"{occupancy['programs']} ({occupancy['warps']})",
        _short(row["tensor_op"]),
        f"{row['instructions_per_unit']:,.1f}",
        f"{row['bytes_per_unit']:,.1f}",
        f"{row['estimate_us']:,.1f} {limit}" if parts else "–",
    ]


def _short(tensor_op: str | None) -> str:
    """The instruction's family and the type it multiplies."""
    if tensor_op is None:
        return "–"
    op = tensor_op.split(", ")[0]
    found = _TENSOR_OP.search(op)
    kinds = re.findall(r"e4m3|f8f6f4|bf16|tf32|f16|fp8", op.rpartition("x")[2] + op)
    return f"{found[1] if found else op} {kinds[0] if kinds else ''}".strip()
