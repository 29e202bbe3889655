"""The table of faults: for every op a right call, its oracle, and what arguments may not be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

import fault_inputs as fi
import lightning_indexer as li
from fault_inputs import INT32, B, D, H, K, L, P, S, T, floats, fp8, ints
from fault_tools import Arguments, Contents, Op, tensors_of
from lightning_indexer.testing import reference

# Which mutations each argument must be refused under.
FIRST = "type dtype rank"  # its sizes and device decide what others must be
FULL = "type dtype rank size device"
ANY_ROWS = "type dtype rank device"
OUT = "type dtype rank size device repeated overlap"
OUTS = "bare short"
INT = "bool float text low"
NUMBER = "bool text nan infinite"

RAGGED_CHECKS = {
    "q": FIRST,
    "k": ANY_ROWS,
    "weights": FULL,
    "row_starts": FULL,
    "row_ends": FULL,
    "k_scale": FULL,
    "out": OUT,
}
PAGED_CHECKS = {
    "q": FIRST,
    "cache": ANY_ROWS,
    "weights": FULL,
    "context_lens": FULL,
    "block_table": ANY_ROWS,
    "row_to_request": FULL,
    "max_context_len": "bool float text negative",
    "page_size": INT,
    "out": OUT,
}
SELECT_CHECKS = {"topk": INT, "workspace_bytes": INT}
ROPE_CHECKS = {
    "positions": FULL,
    "cos": "type dtype rank device",
    "sin": FULL,
    "rope_style": "word",
    "rope_first": "text",
    "hadamard": "text",
    "scale_format": "word",
}
KEY_CHECKS = ROPE_CHECKS | {"k": FIRST, "norm_weight": FULL, "norm_bias": FULL}
KEY_CHECKS |= {"eps": f"{NUMBER} negative"}
RAGGED_CONTENTS = {
    "row_starts": Contents("lengths", L, refused="low"),
    "row_ends": Contents("lengths", L, refused="high"),
}
TABLE = Contents("table entries", P, wide=False)
UNIFORM_CONTENTS = {"context_lens": Contents("lengths", L, refused="high"), "block_table": TABLE}
PAGED_CONTENTS = UNIFORM_CONTENTS | {"row_to_request": Contents("ids", B)}
SLOTS = Contents("ids", P * S)
POSITIONS = Contents("ids", L)

ATTENTION_CHECKS = {
    "q": FIRST,
    "kv": ANY_ROWS,
    "indices": FULL,
    "scale": NUMBER,
    "v_dim": INT,
    "out": OUT,
    "lse": OUT,
}
ATTENTION: dict[str, Any] = {
    "checks": ATTENTION_CHECKS,
    "expected": fi.expected_attention,
    "contents": {"indices": Contents("ids", P)},
    "writes": ("out", "lse"),
}
#: By op; what follows a comma tells two forms of one op apart.
OPS = {
    "mqa_logits": Op(
        li.mqa_logits,
        lambda: fi.ragged() | {"out": floats(T, L)},
        RAGGED_CHECKS,
        lambda a: [fi.expected_scores(a)],
        RAGGED_CONTENTS,
    ),
    "paged_mqa_logits": Op(
        li.paged_mqa_logits,
        lambda: fi.paged() | {"out": floats(B, L)},
        PAGED_CHECKS,
        lambda a: [fi.expected_scores(a)],
        PAGED_CONTENTS,
    ),
    "paged_mqa_logits, uniform": Op(
        li.paged_mqa_logits,
        lambda: fi.uniform() | {"out": floats(2 * B, L)},
        {},
        lambda a: [fi.expected_scores(a)],
        UNIFORM_CONTENTS,
    ),
    "select_topk": Op(
        li.select_topk,
        lambda: fi.ragged() | fi.select(T),
        RAGGED_CHECKS | SELECT_CHECKS,
        lambda a: [fi.expected_topk(a)],
        RAGGED_CONTENTS,
    ),
    "paged_select_topk": Op(
        li.paged_select_topk,
        lambda: fi.paged() | fi.select(B),
        PAGED_CHECKS | SELECT_CHECKS,
        lambda a: [fi.expected_topk(a)],
        PAGED_CONTENTS,
    ),
    "paged_select_topk, uniform": Op(
        li.paged_select_topk,
        lambda: fi.uniform() | fi.select(2 * B),
        {},
        lambda a: [fi.expected_topk(a)],
        UNIFORM_CONTENTS,
    ),
    "topk_indices": Op(
        li.topk_indices,
        lambda: {
            "logits": floats(T, L),
            "k": K,
            "row_starts": torch.tensor([0, 1, 2], dtype=INT32),
            "row_ends": torch.tensor([L, L - 1, 7], dtype=INT32),
            "out": ints(7, T, K),
        },
        {"logits": FIRST, "k": INT, "row_starts": FULL, "row_ends": FULL, "out": OUT},
        lambda a: [reference.topk_indices(**fi.without(a))],
        {name: Contents("lengths", L, refused="") for name in ("row_starts", "row_ends")},
    ),
    "compact_topk_indices": Op(
        li.compact_topk_indices,
        lambda: {
            "buffers": torch.arange(T * K, dtype=INT32).view(T, K),
            "rows": torch.tensor([1, 0], dtype=INT32),
            "num_rows": T - 1,
        },
        {"buffers": "type dtype rank repeated overlap", "rows": ANY_ROWS}
        | {"num_rows": "bool float text negative"},
        lambda a: [
            reference.compact_topk_indices(x, a["rows"], num_rows=a["num_rows"])
            for x in tensors_of(a["buffers"])
        ],
        {"rows": Contents("ids", T - 1)},
        ("buffers",),
    ),
    "write_index_k": Op(
        li.write_index_k,
        lambda: fi.write() | {"k": floats(T, D)},
        {"cache": "type dtype rank device repeated overlap", "k": FIRST, "slots": FULL}
        | {"page_size": INT, "scale_format": "word"},
        lambda a: fi.expected_write(a, a["k"]),
        {"slots": SLOTS},
        ("cache",),
    ),
    "read_index_k": Op(
        li.read_index_k,
        lambda: {
            "cache": fi.paged_cache(),
            "block_table": torch.tensor([[1, 0], [3, 2], [0, 1]], dtype=INT32),
            "context_lens": torch.tensor([2, 5, 1], dtype=INT32),
            "page_size": S,
            "head_dim": D,
            "total": 10,
            "out": (fp8(10, D), floats(10)),
        },
        {"cache": FIRST, "block_table": ANY_ROWS, "context_lens": FULL, "out": OUTS}
        | {"page_size": INT, "head_dim": INT, "total": "bool float text negative"},
        fi.expected_read,
        {"block_table": TABLE, "context_lens": Contents("lengths", 2 * S)},
        unservable=lambda a: sum(max(n, 0) for n in a["context_lens"].tolist()) > a["total"],
    ),
    "indices_to_slots": Op(
        li.indices_to_slots,
        lambda: {
            "indices": torch.arange(T * K, dtype=INT32).view(T, K) % (2 * S),
            "block_table": torch.tensor([[1, 0], [3, 2], [0, 1]], dtype=INT32),
            "row_to_request": torch.tensor([2, 0, 1], dtype=INT32),
            "page_size": S,
            "out": ints(7, T, K),
        },
        {"indices": FIRST, "block_table": ANY_ROWS, "row_to_request": FULL}
        | {"page_size": INT, "out": OUT},
        fi.expected_slots,
        {
            "indices": Contents("ids", 2 * S, wide=False),
            "row_to_request": Contents("ids", B),
            # an id is good as long as its slots fit into out: the op knows no number of pages
            "block_table": Contents("table entries", 2**29, refused="low", wide=False),
        },
    ),
    "prepare_index_q": Op(
        li.prepare_index_q,
        lambda: {
            "q": floats(T, H, D),
            "weights": floats(T, H),
            **fi.rope(T),
            "scale": 0.5,
            "out": (fp8(T, H, D), floats(T, H)),
        },
        ROPE_CHECKS | {"q": FIRST, "weights": FULL, "scale": NUMBER, "out": OUTS},
        fi.expected_queries,
        {"positions": POSITIONS},
    ),
    "prepare_index_k": Op(
        li.prepare_index_k,
        lambda: fi.keys() | fi.write(),
        KEY_CHECKS
        | {"cache": "type dtype rank device repeated overlap", "slots": FULL, "page_size": INT},
        lambda a: fi.expected_write(a, fi.prepared(a)),
        {"positions": POSITIONS, "slots": SLOTS},
        ("cache",),
    ),
    "prepare_ragged_index_k": Op(
        li.prepare_ragged_index_k,
        lambda: fi.keys() | {"out": (fp8(T, D), floats(T))},
        KEY_CHECKS | {"out": OUTS},
        fi.expected_ragged_keys,
        {"positions": POSITIONS},
    ),
    "sparse_mla_attention": Op(
        li.sparse_mla_attention,
        lambda: fi.attention(24, 16, torch.float32),
        bound=1e-5,
        **ATTENTION,
    ),
    "sparse_mla_attention, 656-byte rows": Op(
        li.sparse_mla_attention,
        lambda: fi.attention(576, 512, torch.bfloat16) | {"kv": fi.mla_cache()},
        bound=2.0**-6,  # results of at most 2, and weights, are rounded to bf16
        **ATTENTION,
    ),
    "write_mla_kv": Op(
        li.write_mla_kv,
        lambda: {
            "cache": fi.mla_cache(),
            "kv": floats(T, 576) * 3,
            "slots": torch.tensor([2, 0, 1], dtype=INT32),
            "scale_format": "fp32",
        },
        {"cache": "type dtype rank device repeated overlap", "kv": FIRST}
        | {"slots": FULL, "scale_format": "word"},
        fi.expected_mla_rows,
        {"slots": Contents("ids", P)},
        ("cache",),
    ),
}


def _long_row() -> Arguments:
    """A row that takes scratch."""
    row = {"logits": floats(1, 4200), "row_starts": None, "row_ends": None}
    return OPS["topk_indices"].valid() | row | {"out": ints(7, 1, K)}


def _wide_rows() -> Arguments:
    """More indices than a chunk holds: partial results, and their merge."""
    arguments = fi.attention(24, 16, torch.float32)
    return arguments | {"indices": arguments["indices"].repeat(1, 18)}


def _many_buffers() -> Arguments:
    """More buffers than one launch takes."""
    return OPS["compact_topk_indices"].valid() | {"buffers": [ints(i, T, 2) for i in range(33)]}


#: The same ops, but for a form that launches what another does, and calls with more scratch.
BUSY = {n: op for n, op in OPS.items() if n != "paged_select_topk, uniform"} | {
    f"{op}, {arguments.__name__[1:]}": replace(OPS[op], valid=arguments)
    for op, arguments in (
        ("topk_indices", _long_row),
        ("sparse_mla_attention", _wide_rows),
        ("compact_topk_indices", _many_buffers),
    )
}
