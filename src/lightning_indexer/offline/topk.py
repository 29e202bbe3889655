"""What `topk_indices` compiles: long rows by one launch and by three, short rows, odd strides."""

from __future__ import annotations

from typing import Any

from ..kernels.backend import Target, triton
from ..kernels.topk_kernel import _topk_kernel, launch_constants
from ..kernels.topk_plan import TopkPlan, plan_topk
from ..kernels.topk_split import _finish_kernel, _flag_kernel, _sample_kernel
from .case import CompileCase, Work

#: Of an H200; it decides how many programs share a long row.
MULTIPROCESSORS = 132
ITEM_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}
K = 2048

#: What rows of random scores take by (L, scores), k = 2048: rounds of the search in the sample and
#: in the list, the most flags of a word among those popped together, candidates listed. Means over
#: rows Σ_h w·relu(q·k), H = 64, with weights of both signs and positive ones; a test repeats it.
ROUNDS: dict[tuple[int, str], tuple[float, float, float, float]] = {
    (4096, "signed"): (0, 16.8, 0, 0),
    (4096, "positive"): (0, 21.1, 0, 0),
    (65536, "signed"): (12.5, 13.0, 6.5, 3069),
    (65536, "positive"): (14.4, 12.5, 6.7, 3077),
    (131072, "signed"): (13.1, 12.5, 4.8, 3103),
    (131072, "positive"): (14.8, 13.4, 4.8, 3259),
    (524288, "signed"): (13.8, 13.6, 3.2, 5083),
    (524288, "positive"): (15.3, 13.7, 3.2, 5023),
}

#: What a row executes nothing of if its sample does not lie and no ties straddle the last place.
_SKIPPED = {
    "sample": ("sample_bracket:else#1", "sample_bracket:then#2"),
    "flag": ("flag_row:else#1", "_load_tile:else#1"),
    "finish": ("_flag_for_certain", "finish_row:then#4", "_write_joined"),
    "short": ("_choose:then#1",),
}
_PARTS = {
    _topk_kernel: ("sample", "flag", "finish"),
    _sample_kernel: ("sample",),
    _flag_kernel: ("flag",),
    _finish_kernel: ("finish",),
}


def cases(target: Target) -> list[CompileCase]:
    """One program a row in every dtype; the three launches; short rows; strided scores."""
    return [
        *(_case(target, 4096, length, "fp32") for length in (65536, 131072, 524288)),
        *(_case(target, 4096, 65536, dtype) for dtype in ("fp16", "bf16")),
        _case(target, 4096, 4096, "fp32"),
        _case(target, 4096, 777, "fp32", k=100),
        _case(target, 4096, 65537, "fp32", k=512, contiguous=False),
        *(
            _case(target, 64, 65536, "fp32", kernel=kernel)
            for kernel in (_sample_kernel, _flag_kernel, _finish_kernel)
        ),
    ]


def _case(
    target: Target,
    rows: int,
    length: int,
    dtype: str,
    *,
    k: int = K,
    contiguous: bool = True,
    kernel: Any = _topk_kernel,
) -> CompileCase:
    plan = plan_topk(target, MULTIPROCESSORS, rows, length)
    constants: dict[str, Any] = dict(launch_constants(plan, target, 1 if contiguous else 3))
    num_warps, max_registers = constants.pop("num_warps"), constants.pop("maxnreg", None)
    constants |= {"stride_starts": 1, "stride_ends": 1}
    if contiguous:
        constants |= {"stride_xl": 1, "stride_ok": 1}
    if not plan.samples:
        constants |= {"scratch_ptr": None, "stride_scratch": 0, "words": 0}
    names = kernel.arg_names
    pointers = {n: f"*{dtype}" if n == "x_ptr" else "*i32" for n in names if n.endswith("_ptr")}
    sizes = {"stride_xt": length, "L": length, "stride_ot": k, "k": k}
    divisible = (*pointers, "stride_scratch", "words", *(n for n in sizes if sizes[n] % 16 == 0))
    signature = {n: pointers.get(n, "i32") for n in names if n not in constants}
    kinds = [scores for scores in ("signed", "positive") if (length, scores) in ROUNDS]
    return CompileCase(
        "topk_indices",
        f"{dtype} L={length} k={k}" + ("" if contiguous else " strided"),
        kernel,
        signature=signature,
        constexprs={n: value for n, value in constants.items() if n in names},
        num_warps=num_warps,
        max_registers=max_registers,
        divisible=tuple(n for n in divisible if n in signature),
        dtype=dtype,
        work=tuple(
            _work(kernel, plan, rows, length, dtype, k, scores) for scores in kinds or ["signed"]
        ),
    )


def _work(
    kernel: Any, plan: TopkPlan, rows: int, length: int, dtype: str, k: int, scores: str
) -> Work:
    """A launch over full rows of random scores; odd shapes take the rounds of the nearest."""
    parts = _PARTS[kernel] if plan.samples else ("short",)
    known = length if (length, scores) in ROUNDS else 65536 if plan.samples else 4096
    sampled, chosen, popped, listed = ROUNDS[known, scores]
    item = ITEM_BYTES[dtype]
    words = triton.cdiv(length, 32)
    splits = plan.splits if parts == ("flag",) else 1
    trips = {
        "sample": {"sample_bracket/find_key": sampled},
        "flag": {"write_words": length / plan.tile / splits},
        "finish": {
            "order_words": triton.cdiv(words, 8 * plan.threads),
            "finish_row/pop_words#1": words / max(plan.pop_words, 1),
            "finish_row/pop_words#2": popped,
            "_choose/find_key": chosen,
            "_write_nothing": 0,
        },
        "short": {"_choose/find_key": chosen, "_write_nothing": 0},
    }
    moved = {
        "sample": item * plan.samples,
        "flag": item * length + 4 * words,
        "finish": 3 * 4 * words + (item + 8) * listed + 4 * k,
        "short": item * length + 4 * k,
    }
    own_loop = {"_finish_kernel": plan.splits} if parts == ("finish",) else {}
    skipped = _SKIPPED["short"] if "finish" in parts else ()
    return Work(
        unit="element",
        shape={"T": rows, "L": length, "k": k, "scores": scores},
        units=length / splits,
        programs=rows * splits,
        bytes=sum(moved[part] for part in parts) / length,
        trips=own_loop | {name: n for part in parts for name, n in trips[part].items()},
        skipped=(*skipped, *(name for part in parts for name in _SKIPPED[part])),
        reads=1.0 if {"flag", "short"} & set(parts) else 0.0,
    )
