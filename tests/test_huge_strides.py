"""Every op on tensors that reach past 2³¹ elements, one axis of one argument at a time.

Each stride still fits into an int32, as Triton then passes it: only the product with an index
does not. Where indices lie apart, the last one is not 0, which a wrong offset would read.
"""

from collections.abc import Callable
from functools import cache

import pytest
import torch

from lightning_indexer.kernels.compact import compact_topk_indices
from lightning_indexer.kernels.mqa_logits import mqa_logits
from lightning_indexer.kernels.paged_mqa_logits import paged_mqa_logits
from lightning_indexer.kernels.prepare_index_k import prepare_index_k
from lightning_indexer.kernels.prepare_index_q import prepare_index_q
from lightning_indexer.kernels.prepare_ragged_index_k import prepare_ragged_index_k
from lightning_indexer.kernels.read_index_k import read_index_k
from lightning_indexer.kernels.select_topk import paged_select_topk, select_topk
from lightning_indexer.kernels.slots import indices_to_slots
from lightning_indexer.kernels.sparse_mla_attention import sparse_mla_attention
from lightning_indexer.kernels.topk import topk_indices
from lightning_indexer.kernels.write_index_k import write_index_k
from lightning_indexer.kernels.write_mla_kv import write_mla_kv
from virtual_memory import DEVICES, far_apart, linux_only

pytestmark = linux_only

Tensors = dict[str, torch.Tensor]
#: Half as far again, so that the last request's first row lies past 2³¹ too.
REACH = 3 * 2**30
ROWS, HEADS, HEAD_DIM, KEYS, PAGE_SIZE, PAGES, TOPK = 3, 3, 8, 9, 4, 3, 3


def int32(*values: object) -> torch.Tensor:
    return torch.tensor(*values, dtype=torch.int32)


def ragged_inputs() -> Tensors:
    return {
        "q": torch.randn(ROWS, HEADS, HEAD_DIM),
        "k": torch.randn(KEYS, HEAD_DIM),
        "weights": torch.randn(ROWS, HEADS),
        "row_starts": int32([0, 1, 2]),
        "row_ends": int32([9, 8, 9]),
        "k_scale": torch.rand(KEYS),
    }


def paged_inputs() -> Tensors:
    """Three requests of three rows, each row with its own length."""
    return {
        "q": torch.randn(3, 3, HEADS, HEAD_DIM),
        "cache": torch.randn(PAGES, PAGE_SIZE, HEAD_DIM),
        "weights": torch.randn(9, HEADS),
        "context_lens": int32([[3, 4, 5], [7, 8, 9], [10, 11, 12]]),
        "block_table": int32([[1, 0, 2], [2, 0, 1], [0, 2, 1]]),
    }


def ragged_paged_inputs() -> Tensors:
    inputs = paged_inputs()
    rows = {"q": inputs["q"][:, :1], "weights": inputs["weights"][:3]}
    return inputs | rows | {"context_lens": int32([5, 9, 12]), "row_to_request": int32([2, 0, 1])}


def quantised_cache() -> torch.Tensor:
    cache = torch.zeros(PAGES, PAGE_SIZE, 1, HEAD_DIM + 4, dtype=torch.uint8)
    slots = torch.arange(PAGES * PAGE_SIZE)
    write_index_k(cache, torch.randn(len(slots), HEAD_DIM), slots, page_size=PAGE_SIZE)
    return cache


def slots_inputs() -> Tensors:
    table = int32([[3, 1, 4], [1, 5, 9], [2, 6, 5]])
    return {
        "indices": int32([[0, 5, 11], [3, -1, 8], [10, 4, 2]]),
        "block_table": table,
        "row_to_request": int32([1, 0, 2]),
        "out": torch.zeros(3, 3, dtype=torch.int32),
    }


def run_scores(x: Tensors) -> torch.Tensor:
    return mqa_logits(**x)


def run_paged_scores(x: Tensors) -> torch.Tensor:
    return paged_mqa_logits(**x, max_context_len=12, page_size=PAGE_SIZE)


def run_topk(x: Tensors) -> torch.Tensor:
    return topk_indices(x["logits"], TOPK, x["row_starts"], x["row_ends"], out=x["out"])


def run_select(x: Tensors) -> torch.Tensor:
    return select_topk(**x, topk=TOPK)


def run_paged_select(x: Tensors) -> torch.Tensor:
    return paged_select_topk(**x, topk=TOPK, max_context_len=12, page_size=PAGE_SIZE)


def run_compact(x: Tensors) -> torch.Tensor:
    compact_topk_indices([x["buffer"], x["other"]], x["rows"])
    return torch.cat([x["buffer"], x["other"]])


def run_slots(x: Tensors) -> torch.Tensor:
    return indices_to_slots(x["indices"], x["block_table"], x["row_to_request"], 4, out=x["out"])


def run_write(x: Tensors) -> torch.Tensor:
    write_index_k(x["cache"], x["k"], x["slots"], page_size=PAGE_SIZE)
    return x["cache"]


def run_read(x: Tensors) -> torch.Tensor:
    out = x["values"], x.get("scales")
    out = out[0] if out[1] is None else out[0].view(torch.float8_e4m3fn), out[1]
    read_index_k(x["cache"], x["block_table"], x["context_lens"], page_size=PAGE_SIZE, out=out)
    scales = [] if out[1] is None else [out[1][:, None]]
    return torch.cat([x["values"].to(torch.float32), *scales], dim=1)


def run_attention(x: Tensors) -> torch.Tensor:
    """out and lse side by side."""
    v_dim = x["out"].shape[2]
    sparse_mla_attention(**x, scale=0.5, v_dim=v_dim)
    return torch.cat([x["out"].float(), x["lse"][..., None]], dim=2)


def run_write_mla(x: Tensors) -> torch.Tensor:
    write_mla_kv(**x)
    return x["cache"]


def run_prepare_q(x: Tensors) -> torch.Tensor:
    out = x["values"].view(torch.float8_e4m3fn), x["out_weights"]
    inputs = {n: t for n, t in x.items() if n not in ("values", "out_weights")}
    prepare_index_q(**inputs, rope_style="half_split", out=out)
    return torch.cat([x["values"].float(), x["out_weights"][..., None]], dim=2)


def run_prepare_k(x: Tensors) -> torch.Tensor:
    prepare_index_k(**x, eps=1e-6, rope_style="half_split", page_size=PAGE_SIZE)
    return x["cache"]


def run_prepare_ragged_k(x: Tensors) -> torch.Tensor:
    out = x["values"].view(torch.float8_e4m3fn), x["scales"]
    inputs = {n: t for n, t in x.items() if n not in ("values", "scales")}
    prepare_ragged_index_k(**inputs, eps=1e-6, rope_style="half_split", out=out)
    return torch.cat([x["values"].float(), x["scales"][:, None]], dim=1)


def out(rows: int, width: int, dtype: torch.dtype = torch.float32) -> Tensors:
    return {"out": torch.zeros(rows, width, dtype=dtype)}


def write_inputs(cache: torch.Tensor) -> Tensors:
    return {"cache": cache, "k": torch.randn(3, HEAD_DIM), "slots": int32([11, 2, 6])}


def read_inputs(cache: torch.Tensor) -> Tensors:
    total = 5 + 9 + 12
    found = {"block_table": paged_inputs()["block_table"], "context_lens": int32([5, 9, 12])}
    if cache.dtype != torch.uint8:
        return {"cache": cache, **found, "values": torch.zeros(total, HEAD_DIM)}
    values = torch.zeros(total, HEAD_DIM, dtype=torch.uint8)
    return {"cache": cache, **found, "values": values, "scales": torch.zeros(total)}


def float_cache() -> torch.Tensor:
    return torch.randn(PAGES, PAGE_SIZE, HEAD_DIM)


def attention_inputs(dim: int, v_dim: int, dtype: torch.dtype) -> Tensors:
    return {
        "q": torch.randn(ROWS, HEADS, dim).to(dtype),
        "kv": torch.randn(4, dim).to(dtype),
        "indices": int32([[0, 3, -1], [3, 2, 1], [1, -1, 3]]),
        "out": torch.zeros(ROWS, HEADS, v_dim, dtype=dtype),
        "lse": torch.zeros(ROWS, HEADS),
    }


def mla_cache() -> torch.Tensor:
    cache = torch.zeros(4, 656, dtype=torch.uint8)
    write_mla_kv(cache, torch.randn(4, 576), torch.arange(4))
    return cache


def write_mla_inputs() -> Tensors:
    return {"cache": mla_cache(), "kv": torch.randn(3, 576), "slots": int32([3, 0, 2])}


def rope_inputs() -> Tensors:
    tables = {"cos": torch.randn(6, 2), "sin": torch.randn(6, 2)}
    return {"positions": int32([5, 1, 4]), **tables}


def prepare_q_inputs() -> Tensors:
    return {
        "q": torch.randn(ROWS, HEADS, HEAD_DIM),
        "weights": torch.randn(ROWS, HEADS),
        **rope_inputs(),
        "values": torch.zeros(ROWS, HEADS, HEAD_DIM, dtype=torch.uint8),
        "out_weights": torch.zeros(ROWS, HEADS),
    }


def key_inputs() -> Tensors:
    norm = {"norm_weight": torch.randn(HEAD_DIM), "norm_bias": torch.randn(HEAD_DIM)}
    return {"k": torch.randn(3, HEAD_DIM), **norm, **rope_inputs()}


def ragged_key_inputs() -> Tensors:
    values = torch.zeros(3, HEAD_DIM, dtype=torch.uint8)
    return key_inputs() | {"values": values, "scales": torch.zeros(3)}


INT32 = torch.int32
OPS: dict[str, tuple[Callable[[Tensors], torch.Tensor], Callable[[], Tensors]]] = {
    "mqa_logits": (run_scores, lambda: ragged_inputs() | out(ROWS, KEYS)),
    "paged_mqa_logits": (run_paged_scores, lambda: paged_inputs() | out(9, 12)),
    "paged_mqa_logits, fp8": (
        run_paged_scores,
        lambda: paged_inputs() | {"cache": quantised_cache()},
    ),
    "paged_mqa_logits, ragged": (run_paged_scores, ragged_paged_inputs),
    "topk_indices": (
        run_topk,
        lambda: (
            {
                "logits": torch.randn(ROWS, KEYS),
                "row_starts": int32([0, 1, 2]),
                "row_ends": int32([9, 8, 9]),
            }
            | out(ROWS, TOPK, INT32)
        ),
    ),
    "select_topk": (run_select, lambda: ragged_inputs() | out(ROWS, TOPK, INT32)),
    "paged_select_topk": (run_paged_select, lambda: paged_inputs() | out(9, TOPK, INT32)),
    "paged_select_topk, ragged": (run_paged_select, ragged_paged_inputs),
    "compact_topk_indices": (
        run_compact,
        lambda: {
            "buffer": torch.arange(15, dtype=INT32).view(5, 3),
            "other": torch.arange(15, dtype=INT32).view(5, 3) + 100,
            "rows": int32([4, 2, 3]),
        },
    ),
    "indices_to_slots": (run_slots, slots_inputs),
    "write_index_k": (run_write, lambda: write_inputs(float_cache())),
    "write_index_k, fp8": (run_write, lambda: write_inputs(quantised_cache())),
    "read_index_k": (run_read, lambda: read_inputs(float_cache())),
    "read_index_k, fp8": (run_read, lambda: read_inputs(quantised_cache())),
    "prepare_index_q": (run_prepare_q, prepare_q_inputs),
    "prepare_index_k": (run_prepare_k, lambda: key_inputs() | write_inputs(float_cache())),
    "prepare_index_k, fp8": (
        run_prepare_k,
        lambda: key_inputs() | write_inputs(quantised_cache()),
    ),
    "prepare_ragged_index_k": (run_prepare_ragged_k, ragged_key_inputs),
    "sparse_mla_attention": (run_attention, lambda: attention_inputs(24, 16, torch.float32)),
    "sparse_mla_attention, 656-byte rows": (
        run_attention,
        lambda: attention_inputs(576, 512, torch.bfloat16) | {"kv": mla_cache()},
    ),
    "write_mla_kv": (run_write_mla, write_mla_inputs),
}


@cache
def _inputs(op: str) -> Tensors:
    torch.manual_seed(0)
    return OPS[op][1]()


@cache
def _result(op: str, device: str) -> torch.Tensor:
    return OPS[op][0]({n: x.to(device, copy=True) for n, x in _inputs(op).items()})


def holds_bytes(name: str, x: torch.Tensor) -> bool:
    """Whether only lines of `x` may lie apart: each of them is a page or a 656-byte row."""
    return name in ("cache", "kv") and x.dtype == torch.uint8


def places() -> list[object]:
    """Device, op, argument and axis.

    On a GPU only rows move apart: another inner stride is another kernel to compile.
    """
    found = []
    for op in OPS:
        for name, x in _inputs(op).items():
            for axis in range(1 if holds_bytes(name, x) else x.dim()):
                place, label = (op, name, axis), f"{op}: {name}, axis {axis}"
                if x.shape[axis] > 1:
                    found.append(pytest.param("cpu", *place, id=label))
                if axis == 0 < x.dim() - 1:
                    mark = pytest.mark.gpu
                    found.append(pytest.param("cuda", *place, id=f"{label}, GPU", marks=mark))
    return found


@pytest.mark.parametrize("device, op, name, axis", places())
def test_axis_that_reaches_past_2_31_elements_changes_nothing(
    device: str, op: str, name: str, axis: int
) -> None:
    tensors = {n: x.to(device, copy=True) for n, x in _inputs(op).items()}
    x = tensors[name]
    # a page's scales are counted in fp32: they too shall lie 2³¹ elements away
    reach = 4 * REACH if holds_bytes(name, x) else REACH
    tensors[name] = far_apart(x, axis, reach)
    run, _ = OPS[op]
    assert torch.equal(run(tensors), _result(op, device))


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("device", DEVICES)
def test_long_rows_reach_past_2_31_elements(axis: int, device: str) -> None:
    logits = torch.randn(3, 4200, generator=torch.Generator().manual_seed(1)).round(decimals=1)
    logits = logits.to(device)
    expected = topk_indices(logits, 100)
    assert torch.equal(topk_indices(far_apart(logits, axis, REACH), 100), expected)
