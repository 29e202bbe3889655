"""The rows of `lightning-indexer compile-report`, and the same as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from .case import TARGETS, CompileCase, Work
from .compile import CompiledKernel, warp_size
from .count import Count
from .machine import H200, estimate, resident_programs
from .pool import Compiled

Row = dict[str, Any]


def report(compiled: Sequence[Compiled]) -> dict[str, Any]:
    """Triton's version, the machine of the estimates, and a row for each work of each case."""
    import triton

    return {
        "triton": triton.__version__,
        "machine": asdict(H200),
        "rows": [row for case, kernel in compiled for row in _rows(case, kernel)],
    }


def to_json(report: dict[str, Any]) -> str:
    """`report`, with a line for each row."""
    head = {name: value for name, value in report.items() if name != "rows"}
    rows = ",\n".join(json.dumps(row, ensure_ascii=False) for row in report["rows"])
    return f'{json.dumps(head)[:-1]}, "rows": [\n{rows}\n]}}\n'


def _rows(case: CompileCase, kernel: CompiledKernel) -> list[Row]:
    counts: Sequence[Count | None] = kernel.counts or [None] * len(case.work)
    return [_row(case, kernel, *pair) for pair in zip(case.work, counts, strict=True)]


def _row(case: CompileCase, kernel: CompiledKernel, work: Work, count: Count | None) -> Row:
    row: Row = {
        "op": case.op,
        "kernel": case.kernel.fn.__name__,
        "case": case.label,
        "target": kernel.target,
        "dtype": case.dtype,
        "default": case.default,
        "shape": dict(work.shape),
        "config": _config(case),
        "error": kernel.error or kernel.uncounted,
        "unit": work.unit,
    }
    if work.reads is not None:
        row["reads"] = work.reads
    if count is None:
        return row
    programs = resident_programs(kernel)
    threads = kernel.warps * warp_size(TARGETS[kernel.target])
    parts = None
    if kernel.target == H200.target:
        parts = {
            name: round(us, 3) for name, us in estimate(kernel, work, count, case.dtype).items()
        }
    return row | {
        "registers": kernel.registers,
        "spill_bytes": kernel.spill_bytes,
        "shared_bytes": kernel.shared_bytes,
        "occupancy": {"programs": programs, "warps": programs * kernel.warps},
        "tensor_op": ", ".join(kernel.tensor_ops) or None,
        "instructions_per_unit": round(count.instructions * threads / work.units, 2),
        "loop_instructions_per_unit": round(count.in_loops * threads / work.units, 2),
        "fallback_instructions": count.fallback,
        "bytes_per_unit": round(work.bytes, 3),
        "estimate_us": max(parts.values()) if parts else None,
        "estimate_parts_us": parts,
    }


def _config(case: CompileCase) -> dict[str, Any]:
    """The constants that shape a program: those in capitals, and the launch options."""
    constants = {
        name: value if isinstance(value, (int, float, str)) or value is None else str(value)
        for name, value in case.constexprs.items()
        if name.isupper()
    }
    return constants | {"num_warps": case.num_warps, "num_stages": case.num_stages}
