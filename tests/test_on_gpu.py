"""The properties of the other files, through the kernels as a GPU compiles and runs them."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings

from lightning_indexer.kernels.mqa_logits import mqa_logits
from lightning_indexer.kernels.paged_mqa_logits import paged_mqa_logits
from lightning_indexer.kernels.slots import indices_to_slots
from lightning_indexer.kernels.topk import topk_indices
from lightning_indexer.testing import reference
from lightning_indexer.testing.compare import assert_matches
from paged_scoring import PagedCase, paged_bound, paged_cases
from score_rows import RowsCase, row_cases
from scoring import FP8, ScoreCase, score_bound, score_cases
from test_slots import Case as SlotsCase
from test_slots import cases as slots_cases

pytestmark = pytest.mark.gpu

#: Every example may be another kernel to compile.
few = settings(max_examples=12)
#: fp8 tensor cores align products before adding them and keep some 13 bits of each, not 24.
COARSER = 2**11


def on_gpu(inputs: dict) -> dict:
    return {n: x.cuda() if isinstance(x, torch.Tensor) else x for n, x in inputs.items()}


@few
@given(case=score_cases)
def test_scores_are_the_formula(case: ScoreCase) -> None:
    inputs = dataclasses.replace(case, heads=24, head_dim=96, layout="contiguous").inputs()
    bound = score_bound(inputs["q"], inputs["k"], inputs["weights"], inputs["k_scale"])
    bound *= COARSER if inputs["q"].dtype == FP8 else 2
    got = mqa_logits(**on_gpu(inputs))
    assert_matches(got.cpu(), reference.mqa_logits(**inputs), bound)


@few
@given(case=paged_cases)
def test_paged_scores_are_the_formula(case: PagedCase) -> None:
    case = dataclasses.replace(case, heads=24, head_dim=96, page_size=16, layout="contiguous")
    inputs = case.inputs()
    bound = paged_bound(inputs) * (COARSER if inputs["q"].dtype == FP8 else 2)
    got = paged_mqa_logits(**on_gpu(inputs))
    assert_matches(got.cpu(), reference.paged_mqa_logits(**inputs), bound)


@few
@given(case=row_cases)
def test_selects_what_sorting_selects(case: RowsCase) -> None:
    case = dataclasses.replace(case, windows="both", bound_dtype=torch.int32)
    logits, bounds = case.logits(), case.bounds()
    got = topk_indices(logits.cuda(), case.k, *(x.cuda() for x in bounds))
    assert torch.equal(got.cpu(), reference.topk_indices(logits, case.k, *bounds))


@few
@given(case=slots_cases)
def test_slot_is_page_times_size_plus_offset(case: SlotsCase) -> None:
    tensors = case.tensors()
    got = indices_to_slots(*(x.cuda() for x in tensors), case.page_size)
    assert torch.equal(got.cpu(), reference.indices_to_slots(*tensors, case.page_size))
