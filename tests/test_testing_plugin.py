"""`pytest --lightning-indexer-kernel=module:function`, in folders without a test."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_indexer import testing
from lightning_indexer.testing import CompactContract
from lightning_indexer.testing.conformance import SUITES
from lightning_indexer.testing.pytest_items import infer_op, load_kernel

pytestmark = pytest.mark.once

TESTS = Path(__file__).resolve().parent
#: Each wrong kernel, a property that must find it, and what must be said.
FAULTS = {
    "topk_ties_to_the_larger": (
        "selects-the-best-of-all-equal-scores",
        r"a tie at score \S+ goes to position 1, not to the smaller 0",
    ),
    "topk_with_a_capacity": (
        "selects-the-best-of-close-scores",
        r"position \d+ with score 1.\d+ is left out, position \d+ with 1.\d+ chosen",
    ),
    "mqa_logits_with_the_end": (
        "scores-normal-operands-by-the-formula",
        r"row 0 has score \S+ at position 1, which it does not see",
    ),
    "paged_mqa_logits_interleaved": (
        "scores-normal-operands-by-the-formula",
        r"elements off; first at \(0, \d+\): got",
    ),
    "compact_forward": (
        "moves-rows-whose-ids-are-reversed",
        "row 1 is not what row 0 held: that row was overwritten before row 1 was read from it",
    ),
    "slots_of_page_zero": (
        "turns-positions-into-slots",
        r"position -1 of request 0 \(row 0, place 0\) has slot -1, got \d+",
    ),
    "sparse_attention_base_2": (
        "attends-to-the-listed-slots-with-normal-scores",
        r"lse: 1 of 1 elements off",
    ),
}
RIGHT = (
    "torch_topk",
    "topk_set",
    "topk_by_sorting",
    "mqa_logits",
    "mqa_logits_in_bf16",
    "paged_mqa_logits",
    "compact",
    "to_slots",
    "sparse_attention",
)


def run_pytest(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """pytest in `folder`, with the plugin as an installation loads it, and no other settings."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "TRITON"))}
    command = [sys.executable, "-m", "pytest", "-p", "lightning_indexer_pytest", "-q", "-rA"]
    return subprocess.run(
        [*command, *options],
        cwd=folder,
        env=env | {"PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def kernels(module: str, names) -> list[str]:
    return [f"--lightning-indexer-kernel={module}:{name}" for name in names]


def test_each_wrong_kernel_is_found_for_its_own_fault(tmp_path: Path) -> None:
    options = kernels("wrong_kernels", FAULTS)
    done = run_pytest(tmp_path, *options, "--lightning-indexer-examples=15")
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout[-3000:]
    for kernel, (prop, reason) in FAULTS.items():
        assert f"FAILED wrong_kernels:{kernel}::{prop}" in done.stdout
        section = re.search(rf"_ wrong_kernels:{kernel}::{prop} _+\n(.*\n.*\n.*)", done.stdout)
        assert section and re.search(reason, section[1]), (kernel, section)
        assert re.search(r"smallest failing case: \w+Case\(\w+=", section[1])


def test_right_kernels_that_it_has_never_seen_pass(tmp_path: Path) -> None:
    done = run_pytest(tmp_path, *kernels("right_kernels", RIGHT), "--lightning-indexer-examples=8")
    assert done.returncode == 0, done.stdout[-3000:]
    for kernel in RIGHT:
        assert f"PASSED right_kernels:{kernel}::" in done.stdout


OWN = """
def best(logits, k, row_starts=None, row_ends=None):
    raise RuntimeError("best was called")

def work(logits, rows): ...

def compact_logits(buffers, rows): ...
compact_logits.lightning_indexer_contract = "ascending"

not_callable = 3
"""


def test_op_is_told_from_the_parameters_and_k_selects(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    options = kernels("own", ["best"]), ("-k", "spikes or order", "--lightning-indexer-examples=1")
    done = run_pytest(tmp_path, *options[0], *options[1])
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    assert "2 failed" in done.stdout and "18 deselected" in done.stdout
    assert "RuntimeError raised: best was called" in done.stdout


def test_usage_error_ends_the_run(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    done = run_pytest(tmp_path, "--lightning-indexer-kernel=own:work")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    message = "own:work: can't tell which op this is; give --lightning-indexer-op=topk|mqa_logits|"
    assert message in done.stderr
    done = run_pytest(tmp_path, "--lightning-indexer-examples=0")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "--lightning-indexer-examples: must be at least 1, got 0" in done.stderr


@pytest.mark.parametrize(
    "kernel, message",
    [
        ("own:compact_logits", "lightning_indexer_contract must be a contract, got 'ascending'"),
        ("own:not_callable", "own:not_callable must be callable, got int"),
        ("own:absent", "own:absent can't be loaded"),
        ("absent_module:f", "absent_module:f can't be loaded: No module named"),
        ("own", "--lightning-indexer-kernel must be module:function, got 'own'"),
    ],
)
def test_usage_error_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernel: str, message: str
) -> None:
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "own", raising=False)
    with pytest.raises(pytest.UsageError, match=re.escape(message)):
        fn = load_kernel(kernel, str(tmp_path))
        infer_op(fn, getattr(fn, "lightning_indexer_contract", None), kernel)


@pytest.mark.parametrize(
    "name, parameters, op",
    [
        ("fast_topk_v2", "score, lengths, topk", "topk"),
        ("select", "logits, k, row_starts, row_ends", "topk"),
        ("fp8_mqa_logits", "*args", "mqa_logits"),
        ("fp8_paged_mqa_logits", "*args", "paged_mqa_logits"),
        ("score", "q, cache, weights, context_lens, block_table, **rest", "paged_mqa_logits"),
        ("compact_topk_indices", "buffers, rows, *, num_rows=None", "compact"),
        ("convert", "indices, block_table, row_to_request, page_size", "slots"),
        ("flash_attention", "q, kv, indices, scale, v_dim", "sparse_attention"),
    ],
)
def test_op_is_told_from_name_and_parameters(name: str, parameters: str, op: str) -> None:
    fn = eval(f"lambda {parameters}: None")
    assert infer_op(fn, None, f"module:{name}") == op


def test_op_is_told_from_the_contract_first() -> None:
    assert infer_op(lambda logits: None, CompactContract(), "module:topk_logits") == "compact"


def test_without_the_option_nothing_heavy_is_imported(tmp_path: Path) -> None:
    (tmp_path / "test_modules.py").write_text(
        "import sys\n"
        "def test_modules():\n"
        "    assert 'lightning_indexer_pytest' in sys.modules\n"
        "    assert not {'torch', 'triton', 'lightning_indexer'} & set(sys.modules)\n"
    )
    done = run_pytest(tmp_path)
    assert done.returncode == 0, done.stdout
    assert run_pytest(tmp_path, "-k", "nothing").returncode == pytest.ExitCode.NO_TESTS_COLLECTED


def test_items_join_the_tests_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "test_own.py").write_text("def test_own(): pass\n")
    done = run_pytest(
        tmp_path, *kernels("right_kernels", ["to_slots"]), "--lightning-indexer-examples=2"
    )
    assert done.returncode == 0 and "4 passed" in done.stdout


def test_page_on_testing_shows_what_is_printed(tmp_path: Path) -> None:
    page = (TESTS.parent / "docs" / "testing.md").read_text()
    kernel, from_code = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    shown = page.split("```\n")[2]  # behind the end of the first example
    (tmp_path / "my_kernels.py").write_text(kernel)
    (tmp_path / "test_from_code.py").write_text(from_code)
    done = run_pytest(tmp_path, *kernels("my_kernels", ["to_slots"]))
    assert shown in done.stdout, done.stdout
    assert "1 failed" in done.stdout and "error" not in done.stdout


def test_page_on_testing_names_every_option_check_and_contract() -> None:
    page = (TESTS.parent / "docs" / "testing.md").read_text()
    for name in testing.__all__:
        assert name in page or name in ("CanaryError", "ConformanceError", "ConformanceReport")
    for op in SUITES:
        assert f"`{op}`" in page
