"""fp8 queries as devices without e4m3fn products read them; the kernel runs in the interpreter."""

import pytest
import torch

from lightning_indexer.kernels.backend import tl
from lightning_indexer.kernels.score_queries import encoded_queries
from scoring import FP8, strided

pytestmark = pytest.mark.interpreter

#: Every byte, as queries [B, N, H, D].
BYTES = torch.arange(256, dtype=torch.uint8).view(2, 4, 2, 16)
VALUES = BYTES.view(FP8).double()


@pytest.mark.parametrize("lay_out", [torch.clone, strided], ids=["contiguous", "strided"])
def test_fp16_holds_every_value(lay_out) -> None:
    encoded = encoded_queries(lay_out(BYTES), tl.float16)
    assert encoded.dtype == torch.float16
    torch.testing.assert_close(encoded.double(), VALUES, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("lay_out", [torch.clone, strided], ids=["contiguous", "strided"])
def test_fnuz_holds_half_of_every_value(lay_out) -> None:
    encoded = encoded_queries(lay_out(BYTES), tl.float8e4b8)
    halves = encoded.view(torch.float8_e4m3fnuz).double()
    torch.testing.assert_close(halves, VALUES / 2, rtol=0, atol=0, equal_nan=True)


def test_what_needs_no_encoding_is_passed_on() -> None:
    assert encoded_queries(BYTES, tl.float8e4nv) is BYTES
    bf16 = torch.zeros(1, 1, 2, 16, dtype=torch.bfloat16)
    assert encoded_queries(bf16, tl.bfloat16) is bf16
