"""Every public report that this project answers is held by tests that exist.

A line of reported_cases.jsonl has: id; source, where it was reported; kind; needs, cpu or gpu;
happened; holds, what must be true here; tests, the functions that hold it; and `but` where the
report expects something else.
"""

import ast
import json
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.once

ROOT = Path(__file__).resolve().parents[1]
CASES = [json.loads(line) for line in (ROOT / "tests" / "reported_cases.jsonl").open()]
#: The list that the lines were written from, where it is at hand.
LIST = ROOT.parent / "shared" / "cases" / "public_cases.jsonl"
FIELDS = {"id", "source", "kind", "needs", "happened", "holds", "tests"}
KINDS = {
    *("topk_overflow", "topk_nan_inf", "topk_ties_determinism", "short_rows_padding"),
    *("row_window_prefill", "row_length_mtp", "mtp_index_share", "logits_math"),
    *("fp8_layout_scale", "index_conversion", "sparse_attention", "int32_overflow"),
    *("noncontiguous_stride", "memory_chunking", "empty_batch", "cuda_graph_state"),
    *("multi_device_stream", "platform_gap", "triton_toolchain", "cache_lifecycle"),
}


@cache
def functions(file: str) -> dict[str, ast.FunctionDef]:
    """The test functions of a file."""
    tree = ast.parse((ROOT / file).read_text())
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


def runs_on_a_gpu(test: str) -> bool:
    """Whether a test is marked so; that of `DEVICES` is one of its parameters."""
    file, name = test.split("::")
    decorators = [ast.unparse(d) for d in functions(file)[name].decorator_list]
    return any("mark.gpu" in d or "DEVICES" in d for d in decorators)


def test_a_line_says_all_there_is_to_say() -> None:
    for case in CASES:
        assert case.keys() - {"but"} == FIELDS, case["id"]
        assert case["tests"], case["id"]
        words = [case[name] for name in ("source", "happened", "holds", *case.keys() & {"but"})]
        assert all(isinstance(word, str) and word.strip() for word in words), case["id"]
        assert re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", case["source"]), case["id"]
        assert case["needs"] in ("cpu", "gpu"), case["id"]


def test_every_id_appears_once_under_its_kind() -> None:
    counts = Counter(case["id"] for case in CASES)
    assert [name for name, count in counts.items() if count > 1] == []
    assert [c["id"] for c in CASES if c["id"].rpartition("-")[0] != c["kind"]] == []
    assert {case["kind"] for case in CASES} == KINDS
    assert len(CASES) == 125


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_what_holds_a_line_is_a_test_that_exists(case: dict) -> None:
    for test in case["tests"]:
        file, _, name = test.partition("::")
        assert re.fullmatch(r"tests/test_\w+\.py", file)
        assert name.startswith("test_")
        assert name in functions(file), f"{file} has no {name}"


@pytest.mark.parametrize("case", [c for c in CASES if c["needs"] == "gpu"], ids=lambda c: c["id"])
def test_what_needs_a_gpu_has_a_test_on_one(case: dict) -> None:
    assert any(map(runs_on_a_gpu, case["tests"]))


@pytest.mark.skipif(not LIST.exists(), reason="the list is not part of the repository")
def test_no_line_of_the_list_is_missing() -> None:
    listed = [json.loads(line) for line in LIST.read_text().splitlines()]
    names = ("id", "source", "kind", "needs")
    assert [[case[n] for n in names] for case in CASES] == [[x[n] for n in names] for x in listed]
