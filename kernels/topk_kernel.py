"""The Triton kernels of `topk_indices`: exact, one read of a row as a rule, five at most.

A short row is compared in registers as it is. Of a longer one a sample gives a threshold that
rather more than k scores reach; one read flags those in words of 32 bits, and from the words their
positions are listed, ascending. The listed keys are compared in registers, ties go to the first.
If the flags show that the sample lied, digits of keys are counted until a bracket is certain, and
the row is flagged once more. A few long rows are sampled, flagged and finished by three launches,
so that several programs flag a row.
"""

from __future__ import annotations

import torch

from .backend import Target, multiprocessors, on_device_of, target_of, tl, triton
from .topk_bracket import NO_HI, ONE_WORD, sample_bracket
from .topk_finish import finish_row
from .topk_keys import MIN_KEY
from .topk_plan import TopkPlan, plan_topk
from .topk_row import flag_row, locate_row
from .topk_split import STATE_FIELDS, _finish_kernel, _flag_kernel, _sample_kernel


def launch_topk(
    logits: torch.Tensor,
    k: int,
    row_starts: torch.Tensor | None,
    row_ends: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Writes the selection of every row of `logits` [T, L] to `out` [T, k]."""
    rows, length = logits.shape
    target = target_of(logits.device)
    plan = plan_topk(target, multiprocessors(logits.device), rows, length)
    x_args = (
        *(logits, *logits.stride()),
        *(row_starts, 0 if row_starts is None else row_starts.stride(0)),
        *(row_ends, 0 if row_ends is None else row_ends.stride(0)),
        length,
    )
    constants = launch_constants(plan, target, logits.stride(1))
    words, ints = plan.scratch(length)
    launch_rows = plan.launch_rows
    scratch = logits.new_empty((launch_rows, ints), dtype=torch.int32) if ints else None
    scratch_args = (scratch, ints, words)
    out_args = (out, *out.stride(), k)
    with on_device_of(out):
        if plan.splits > 1:
            state = logits.new_empty((rows, STATE_FIELDS + 2 * plan.splits), dtype=torch.int32)
            state_args = (state, state.stride(0))
            _sample_kernel[(rows,)](*x_args, *state_args, k, **constants)
            _flag_kernel[(rows, plan.splits)](*x_args, *scratch_args, *state_args, **constants)
            _finish_kernel[(rows,)](
                *x_args, *scratch_args, *out_args, *state_args, plan.splits, **constants
            )
            return
        for first_row in range(0, rows, launch_rows):
            grid = (min(launch_rows, rows - first_row),)
            _topk_kernel[grid](*x_args, *scratch_args, *out_args, first_row, **constants)


def launch_constants(plan: TopkPlan, target: Target, stride_xl: int) -> dict[str, int | bool]:
    """What all four kernels are compiled with.

    128 registers leave room for two programs of 256 threads on a multiprocessor; ptxas takes more
    where it may (the one of Triton 3.6 twice as many). Strided scores need them for addresses.
    """
    constants: dict[str, int | bool] = {
        "CAPACITY": plan.capacity,
        "SAMPLES": plan.samples,
        "THREADS": plan.threads,
        "POP_WORDS": plan.pop_words,
        "HISTOGRAM": plan.histogram,
        "UNIT_STRIDE": stride_xl == 1,
        "num_warps": max(plan.threads // (64 if target.backend == "hip" else 32), 1),
    }
    if target.backend == "cuda" and stride_xl == 1:
        constants["maxnreg"] = 128
    return constants


@triton.jit(do_not_specialize=["first_row"])
def _topk_kernel(
    x_ptr,
    stride_xt,
    stride_xl,
    starts_ptr,
    stride_starts,
    ends_ptr,
    stride_ends,
    L,
    scratch_ptr,
    stride_scratch,
    words,  # a row's words of one kind
    out_ptr,
    stride_ot,
    stride_ok,
    k,
    first_row,
    CAPACITY: tl.constexpr,
    SAMPLES: tl.constexpr,
    THREADS: tl.constexpr,
    POP_WORDS: tl.constexpr,
    HISTOGRAM: tl.constexpr,
    UNIT_STRIDE: tl.constexpr,
):
    """The whole rule; scratch is that of the launch, whose first row is `first_row`."""
    program = tl.program_id(0).to(tl.int64)
    row = first_row + program
    row_ptr, skip, n = locate_row(
        x_ptr, stride_xt, stride_xl, starts_ptr, stride_starts, ends_ptr, stride_ends, L, row
    )
    lo = tl.full((), MIN_KEY, tl.uint32)
    hi = tl.full((), NO_HI, tl.uint32)
    form = tl.full((), ONE_WORD, tl.int32)
    inside = tl.full((), 0, tl.int32)
    above = tl.full((), 0, tl.int32)
    if SAMPLES > 0:
        scratch_ptr += program * stride_scratch
        if n > CAPACITY:
            lo, hi, form = sample_bracket(
                row_ptr, stride_xl, skip, n, k, CAPACITY, SAMPLES, UNIT_STRIDE
            )
            inside, above = flag_row(
                *(
                    row_ptr,
                    stride_xl,
                    scratch_ptr + CAPACITY + 1,
                    words,
                    skip,
                    0,
                    n,
                    n,
                    lo,
                    hi,
                    form,
                ),
                *(THREADS, UNIT_STRIDE),
            )
            tl.debug_barrier()
    finish_row(
        *(row_ptr, stride_xl, scratch_ptr, words, skip, n, k, lo, hi, form, inside, above),
        *(out_ptr + row * stride_ot, stride_ok),
        *(CAPACITY, SAMPLES, THREADS, POP_WORDS, HISTOGRAM, UNIT_STRIDE),
    )
