"""Arguments that are fine alone and wrong together, or in a way that only their op knows."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fault_inputs import B, D, H, K, L, P, S, T, floats, fp8, ints
from fault_tools import Arguments


def _of_width(arguments: Arguments, width: int) -> Arguments:
    """Keys or queries of another D."""
    if "q" in arguments:
        return {"q": floats(T, H, width), "out": None}
    names = "norm_weight", "norm_bias"
    return {"k": floats(T, width), **{n: floats(width) for n in names}, "out": None}


#: 656-byte rows that are cut, strided, misaligned.
BAD_ROWS: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    lambda x: x[:, :655],
    lambda x: x.t().contiguous().t(),
    lambda x: torch.zeros(P, 658, dtype=torch.uint8)[:, :656],
    lambda x: torch.zeros(P, 660, dtype=torch.uint8)[:, 2:658],
)

#: (op, why, named argument, change, error)
MISFITS: list[tuple[str, str, str, Callable[[Arguments], Arguments], type[Exception]]] = [
    *(
        case
        for op in ("mqa_logits", "select_topk")
        for case in (
            (op, "other head dim", "k", lambda a: {"k": fp8(L, D + 1)}, ValueError),
            (op, "keys wider than q", "k", lambda a: {"k": floats(L, D)}, TypeError),
            (
                op,  # sgl-project/sglang#39628: e4m3fn written, fnuz read, half the value
                "another fp8",
                "k",
                lambda a: {"k": a["k"].view(torch.float8_e4m3fnuz)},
                TypeError,
            ),
            (op, "no heads", "q", lambda a: {"q": fp8(T, 0, D)}, ValueError),
            (op, "out of other width", "out", lambda a: {"out": a["out"][:, 1:]}, ValueError),
        )
    ),
    *(
        case
        for op in ("paged_mqa_logits", "paged_select_topk")
        for case in (
            (op, "small pages", "cache", lambda a: {"page_size": S + 1}, ValueError),
            (op, "few columns", "cache", lambda a: {"cache": a["cache"][..., 1:]}, ValueError),
            (op, "narrow table", "block_table", lambda a: {"max_context_len": L + 1}, ValueError),
            (
                op,
                "more table lines than requests",
                "block_table",
                lambda a: {"row_to_request": None, "block_table": ints(1, B + 1, L // S)},
                ValueError,
            ),
            (
                op,  # NVIDIA/TensorRT-LLM#17247: next_n from the config, not from the data
                "lengths of another next_n",
                "context_lens",
                lambda a: {"row_to_request": None, "context_lens": ints(L, B, 2)},
                ValueError,
            ),
            (
                op,
                "several rows a request in the ragged form",
                "q",
                lambda a: {"q": fp8(B, 2, H, D), "weights": floats(2 * B, H)},
                ValueError,
            ),
        )
    ),
    *(
        (
            op,
            "workspace below a row",
            "workspace_bytes",
            lambda a: {"workspace_bytes": 4 * L - 1},
            ValueError,
        )
        for op in ("select_topk", "paged_select_topk")
    ),
    ("topk_indices", "out narrower than k", "out", lambda a: {"k": K + 1}, ValueError),
    ("compact_topk_indices", "n > M", "rows", lambda a: {"rows": ints(0, T + 1)}, ValueError),
    ("compact_topk_indices", "above M", "num_rows", lambda a: {"num_rows": T + 1}, ValueError),
    (
        "compact_topk_indices",
        "other M",
        "buffers",
        lambda a: {"buffers": [a["buffers"], ints(7, T + 1, K)]},
        ValueError,
    ),
    (
        "compact_topk_indices",
        "partial overlap",
        "buffers",
        lambda a: {"buffers": [a["buffers"][:, :3], a["buffers"][:, 2:]]},
        ValueError,
    ),
    ("write_index_k", "other head dim", "cache", lambda a: {"k": floats(T, D + 4)}, ValueError),
    ("write_index_k", "small pages", "cache", lambda a: {"page_size": S * 2}, ValueError),
    ("write_index_k", "flat floats", "cache", lambda a: {"cache": floats(P, S * D)}, ValueError),
    ("write_index_k", "no columns", "k", lambda a: {"k": floats(T, 0)}, ValueError),
    (
        "write_index_k",
        "unknown format",
        "scale_format",
        lambda a: {"scale_format": "fp8"},
        ValueError,
    ),
    ("read_index_k", "other head dim", "cache", lambda a: {"head_dim": D + 1}, ValueError),
    ("read_index_k", "rows missing", "total", lambda a: {"total": 5, "out": None}, ValueError),
    (
        "read_index_k",
        "flat cache of unknown head dim",
        "head_dim",
        lambda a: {"cache": a["cache"].view(P, -1), "head_dim": None, "out": None},
        ValueError,
    ),
    *(
        ("read_index_k", why, "out", lambda a, change=change: {"out": change(*a["out"])}, error)
        for why, change, error in (
            ("one tensor", lambda v, s: v, TypeError),
            ("one in a tuple", lambda v, s: (v,), TypeError),
            ("values of another dtype", lambda v, s: (v.float(), s), TypeError),
            ("no scales", lambda v, s: (v, None), TypeError),
            ("fewer rows than total", lambda v, s: (v[:4], s), ValueError),
            ("more scales than rows", lambda v, s: (v, floats(7)), ValueError),
            ("values on top of each other", lambda v, s: (v[:1].expand(v.shape), s), ValueError),
        )
    ),
    ("read_index_k", "float cache", "out", lambda a: {"cache": floats(P, S, D)}, TypeError),
    *(
        case
        for op in ("mqa_logits", "select_topk")
        for case in (
            (op, "129 heads", "q", lambda a: {"q": fp8(T, 129, D)}, ValueError),
            (op, "257 columns", "q", lambda a: {"q": fp8(T, H, 257)}, ValueError),
        )
    ),
    (
        "compact_topk_indices",
        "no tensor",
        r"buffers\[1\] must",
        lambda a: {"buffers": [a["buffers"], None]},
        TypeError,
    ),
    (
        "compact_topk_indices",
        "two devices",
        r"buffers\[1\] must",
        lambda a: {"buffers": [a["buffers"], a["buffers"].to("meta")]},
        ValueError,
    ),
    *(
        case
        for op in ("prepare_index_q", "prepare_index_k", "prepare_ragged_index_k")
        for case in (
            (op, "wide tables", "cos", lambda a: {n: floats(L, 5) for n in ("cos", "sin")}),
            (op, "no positions", "cos", lambda a: {"positions": None}),
        )
        for case in ((*case, ValueError),)
    ),
    *(
        case
        for op, first in (("prepare_index_q", "q"), ("prepare_ragged_index_k", "k"))
        for case in (
            (op, "transform of 12", "hadamard", lambda a: _of_width(a, 12) | {"hadamard": True}),
            (op, "odd", "D", lambda a: _of_width(a, 7) | {"rope_style": "interleaved"}),
            (op, "no columns", first, lambda a: _of_width(a, 0)),
        )
        for case in ((*case, ValueError),)
    ),
    ("prepare_index_q", "no heads", "q", lambda a: {"q": floats(T, 0, D)}, ValueError),
    ("prepare_index_k", "no format", "scale_format", lambda a: {"scale_format": None}, ValueError),
    ("prepare_index_q", "floats", "out", lambda a: {"out": (a["q"], a["weights"])}, TypeError),
    *(
        ("prepare_ragged_index_k", why, "out", change, TypeError)
        for why, change in (
            ("floats", lambda a: {"out": (floats(T, D), a["out"][1])}),
            (
                "scales of floats",
                lambda a: {"scale_format": None, "out": (floats(T, D), a["out"][1])},
            ),
        )
    ),
    *(
        ("sparse_mla_attention", why, name, change, ValueError)
        for why, name, change in (
            ("no heads", "q", lambda a: {"q": floats(T, 0, 24)}),
            ("129 heads", "q", lambda a: {"q": floats(T, 129, 24)}),
            ("no columns", "q", lambda a: {"q": floats(T, H, 0)}),
            ("577 columns", "q", lambda a: {"q": floats(T, H, 577)}),
            ("other columns", "kv", lambda a: {"kv": a["kv"][:, 1:]}),
            ("more values than columns", "v_dim", lambda a: {"v_dim": 25}),
        )
    ),
    *(
        ("sparse_mla_attention, 656-byte rows", why, name, change, error)
        for why, name, change, error in (
            ("fp32", "q", lambda a: {"q": a["q"].float()}, TypeError),
            ("512 columns", "q", lambda a: {"q": a["q"][..., :512]}, ValueError),
            ("500 values", "v_dim", lambda a: {"v_dim": 500}, ValueError),
            *(("kv", "kv", lambda a, kv=kv: {"kv": kv(a["kv"])}, ValueError) for kv in BAD_ROWS),
        )
    ),
    ("write_mla_kv", "575 columns", "kv", lambda a: {"kv": a["kv"][:, 1:]}, ValueError),
    *(
        ("write_mla_kv", "rows", "cache", lambda a, x=x: {"cache": x(a["cache"])}, ValueError)
        for x in BAD_ROWS
    ),
]
