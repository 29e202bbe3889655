"""The reliability figures: a result that breaks a promise is noticed, and counts are added up."""

import copy
import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

import counting
from counting import AGREEMENT, CANARIES, FIGURES, tallies, tally
from verify import __main__ as command
from verify.figures import branch_share, examples_of, figure_of, gather
from verify.floors import misses
from verify.plan import BACKENDS, FULL, QUICK, ROOT
from verify.stages import by_folder, outcomes, read_mutants, read_sins
from verify.table import BEGIN, END, insert, markdown, shown

pytestmark = pytest.mark.once


def good() -> dict:
    """A made-up result that breaks no promise."""
    counters = {
        "examples": [["topk_indices", "ties", 9_000], ["topk_indices", "nan", 1_000]],
        "done": [[figure, kind, 6] for figure in FIGURES for kind in ("a", "b")],
        "right": [[figure, kind, 6] for figure in FIGURES for kind in ("a", "b")],
    }
    outcome = {"passed": 5, "skipped": 1, "failed": [], "counters": counters}
    row = {"num_statements": 9, "covered_lines": 9, "num_branches": 100, "covered_branches": 95}
    return gather(dict.fromkeys(BACKENDS, outcome)) | {
        "plan": FULL.name,
        "sins": {"committed": 9, "rejected": 9, "accepted": [], "innocent_pass": True},
        "mutation": {"run": 150, "killed": 135, "unexplained": 0, "innocent_pass": True},
        "coverage": {"kernels": row, "": dict(row)},
        "seconds": {"all": 60.0},
        **dict.fromkeys(("commit", "date", "python", "torch", "triton"), "x"),
        "cores": 2,
    }


def test_a_good_result_breaks_no_promise() -> None:
    assert misses(good()) == []


BROKEN = {
    "cpu pass: tests.test_a::b failed": lambda r: r["tests"]["cpu"].update(
        failed=["tests.test_a::b"]
    ),
    "interpreter pass: no test passed": lambda r: r["tests"]["interpreter"].update(passed=0),
    f"{CANARIES}: 24 / 23 (b)": lambda r: r["figures"][CANARIES]["b"].update(cpu=[6, 5]),
    f"{AGREEMENT}: nothing was counted": lambda r: r["figures"][AGREEMENT].clear(),
    "sin accepted: a_sin": lambda r: r["sins"].update(accepted=["a_sin"]),
    "without any sin": lambda r: r["sins"].update(innocent_pass=False),
    "without any mutant": lambda r: r["mutation"].update(innocent_pass=False),
    "1 mutants survive and nobody says why": lambda r: r["mutation"].update(unexplained=1),
    "no pass of the suite on: interpreter": lambda r: r["tests"].pop("interpreter"),
    "19999 property examples": lambda r: r["examples"]["topk_indices"]["nan"].update(cpu=999),
    "149 mutants run": lambda r: r["mutation"].update(run=149),
    "134 of 150 mutants killed": lambda r: r["mutation"].update(killed=134),
    "41 minutes": lambda r: r["seconds"].update(all=2_460.0),
    "94.5% of the branches": lambda r: r["coverage"][""].update(covered_branches=94),
}


@pytest.mark.parametrize("reason", BROKEN)
def test_each_broken_promise_is_named(reason: str) -> None:
    result = copy.deepcopy(good())
    BROKEN[reason](result)
    (missed,) = misses(result)
    assert reason in missed


def test_a_quick_run_keeps_every_equality_and_no_floor() -> None:
    result = copy.deepcopy(good()) | {"plan": QUICK.name}
    del result["coverage"], result["tests"]["interpreter"]
    result["mutation"].update(run=2, killed=1)
    assert misses(result) == []
    assert "topk_indices" in markdown(result)
    result["sins"].update(accepted=["a_sin"])
    result["figures"][CANARIES]["a"].update(cpu=[6, 0])
    assert len(misses(result)) == 2


def test_plans_name_files_and_sins_that_exist() -> None:
    arguments = [
        a for plan in (FULL, QUICK) for by in (plan.tests, plan.covered) for a in by.items()
    ]
    paths = {path.removeprefix("--ignore=") for _, given in arguments for path in given}
    assert sorted(path for path in paths if not (ROOT / path).exists()) == []
    assert {backend for backend, _ in arguments} == set(BACKENDS) == FULL.tests.keys()
    names = {path.stem for path in (ROOT / "tests" / "sins").glob("*/*.diff")}
    assert set(QUICK.sins) <= names


def test_passes_are_added_up_by_op_regime_and_kind() -> None:
    result = good()
    assert examples_of(result) == 20_000
    assert examples_of(result, "topk_indices", "cpu") == 10_000
    assert result["examples"]["topk_indices"]["nan"] == {"cpu": 1_000, "interpreter": 1_000}
    assert figure_of(result, CANARIES) == (24, 24)
    assert figure_of(result, CANARIES, "cpu") == (12, 12)
    assert branch_share(result["coverage"]) == 0.95


def test_what_was_done_and_never_came_out_right_counts() -> None:
    counters = {"examples": [], "done": [[CANARIES, "a", 3]], "right": []}
    result = gather({"cpu": {"passed": 1, "failed": [], "counters": counters}})
    assert figure_of(result, CANARIES) == (3, 0)


def test_failed_and_broken_tests_are_told_from_skipped_ones(tmp_path: Path) -> None:
    root = ElementTree.Element("testsuites")
    for name, outcome in (("a", None), ("b", "skipped"), ("c", "failure"), ("d", "error")):
        case = ElementTree.SubElement(root, "testcase", classname="tests.t", name=name)
        if outcome:
            ElementTree.SubElement(case, outcome)
    ElementTree.ElementTree(root).write(tmp_path / "report.xml")
    assert outcomes(tmp_path / "report.xml") == {
        "passed": 1,
        "skipped": 1,
        "failed": ["tests.t::c", "tests.t::d"],
    }


def test_coverage_is_summed_by_folder_of_the_package() -> None:
    one = {"num_statements": 3, "covered_lines": 2, "num_branches": 4, "covered_branches": 1}
    names = (
        "kernels/topk.py",
        "kernels/compact.py",
        "src/lightning_indexer/testing/conformance/topk.py",
        "src/lightning_indexer/cli.py",
        "src/lightning_indexer_pytest.py",
    )
    found = by_folder({name: {"summary": one | {"excluded_lines": 7}} for name in names})
    assert {name: row["num_branches"] for name, row in found.items()} == {
        "": 8,
        "kernels": 8,
        "testing": 4,
    }
    assert found["kernels"] == {key: 2 * count for key, count in one.items()}


def test_sins_that_crash_or_hang_are_rejected() -> None:
    verdicts = ("failed", "crashed", "hung", "passed", "error")
    report = {"innocent_pass": True, "sins": [{"name": v, "verdict": v} for v in verdicts]}
    assert read_sins(report) == {
        "committed": 5,
        "rejected": 3,
        "accepted": ["passed", "error"],
        "innocent_pass": True,
    }


def test_mutants_are_read_from_the_first_line() -> None:
    head = {"mutants": 20, "killed": {"failed": 17, "hung": 1}, "unexplained": 1}
    head["survivors_by_reason"] = {"equivalent": 1}
    found = read_mutants(json.dumps(head) + '\n{"file": "kernels/topk.py"}\n')
    assert (found["run"], found["killed"], found["unexplained"]) == (20, 18, 1)


def test_tables_replace_what_was_between_the_markers() -> None:
    page = f"a\n{BEGIN}old\n{END}b\n"
    assert insert(page, "new\n") == f"a\n{BEGIN}new\n{END}b\n"
    assert shown(insert(page, "new\n")) == "new\n"
    for lacking in ("a\n", f"a\n{BEGIN}old\n", f"{END}{BEGIN}"):
        with pytest.raises(ValueError, match="must hold"):
            insert(lacking, "new\n")


def test_checks_are_tallied_whether_or_not_they_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DONE", "RIGHT"):
        monkeypatch.setattr(counting, name, counting.Counter())
    check = tallies(CANARIES, "a")(lambda number: 1 // number)
    assert check(1) == 1
    with pytest.raises(ZeroDivisionError):
        check(0)
    tally(CANARIES, "b", done=7, right=5)
    assert counting.DONE == {(CANARIES, "a"): 2, (CANARIES, "b"): 7}
    assert counting.RIGHT == {(CANARIES, "a"): 1, (CANARIES, "b"): 5}
    with pytest.raises(AssertionError):
        tally("no such figure", "a", right=1)


def test_workers_add_their_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    counters = {name: counting.Counter({("a", "b"): 2}) for name in counting.COUNTERS}
    monkeypatch.setattr(counting, "COUNTERS", counters)
    counting.add(json.loads(json.dumps(counting.rows())))
    assert all(counter == {("a", "b"): 4} for counter in counters.values())


class _Case:
    def __init__(self, **fields: object) -> None:
        vars(self).update(fields)


@pytest.mark.parametrize(
    "regime, drawn",
    [
        ("ties", (3, _Case(garbage=True, regime="ties"))),
        ("reversed", (_Case(order="reversed"),)),
        ("garbage", (_Case(garbage=True),)),
        ("valid", (_Case(garbage=False),)),
        ("any", (3, "nan")),
    ],
)
def test_an_example_counts_under_its_regime(
    regime: str, drawn: tuple, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counting, "EXAMPLES", counting.Counter())
    counting.counts_examples("op")(lambda *_: None)(*drawn)
    assert dict(counting.EXAMPLES) == {("op", regime): 1}


def test_exit_code_and_last_line_say_whether_every_promise_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    file = tmp_path / "figures.json"
    monkeypatch.setattr("sys.argv", ["verify", "--read", str(file)])
    for result, code, words in (
        (good(), 0, "every promise holds"),
        (good() | {"sins": good()["sins"] | {"accepted": ["a_sin"]}}, 1, "1 promises broken"),
    ):
        file.write_text(json.dumps(result))
        assert command.main() == code
        assert capsys.readouterr().out.rstrip().endswith(words)
