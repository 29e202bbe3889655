"""What the CPU scorer promises beyond the ops' own tests."""

import pytest
import torch

from lightning_indexer.kernels.score_cpu import ieee_products

pytestmark = pytest.mark.once

MATMUL = torch.backends.mkldnn.matmul


@pytest.fixture
def lowered_precision():
    before = MATMUL.fp32_precision
    torch.set_float32_matmul_precision("medium")
    yield
    torch.set_float32_matmul_precision("highest")
    MATMUL.fp32_precision = before


def test_products_are_ieee_fp32_although_lower_precision_is_allowed(lowered_precision):
    assert MATMUL.fp32_precision == "bf16"
    with ieee_products():
        assert MATMUL.fp32_precision == "ieee"
    assert MATMUL.fp32_precision == "bf16"


def test_the_setting_is_put_back_after_an_error(lowered_precision):
    with pytest.raises(RuntimeError), ieee_products():
        raise RuntimeError
    assert MATMUL.fp32_precision == "bf16"
