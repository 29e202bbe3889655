"""Guarded memory sees every byte that a kernel has no business with."""

import ctypes

import pytest
import torch

from lightning_indexer.kernels.mqa_logits import mqa_logits
from lightning_indexer.testing.allocations import guarded_allocations
from lightning_indexer.testing.calls import call_for_result, guarded_call
from lightning_indexer.testing.canary import CanaryError, Guarded
from lightning_indexer.testing.layouts import LAYOUTS, laid_out
from lightning_indexer.testing.regimes import FP8

pytestmark = [pytest.mark.once, pytest.mark.usefixtures("uncounted")]

DTYPES = (torch.uint8, FP8, torch.bfloat16, torch.float16, torch.float32, torch.int32, torch.int64)


def write_byte(x: torch.Tensor, place: int) -> None:
    """Behind torch's back, as a kernel does."""
    ctypes.memset(x.data_ptr() + place, 0x11, 1)


def last_byte(x: torch.Tensor) -> int:
    return sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) * x.element_size() + (
        x.element_size() - 1
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_byte_on_either_side_of_an_input_is_seen(dtype: torch.dtype, layout: str) -> None:
    x = laid_out(torch.ones(3, 5).to(dtype), layout)
    guarded_call(lambda x: None, {"x": x})
    with pytest.raises(CanaryError, match=r"x: 1 bytes written .* byte 1 before its first"):
        guarded_call(lambda x: write_byte(x, -1), {"x": x})
    with pytest.raises(CanaryError, match=r"x: 1 bytes written .* byte 1 past its last"):
        guarded_call(lambda x: write_byte(x, last_byte(x) + 1), {"x": x})
    with pytest.raises(CanaryError, match="byte 0 after the start of its first"):
        guarded_call(lambda x: write_byte(x, 0), {"x": x})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_byte_on_either_side_of_an_output_is_seen(layout: str) -> None:
    out = (3, 5), torch.int32

    def run(place: int) -> None:
        def kernel(out: torch.Tensor) -> None:
            out.zero_()
            write_byte(out, last_byte(out) + 1 if place == 0 else place)

        call_for_result(kernel, {}, out=out, layout=layout)

    with pytest.raises(CanaryError, match=r"out: 1 bytes written .* byte 1 before its first"):
        run(-1)
    with pytest.raises(CanaryError, match=r"out: 1 bytes written .* byte 1 past its last"):
        run(0)
    if layout in ("padded", "odd offset", "strided"):  # these have gaps
        with pytest.raises(CanaryError, match=r"out: 1 bytes written"):
            run(5 * 4 if layout != "strided" else 4)


ALLOCATE = {
    "empty": lambda: torch.empty(3, 5),
    "empty_like": lambda: torch.empty_like(torch.ones(3, 5)),
    "empty_strided": lambda: torch.empty_strided((3, 5), (10, 2)),
    "new_empty": lambda: torch.ones(2).new_empty(3, 5),
    "new_empty_strided": lambda: torch.ones(2).new_empty_strided((3, 5), (5, 1)),
    "zeros": lambda: torch.zeros(3, 5),
    "zeros_like": lambda: torch.zeros_like(torch.ones(3, 5)),
    "ones": lambda: torch.ones(3, 5),
    "ones_like": lambda: torch.ones_like(torch.zeros(3, 5)),
    "full": lambda: torch.full((3, 5), 7.0),
    "full_like": lambda: torch.full_like(torch.zeros(3, 5), 7.0),
    "new_zeros": lambda: torch.ones(2).new_zeros(3, 5),
    "new_ones": lambda: torch.ones(2).new_ones(3, 5),
    "new_full": lambda: torch.ones(2).new_full((3, 5), 7.0),
}


@pytest.mark.parametrize("name", ALLOCATE)
def test_scratch_is_guarded_on_both_sides_and_dirty(name: str) -> None:
    plain = ALLOCATE[name]()

    def kernel(place: int) -> torch.Tensor:
        x = ALLOCATE[name]()
        assert x.shape == plain.shape and x.dtype == plain.dtype
        assert x.stride() == plain.stride()
        if "empty" in name:
            assert (x > 1e30).all()
        else:
            assert torch.equal(x, plain)
        if place:
            write_byte(x, place)
        return x

    guarded_call(lambda: kernel(0), {})
    for place in (-1, last_byte(plain) + 1):
        with pytest.raises(CanaryError, match=r"shape \[3, 5\] that the kernel allocated"):
            guarded_call(lambda place=place: kernel(place), {})


def test_allocations_are_torchs_own_again_afterwards() -> None:
    before = torch.empty, torch.full, torch.Tensor.new_empty
    with pytest.raises(RuntimeError), guarded_allocations():
        assert torch.empty is not before[0]
        raise RuntimeError
    assert (torch.empty, torch.full, torch.Tensor.new_empty) == before


def test_a_compiled_kernel_runs_although_its_scratch_is_not_seen() -> None:
    @torch.compile(fullgraph=True, backend="eager")
    def kernel(x: torch.Tensor) -> torch.Tensor:
        return torch.zeros(3, 5) + x.new_empty(3, 5).fill_(1) + x

    x = torch.ones(3, 5)
    assert torch.equal(guarded_call(kernel, {"x": x}), x * 2)
    write = torch.compile(lambda x: x.add_(1), fullgraph=True, backend="eager")
    with pytest.raises(CanaryError, match=r"^x: "):
        guarded_call(write, {"x": x})


def test_scratch_of_an_op_is_seen_from_outside_it() -> None:
    x = torch.ones(2, 1, 8)
    ends = torch.tensor([3, 3])
    with guarded_allocations() as handed_out:
        mqa_logits(x, torch.ones(3, 8), torch.ones(2, 1), ends - 3, ends)
    assert [2, 3] in [list(g.tensor.shape) for g in handed_out]


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_output_that_is_not_written_holds_nothing_plausible(dtype: torch.dtype) -> None:
    got = call_for_result(lambda out: None, {}, out=((4,), dtype))
    value = got.to(torch.float64)
    assert (value > {1: 100, 2: 3e4}.get(dtype.itemsize, 1e9)).all() and value.isfinite().all()


@pytest.mark.parametrize("offset", [0, 1, 3, 16])
def test_a_copy_keeps_strides_alignment_and_values(offset: int) -> None:
    x = torch.arange(100, dtype=torch.float32)[offset:].as_strided((3, 4), (9, 2), offset)
    guarded = Guarded.like(x)
    assert torch.equal(guarded.tensor, x) and guarded.tensor.stride() == x.stride()
    assert guarded.tensor.data_ptr() % 64 == x.data_ptr() % 64
    guarded.check_unchanged("x")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_hold_the_values_in_any_rank(layout: str) -> None:
    for shape in ((7,), (3, 5), (2, 3, 4), (0, 4), (3, 0)):
        x = torch.randn(shape).to(torch.bfloat16)
        assert torch.equal(laid_out(x, layout), x)
    assert laid_out(torch.ones(2, 3, 4), layout).is_contiguous() == (layout == "contiguous")


def test_nothing_that_was_passed_changes_for_the_caller() -> None:
    x = torch.zeros(3)
    guarded_call(lambda x: x.fill_(1), {"x": x}, writes=frozenset({"x"}))
    assert x.tolist() == [1, 1, 1]
    with pytest.raises(CanaryError):
        guarded_call(lambda x: x.fill_(2), {"x": x})
    assert x.tolist() == [1, 1, 1]
