"""What `write_mla_kv` compiles: each dtype of keys, both formats of scales."""

from __future__ import annotations

from ..kernels.backend import Target, triton
from ..kernels.sparse_mla_rows import ROPE, ROW_BYTES, VALUES
from ..kernels.write_mla_kv import _write_mla_kv_kernel, write_constants
from .case import CompileCase, Work
from .mqa_logits import DTYPES

_ROWS = 8192


def cases(target: Target) -> list[CompileCase]:
    """Contiguous keys and rows, as engines have them; the code is the same on every target."""
    return [
        _case("bf16", "i64", ue8m0=False),
        _case("fp16", "i64", ue8m0=True),
        _case("fp32", "i32", ue8m0=False),
    ]


def _case(kv: str, slots: str, ue8m0: bool) -> CompileCase:
    constants = write_constants(ue8m0)
    block_n, block_s = constants["BLOCK_N"], constants["BLOCK_S"]
    later = (_ROWS + block_n) / 2  # slots from a program's first key to the last, on average
    size = (8 if slots == "i64" else 4) * (1 + later / block_n)
    pointers = {
        "values_ptr": "*u8",
        "scales_ptr": "*fp32",
        "rope_ptr": "*bf16",
        "kv_ptr": f"*{kv}",
        "slots_ptr": f"*{slots}",
    }
    constants |= {"stride_kd": 1, "stride_slots": 1}
    signature = {
        name: pointers.get(name, "i32")
        for name in _write_mla_kv_kernel.arg_names
        if name not in constants
    }
    return CompileCase(
        "write_mla_kv",
        f"{kv}→rows{' ue8m0' if ue8m0 else ''}",
        _write_mla_kv_kernel,
        signature,
        constants,
        # rows are 656 = 41·16 bytes apart, but 164 scales and 328 RoPE values
        divisible=(*pointers, "stride_v", "stride_kn", "capacity", "n"),
        dtype="fp8",
        work=(
            Work(
                unit="key",
                shape={"n": _ROWS, "Dqk": VALUES + ROPE},
                units=block_n,
                programs=triton.cdiv(_ROWS, block_n),
                bytes=(VALUES + ROPE) * DTYPES[kv][2] + ROW_BYTES + size,
                trips={"_last_writer": later / block_s},
            ),
        ),
    )
