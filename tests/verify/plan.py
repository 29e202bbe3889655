"""How much of everything is run: all of it, or what five minutes allow."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BACKENDS = ("cpu", "interpreter")


@dataclass(frozen=True)
class Plan:
    """What each stage runs.

    Attributes:
        name: "full" or "quick".
        profile: of hypothesis, as tests/conftest.py has them.
        tests: by pass of the suite, what pytest is given; nothing means all tests.
        covered: by backend, what pytest is given to measure coverage, with few examples.
        sins: names of those committed; none means all.
        mutants: size of the sample.
    """

    name: str
    profile: str
    tests: dict[str, tuple[str, ...]]
    covered: dict[str, tuple[str, ...]]
    sins: tuple[str, ...]
    mutants: int


#: Tracing doubles the time of a pass, so it has runs of its own. These tests call other processes,
#: or other code than is measured.
_UNTRACED = (
    "compile_report compiled_figures device_check mutation mutation_worker offline_compile on_gpu"
    " packaging peers readme sins soak tinylm_training verify_figures"
)
#: Every launcher, by both paths of every op; what the PyTorch paths do not have.
_LAUNCHING = "compact_row_ids fault_table implementations score_tiles sparse_mla_launch topk_plans"


def _files(names: str) -> tuple[str, ...]:
    return tuple(f"tests/test_{name}.py" for name in names.split())


FULL = Plan(
    "full",
    "verify",
    tests={"cpu": (), "interpreter": ()},
    covered={
        "cpu": ("tests", *(f"--ignore={file}" for file in _files(_UNTRACED))),
        "interpreter": _files(_LAUNCHING),
    },
    sins=(),
    mutants=150,
)

#: One file an op, then the speculator's rounds, their faults and what judges all of it.
_QUICK_TESTS = (
    "append_positions batch bitwise block_table buffer capture compact fault_table lifecycle"
    " mqa_logits paged_mqa_logits prepare_index_k prepare_index_q propose read_index_k rejection"
    " select_topk slots sparse_mla_attention topk write_index_k write_mla_kv"
)
QUICK = Plan(
    "quick",
    "few",
    tests={"cpu": _files(_QUICK_TESTS)},
    covered={},
    sins=(
        "topk_ties_to_the_larger",
        "cache_interleaved",
        "compact_forward_in_place",
        "scores_relu_of_the_sum",
        "flag_left_on_after_an_error",
        "hooks_get_padded_num_reqs",
    ),
    mutants=20,
)
