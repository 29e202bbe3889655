"""Mutation runs are sound: mutants are programs, explanations fit, runs resume."""

import ast
import json
import random
from argparse import Namespace
from functools import cache
from pathlib import Path

import pytest

from mutation import calls as mutation_calls
from mutation import record
from mutation.__main__ import _chosen, _judge
from mutation.calls import read_calls, write_killers
from mutation.explain import FOLDER, explain, explanations_of, read_explanations
from mutation.mutants import DROPPED, FOLDERS, OPERATORS, Mutant, files, mutants_of
from mutation.places import Places
from mutation.record import recorded
from mutation.report import LEAST, Result, report
from mutation.runner import BRIEF, Verdict
from mutation.session import open_session
from sins.sin import ROOT

pytestmark = pytest.mark.once


@cache
def texts() -> dict[str, str]:
    return {file: (ROOT / file).read_text() for file in files(ROOT)}


@cache
def every() -> list[Mutant]:
    return [m for file, text in texts().items() for m in mutants_of(file, text)]


def test_every_module_of_the_three_folders_has_mutants() -> None:
    mutated = {m.file for m in every() if not m.dropped}
    without = {f for f in texts() if f not in mutated}
    assert all(Path(f).name == "__init__.py" or "def " in texts()[f] for f in without)
    assert {f.split("/")[0] for f in mutated} == set(FOLDERS)
    assert {m.operator for m in every()} <= set(OPERATORS)
    assert {m.dropped for m in every()} == {"", *DROPPED}


def test_mutants_are_other_programs_and_those_left_out_as_none_are_none() -> None:
    drawn = random.Random(0).sample([m for m in every() if not m.dropped], 60)
    for mutant in drawn:
        text = texts()[mutant.file]
        assert ast.dump(ast.parse(mutant.source(text))) != ast.dump(ast.parse(text)), mutant.place
    for mutant in [m for m in every() if m.dropped == "no program"][:10]:
        with pytest.raises(SyntaxError):
            ast.parse(mutant.source(texts()[mutant.file]))


def test_annotations_are_left_out_and_defaults_are_not() -> None:
    text = "def f(a: int | None = 1 + 2) -> int | 7:\n    b: int | str = a\n    return b | 3\n"
    found = {(m.operator, m.start): m.dropped for m in mutants_of("kernels/x.py", text)}
    assert found["ReplaceBinaryOperator_Add_Sub", (1, text.index("+"))] == ""
    assert found["NumberReplacer", (1, text.index("7"))] == "annotation"
    dropped = [why for (name, _), why in found.items() if "BitOr" in name]
    assert dropped == ["annotation", "annotation", ""]


def test_tests_of_the_map_exist_but_for_a_few_that_were_renamed_since() -> None:
    tests = {test.partition("[")[0] for _, test, _ in read_calls(ROOT).tests}
    gone = []
    for file in sorted({test.partition("::")[0] for test in tests}):
        path = ROOT / file
        tree = ast.parse(path.read_text() if path.is_file() else "")
        known = {n.name for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef)}
        names = {t.split("::")[1] for t in tests if t.startswith(f"{file}::")}
        gone += [f"{file}::{n}" for n in names if n not in known and not n.startswith("Test")]
    assert len(gone) <= len(tests) / 10, gone


def test_a_place_is_the_statement_by_its_function() -> None:
    text = "A = 1\n@d\ndef f(x=1):\n    y = (\n        x + 1\n    )\n    for z in y:\n"
    text += "        if z:\n            return\n    def g():\n        return 2\nclass C:\n"
    text += "    def h(self): return 3\n"
    places = Places(text)
    assert [places.of_line(line) for line in range(1, 14)] == [
        *("", "", "", "f+2", "f+2", "f+2", "f+5", "f+6", "f+7", "", "g+1", "", "h+0"),
    ]
    assert places.of_mutant((5, 10)) == "f+2"
    assert places.of_mutant((2, 0)) == places.of_mutant((3, 8)) == "f"
    assert places.of_mutant((13, 18)) == "h+0"
    assert places.of_mutant((1, 4)) == places.of_mutant((12, 0)) == ""


def test_every_mutant_has_tests() -> None:
    calls = read_calls(ROOT)
    without = {m.file for m in every() if not m.dropped and not calls.of(m)}
    assert without == set()


def test_what_killed_a_statement_before_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = read_calls(ROOT)
    mutant = next(m for m in every() if not m.dropped and len(calls.of(m)) > 3)
    backend, known, seconds = calls.tests[calls.of(mutant)[3]]
    new = ("cpu", "tests/test_x.py::test_y[1]")
    monkeypatch.setattr(mutation_calls, "KILLERS", tmp_path / "killers.json")
    kills = [(mutant, *new, 0.5), (mutant, backend, known, 9.0), (mutant, *new, 0.5)]
    write_killers(calls, kills)
    again = read_calls(ROOT)
    first = [again.tests[i] for i in again.of(mutant)]
    assert first[:2] == [(*new, 0.5), (backend, known, seconds)]
    assert len(first) == len(set(first)) >= len(calls.of(mutant))


def test_every_explanation_fits_a_mutant_of_today() -> None:
    fitting = {
        e for _, found in explanations_of(every(), read_explanations(), texts()) for e in found
    }
    assert [e for e in read_explanations() if e not in fitting] == []


def test_docs_tell_the_recorded_result_and_it_keeps_the_promise() -> None:
    head = json.loads((FOLDER.parent / "results.jsonl").read_text().splitlines()[0])
    killed, survived = sum(head["killed"].values()), head["survived"]
    assert killed + survived == head["mutants"] and killed >= 0.9 * head["mutants"]
    assert head["unexplained"] == 0 and sum(head["survivors_by_reason"].values()) == survived
    page = (ROOT / "docs" / "reliability.md").read_text()
    told = (
        f"Of all {head['mutants']:,} mutants {killed:,} are killed ({killed / head['mutants']:.1%})"
    )
    assert told in page and f"The other {survived} are explained" in page


BAD = ["", 'line = "x"\nreason = "speed"', 'line = "x"\nreason = "luck"\nwhy = "y"', "why = 1"]


@pytest.mark.parametrize("fields", BAD)
def test_an_explanation_of_another_form_is_refused(fields: str, tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(f'[[mutant]]\nfile = "kernels/x.py"\n{fields}\n')
    with pytest.raises(ValueError, match=r"a\.toml"):
        read_explanations(tmp_path)


def test_an_explanation_is_of_the_place_it_names(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(
        '[[mutant]]\nfile = "kernels/*"\nat = "y = 2"\nreason = "speed"\nwhy = "w"\n'
        '[[mutant]]\nfile = "kernels/x.py"\nline = "a = 1 + 1"\nnth = 1\n'
        'reason = "speed"\nwhy = "w"\n'
    )
    text = "x = 1; y = 2\na = 1 + 1\na = 2 + 1\n"
    mutants = mutants_of("kernels/x.py", text)
    found = explain(mutants, read_explanations(tmp_path), {"kernels/x.py": text})
    assert {m.start for m in found} == {(1, 11), (2, 8)}


ONE = Mutant("kernels/x.py", "NumberReplacer", 3, 1, (1, 0), (1, 1), "")


def test_a_session_resumes_and_forgets_what_has_changed(tmp_path: Path) -> None:
    key, other = ONE.key("a = 1"), ONE.key("a = 2")
    verdict = Verdict("failed", "tests/test_x.py::test_x", "why", "cpu", 4, 0.5)
    for _ in range(2):
        with open_session(tmp_path / "new" / "session.sqlite") as session:
            session.add({key: ONE})
            assert session.get(other) is None
            session.set(key, verdict)
    with open_session(tmp_path / "new" / "session.sqlite") as session:
        assert session.get(key) == verdict


def test_a_fresh_clone_goes_on_from_the_recorded_result_where_modules_are_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, path = "a = [0, 0, 0]\nb = 1 + 1\n", tmp_path / "results.jsonl"
    same, changed, gone = "kernels/x.py", "kernels/y.py", "kernels/z.py"
    texts = dict.fromkeys((same, changed, gone), text)
    mutants = [m for file in texts for m in mutants_of(file, text)]
    hows = [*record.LETTERS] * 3
    verdicts = {m: Verdict(how) for m, how in zip(mutants[1:], hows, strict=False)}
    Result(mutants, verdicts, {}, texts).write(path)
    head, *rows = map(json.loads, path.read_text().splitlines())
    assert {row["commit"] for row in rows} == {head["commit"]}

    at = {(head["commit"], file): text for file in texts}
    monkeypatch.setattr(record, "_text_at", lambda *key: at.get(key))
    today = {same: text, changed: f"{text}#"}
    found = dict(recorded([m for m in mutants if m.file in today], today, path))
    of_same = {m: v.how for m, v in verdicts.items() if m.file == same}
    assert {m: v.how for m, v in found.items()} == of_same
    assert len(of_same) == 5 and {v.commit for v in found.values()} == {head["commit"]}

    earlier = {m: Verdict(v.how, commit="0" * 40) for m, v in found.items()}
    Result(mutants, {**verdicts, **earlier}, {}, texts).write(path)
    _, *rows = map(json.loads, path.read_text().splitlines())
    assert [row["commit"] for row in rows] == ["0" * 40, head["commit"], head["commit"]]
    at.clear()  # a clone without that commit
    assert dict(recorded(mutants, texts, path)) == {}


def test_killers_of_files_that_are_not_judged_again_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = read_calls(ROOT)
    judged = next(m for m in every() if m.file == "kernels/topk.py" and not m.dropped)
    new = ("cpu", "tests/test_x.py::test_y", 0.5)
    before = json.loads(mutation_calls.KILLERS.read_text())
    (tmp_path / "killers.json").write_text(json.dumps(before))
    monkeypatch.setattr(mutation_calls, "KILLERS", tmp_path / "killers.json")
    write_killers(calls, [(judged, *new)], kept={"kernels/slots.py"})
    after = json.loads((tmp_path / "killers.json").read_text())
    own = {k: v for k, v in before.items() if k.startswith("kernels/slots.py::")}
    assert own and after == own | {calls.place(judged): [[*new[:2], new[2]]]}


class Judge:
    """Takes the place of a runner: every second mutant survives what it meets."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, bool, bool]] = []

    def judge(self, mutant: Mutant, quick: bool, long: bool) -> Verdict:
        self.asked.append((mutant.occurrence, quick, long))
        why = "" if long else BRIEF
        return Verdict("survived", why=why) if mutant.occurrence % 2 else Verdict("failed")


def test_a_later_run_judges_what_is_open_alone(tmp_path: Path) -> None:
    text = "a = [0, 0, 0, 0]\n"
    mutants = [m for m in mutants_of("kernels/x.py", text) if m.operator == "NumberReplacer"]
    keys = {mutant: mutant.key(text) for mutant in mutants}

    def run(patience: float, retry: bool = False) -> list[tuple[int, bool, bool]]:
        judge = Judge()
        args = Namespace(patience=patience, retry_survivors=retry, jobs=1)
        with open_session(tmp_path / "session.sqlite") as session:
            session.add({key: mutant for mutant, key in keys.items()})
            _judge(judge, session, keys, {mutants[3]}, args)
        return judge.asked

    assert [occurrence for occurrence, _, _ in run(0)] == [0, 1, 2, 3]
    assert run(0) == []
    assert run(1) == [(1, False, True)]  # 3 is explained
    assert run(1) == []
    assert run(1, retry=True) == [(1, False, True)]


def test_a_sample_follows_from_its_seed() -> None:
    def draw(seed: int) -> list[Mutant]:
        return _chosen(every(), Namespace(only=[], sample=150, seed=seed))

    assert draw(1) == draw(1)
    assert len(set(draw(1))) == 150
    assert set(draw(1)) != set(draw(2))
    assert not any(m.dropped for m in draw(1))


def test_exit_code_is_0_only_if_enough_are_killed_and_the_rest_explained(tmp_path: Path) -> None:
    text = f"a = [{', '.join(['0'] * 20)}]\n"
    mutants = [m for m in mutants_of("kernels/x.py", text) if m.operator == "NumberReplacer"]

    def code(survivors: int, explained: int, guilty: bool = False) -> int:
        hows = ["survived"] * survivors + ["failed"] * (20 - survivors)
        verdicts = {m: Verdict(how) for m, how in zip(mutants, hows, strict=True)}
        reasons = dict.fromkeys(mutants[:explained], read_explanations()[0])
        result = Result(mutants, verdicts, reasons, {"kernels/x.py": text})
        result.write(tmp_path / "result.jsonl")
        head, row = map(json.loads, (tmp_path / "result.jsonl").read_text().splitlines())
        assert row["NumberReplacer"] == "S" * survivors + "f" * (20 - survivors)
        assert head["survived"] == survivors
        assert head["unexplained"] == max(survivors - explained, 0)
        return report(result, {("cpu", "tests/x")} if guilty else set(), set(), True)

    assert LEAST == 0.9
    assert [code(0, 0), code(2, 2), code(2, 1), code(3, 3), code(0, 0, True)] == [0, 0, 1, 1, 1]
