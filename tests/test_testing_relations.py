"""Each metamorphic relation holds for a right kernel and fails on one that breaks it."""

import pytest
import torch

import right_kernels
from lightning_indexer.testing import reference, relations
from lightning_indexer.testing.attention_cases import SparseAttentionCase
from lightning_indexer.testing.attention_reference import (
    attention_error_bounds,
    sparse_mla_attention,
)
from lightning_indexer.testing.cases import CompactCase, MqaLogitsCase, SlotsCase, TopkCase
from lightning_indexer.testing.paged_cases import PagedMqaLogitsCase
from lightning_indexer.testing.regimes import FP8
from lightning_indexer.testing.relations import assert_equal

pytestmark = pytest.mark.once

ROWS = TopkCase(3, 40, 7, "rounded", torch.float32, "contiguous", "both", torch.int32, seed=5)
SCORES = MqaLogitsCase(5, 20, 2, 8, "fp32", True, "ties", "full", "contiguous", seed=1)
PAGED = PagedMqaLogitsCase(
    3, 1, 20, 2, 8, 4, ("nominal 4-D", FP8), "ragged", "ties", "contiguous", seed=2
)
COMPACT = CompactCase(9, (3, 4), 9, None, "reversed", torch.int32, "contiguous", seed=3)
SLOTS = SlotsCase(2, 9, 2, 3, 4, torch.int32, False, "contiguous", seed=4)
ATTENTION = SparseAttentionCase(
    2, 2, (16, 16), 30, 9, torch.float32, "normal", "some", "contiguous", seed=6
)


def select(inputs: dict) -> torch.Tensor:
    return reference.topk_indices(**inputs)


def score(inputs: dict) -> torch.Tensor:
    return reference.mqa_logits(**inputs)


def score_pages(inputs: dict) -> torch.Tensor:
    return reference.paged_mqa_logits(**inputs)


def distinct() -> dict:
    logits = relations.distinct_scores(3, 40, torch.float32, 1)
    return {"logits": logits, "k": 7, "row_starts": None, "row_ends": None}


def breaks(relation, kernel, right, *args) -> None:
    relation(right, *args)
    with pytest.raises(AssertionError):
        relation(kernel, *args)


def test_row_alone() -> None:
    def by_batch(inputs: dict) -> torch.Tensor:  # another rule for ties from two rows on
        if len(inputs["logits"]) == 1:
            return select(inputs)
        flipped = inputs | {"logits": inputs["logits"].flip(1)}
        return (inputs["logits"].shape[1] - 1 - select(flipped)).flip(1)

    inputs = ROWS.inputs() | {"row_starts": None, "row_ends": None}
    breaks(relations.row_alone, by_batch, select, inputs, assert_equal)


def test_window_is_slice() -> None:
    def without_start(inputs: dict) -> torch.Tensor:  # positions from column 0
        starts, got = inputs["row_starts"], select(inputs)
        return got if starts is None else torch.where(got < 0, got, got + starts[:, None].clamp(0))

    inputs = ROWS.inputs()
    breaks(relations.window_is_slice, without_start, select, inputs, assert_equal)
    relations.window_is_slice(without_start, inputs, assert_equal, "absolute")
    with pytest.raises(AssertionError):
        relations.window_is_slice(select, inputs, assert_equal, "absolute")


def test_keys_permuted() -> None:
    def first_half(inputs: dict) -> torch.Tensor:
        return select(inputs | {"logits": inputs["logits"][:, :20]})

    breaks(relations.keys_permuted, first_half, select, distinct(), 8)


def test_worse_keys_appended() -> None:
    def sampled(inputs: dict) -> torch.Tensor:  # every other key of long rows
        step = 1 if inputs["logits"].shape[1] <= 40 else 2
        return step * select(inputs | {"logits": inputs["logits"][:, ::step]})

    breaks(relations.worse_keys_appended, sampled, select, distinct())


def test_scores_doubled() -> None:
    def in_steps(inputs: dict) -> torch.Tensor:
        return select(inputs | {"logits": (inputs["logits"] * 2.0**21).round()})

    logits = {"logits": 1 + torch.rand(3, 40) * 2.0**-20}
    inputs = distinct() | logits
    breaks(relations.scores_doubled, in_steps, select, inputs, assert_equal)


def test_scored_keys_permuted() -> None:
    def by_place(inputs: dict) -> torch.Tensor:
        x = score(inputs)
        return x + 1e-9 * torch.arange(x.shape[1])

    breaks(relations.scored_keys_permuted, by_place, score, SCORES.inputs(), assert_equal)


def test_rows_split() -> None:
    def by_count(inputs: dict) -> torch.Tensor:
        return score(inputs) * (1 + 1e-9 * len(inputs["q"]))

    names = ("q", "weights", "row_starts", "row_ends")
    breaks(relations.rows_split, by_count, score, SCORES.inputs(), assert_equal, names)


def test_keys_split() -> None:
    def by_length(inputs: dict) -> torch.Tensor:
        return score(inputs) * (1 + 1e-9 * len(inputs["k"]))

    breaks(relations.keys_split, by_length, score, SCORES.inputs(), assert_equal)


def test_unseen_keys_changed() -> None:
    def masked_by_product(inputs: dict) -> torch.Tensor:  # NaN times 0 is NaN
        everywhere = (
            torch.zeros_like(inputs["row_starts"]),
            torch.full_like(inputs["row_ends"], len(inputs["k"])),
        )
        full = score(inputs | {"row_starts": everywhere[0], "row_ends": everywhere[1]})
        return full * score(inputs).isfinite()

    inputs = SCORES.inputs() | {
        "row_starts": torch.tensor([2] * 5),
        "row_ends": torch.tensor([9] * 5),
    }
    breaks(relations.unseen_keys_changed, masked_by_product, score, inputs, assert_equal)


def test_weights_doubled() -> None:
    def with_a_constant(inputs: dict) -> torch.Tensor:
        return score(inputs) + 1e-6

    breaks(relations.weights_doubled, with_a_constant, score, SCORES.inputs())


def test_pages_renumbered() -> None:
    def by_page(inputs: dict) -> torch.Tensor:  # page ids for positions
        table = torch.arange(inputs["block_table"].numel()).view_as(inputs["block_table"])
        return score_pages(inputs | {"block_table": table.int()})

    inputs = PAGED.inputs(hostile=False)
    breaks(relations.pages_renumbered, by_page, score_pages, inputs, 3, assert_equal)


@pytest.mark.parametrize("nth", [2, 3])
def test_pages_elsewhere_and_contiguous_pages_are_both_compared(nth: int) -> None:
    calls = []

    def wrong_once(inputs: dict) -> torch.Tensor:
        calls.append(1)
        return score_pages(inputs) * (2 if len(calls) == nth else 1)

    with pytest.raises(AssertionError):
        relations.pages_renumbered(wrong_once, PAGED.inputs(hostile=False), 3, assert_equal)
    assert len(calls) == nth


def test_compacted_together() -> None:
    def first_alone(buffers: list, rows: torch.Tensor) -> list:
        right_kernels.compact(buffers[0], rows)
        return buffers

    def each(buffers: list, rows: torch.Tensor) -> list:
        for buffer in buffers:
            right_kernels.compact(buffer, rows)
        return buffers

    breaks(relations.compacted_together, first_alone, each, COMPACT.buffers(), COMPACT.rows())


def test_compacted_twice() -> None:
    def right(buffers: list, rows: torch.Tensor) -> list:
        return [reference.compact_topk_indices(b, rows) for b in buffers]

    def forward(buffers: list, rows: torch.Tensor) -> list:
        for i, row in enumerate(rows.tolist()):
            buffers[0][i] = buffers[0][row]
        return buffers

    rows = torch.tensor([3, 0, 1, 5, 2, 7])
    breaks(relations.compacted_twice, forward, right, COMPACT.buffers()[0], rows)


def convert(inputs: dict) -> torch.Tensor:
    return reference.indices_to_slots(**inputs)


def slots_inputs() -> dict:
    names = ("indices", "block_table", "row_to_request")
    return dict(zip(names, SLOTS.tensors(), strict=True)) | {"page_size": SLOTS.page_size}


def test_table_expanded() -> None:
    def pages_of_4(inputs: dict) -> torch.Tensor:
        return convert(inputs | {"page_size": 4})

    breaks(relations.table_expanded, pages_of_4, convert, slots_inputs())


def test_indices_permuted() -> None:
    def sorted_first(inputs: dict) -> torch.Tensor:
        return convert(inputs | {"indices": inputs["indices"].sort(dim=1).values})

    breaks(relations.indices_permuted, sorted_first, convert, slots_inputs(), 1)


def test_absent_indices_appended() -> None:
    def attend(inputs: dict) -> torch.Tensor:
        return sparse_mla_attention(**inputs)[0]

    def mean_over_width(inputs: dict) -> torch.Tensor:
        return attend(inputs) / inputs["indices"].shape[1]

    inputs = ATTENTION.inputs()
    breaks(relations.absent_indices_appended, mean_over_width, attend, inputs, assert_equal)


def test_attention_merged() -> None:
    def attend(inputs: dict) -> tuple[torch.Tensor, ...]:
        return sparse_mla_attention(**inputs)

    def base_2(inputs: dict) -> tuple[torch.Tensor, ...]:
        out, lse = attend(inputs)
        return out, lse * 1.4427

    inputs = ATTENTION.inputs()
    bounds = attention_error_bounds(**inputs, operand=2.0**-24)
    breaks(relations.attention_merged, base_2, attend, inputs, bounds)
