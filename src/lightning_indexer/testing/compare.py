"""One comparison for floats: special values must coincide first, then each element."""

from __future__ import annotations

import torch


def assert_matches(
    actual: torch.Tensor, expected: torch.Tensor, bound: torch.Tensor | float
) -> None:
    """Asserts |actual − expected| ≤ bound elementwise; ±inf and NaN must lie at the same places.

    Args:
        actual: what the kernel gave, any float dtype.
        expected: the float64 oracle's answer, same shape.
        bound: the derived error bound, a number or a tensor of the same shape.
    """
    assert actual.shape == expected.shape, f"shape {actual.shape}, expected {expected.shape}"
    got = actual.to(torch.float64)
    for name, test in (("NaN", torch.isnan), ("-inf", torch.isneginf), ("+inf", torch.isposinf)):
        wrong = test(got) != test(expected)
        assert not wrong.any(), f"{name} differs first at {_first(wrong)}"
    finite = torch.isfinite(expected)
    error = torch.where(finite, (got - expected).abs(), 0.0)
    limit = torch.as_tensor(bound, dtype=torch.float64).expand_as(expected)
    wrong = finite & ~(error <= limit)
    if wrong.any():
        at = _first(wrong)
        raise AssertionError(
            f"{int(wrong.sum())} of {wrong.numel()} elements off; first at {at}:"
            f" got {got[at]}, expected {expected[at]}, bound {limit[at]}"
        )


def _first(mask: torch.Tensor) -> tuple[int, ...]:
    return tuple(mask.nonzero()[0].tolist())
