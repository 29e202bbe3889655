"""What the target GPUs hold, and the time a launch takes at least on an H200: an estimate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .case import Work
from .compile import CompiledKernel
from .count import Count


@dataclass(frozen=True)
class Multiprocessor:
    """What one multiprocessor (AMD: compute unit) shares among its resident programs.

    `registers` are 32-bit registers, given to a warp in units of `register_unit`;
    `reserved_shared` bytes go to each program beside its own.
    """

    registers: int
    register_unit: int
    shared_bytes: int
    reserved_shared: int
    warps: int
    programs: int
    lanes: int


#: From NVIDIA's tables of compute capabilities 8.0, 9.0, 10.0 and 12.0, and AMD's CDNA3 ISA guide
#: (four SIMDs, each with 512 registers for each of 64 lanes and 8 waves).
MULTIPROCESSORS = {
    "sm_80": Multiprocessor(65536, 256, 164 << 10, 1024, 64, 32, 32),
    "sm_90": Multiprocessor(65536, 256, 228 << 10, 1024, 64, 32, 32),
    "sm_100": Multiprocessor(65536, 256, 228 << 10, 1024, 64, 32, 32),
    "sm_120": Multiprocessor(65536, 256, 100 << 10, 1024, 48, 24, 32),
    "gfx942": Multiprocessor(4 * 512 * 64, 8 * 64, 64 << 10, 0, 32, 16, 64),
}


def resident_programs(kernel: CompiledKernel) -> int:
    """Programs of a kernel that one multiprocessor runs at a time."""
    unit = MULTIPROCESSORS[kernel.target]
    of_warp = -(-kernel.registers * unit.lanes // unit.register_unit) * unit.register_unit
    limits = [
        unit.programs,
        unit.warps // kernel.warps,
        unit.registers // max(of_warp, 1) // kernel.warps,
    ]
    if shared := kernel.shared_bytes + unit.reserved_shared:
        limits.append(unit.shared_bytes // shared)
    return min(limits)


@dataclass(frozen=True)
class Machine:
    """The machine of the estimates; `flops` by the dtype that is multiplied (fp32: FMA units)."""

    name: str
    target: str
    multiprocessors: int
    issue_slots: int
    clock_hz: float
    memory_bytes_per_s: float
    flops: Mapping[str, float]


H200 = Machine(
    name="H200",
    target="sm_90",
    multiprocessors=132,
    issue_slots=4,
    clock_hz=1.83e9,
    memory_bytes_per_s=4.8e12,
    flops={"fp8": 1979e12, "bf16": 990e12, "fp16": 990e12, "fp32": 61.8e12},
)


def estimate(kernel: CompiledKernel, work: Work, count: Count, dtype: str) -> dict[str, float]:
    """Microseconds on an H200 for issuing instructions, moving bytes, and tensor operations.

    Each part as if the others were free and the machine always full; the launch takes at least the
    greatest of them.
    """
    units = work.units * work.programs
    slots = H200.multiprocessors * H200.issue_slots * H200.clock_hz
    parts = {
        "issue": count.instructions * kernel.warps * work.programs / slots,
        "memory": work.bytes * units / H200.memory_bytes_per_s,
    }
    if work.flops:
        parts["tensor"] = work.flops * units / H200.flops[dtype]
    return {name: seconds * 1e6 for name, seconds in parts.items()}
