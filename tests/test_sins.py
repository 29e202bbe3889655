"""The list of sins is sound: each can be committed, and names tests that exist."""

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from sins.judge import copied_tree, run_tests
from sins.sin import BACKENDS, ROOT, Sin, read_sin, read_sins

pytestmark = pytest.mark.once

SINS = read_sins()


@cache
def functions(file: str) -> set[str]:
    tree = ast.parse((ROOT / file).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_there_are_enough_of_them_everywhere() -> None:
    assert len(SINS) >= 24
    assert {sin.file.split("/")[0] for sin in SINS} == {"kernels", "indexer", "speculator"}
    assert {sin.backend for sin in SINS} == set(BACKENDS)


def test_no_two_are_the_same() -> None:
    for field in ("name", "new"):
        counts = Counter((s.file, s.old, s.new) if field == "new" else s.name for s in SINS)
        assert [key for key, count in counts.items() if count > 1] == []


@pytest.mark.parametrize("sin", SINS, ids=lambda sin: sin.name)
def test_it_can_be_committed_and_the_file_still_parses(sin: Sin) -> None:
    source = (ROOT / sin.file).read_text()
    sinful = sin.commit(source)
    assert sinful != source
    assert ast.dump(ast.parse(sinful)) != ast.dump(ast.parse(source))


@pytest.mark.parametrize("sin", SINS, ids=lambda sin: sin.name)
def test_what_rejects_it_exists(sin: Sin) -> None:
    assert sin.what and sin.tests
    assert sin.backend in BACKENDS
    for test in sin.tests:
        file, _, name = test.partition("::")
        assert (ROOT / file).is_file()
        assert not name or re.sub(r"\[.*", "", name) in functions(file)


GOOD = "what: a\nfile: b.py\nbackend: cpu\ntests: c\n\n x = 1\n-y = 2\n+y = 3\n\n z = 4\n"


def test_a_file_is_read_as_a_patch_is(tmp_path: Path) -> None:
    path = tmp_path / "name.diff"
    path.write_text(GOOD)
    sin = read_sin(path)
    assert (sin.old, sin.new) == ("x = 1\ny = 2\n\nz = 4\n", "x = 1\ny = 3\n\nz = 4\n")
    assert sin.commit(f"a\n{sin.old}b\n") == f"a\n{sin.new}b\n"
    for source in ("", f"  {sin.old}", sin.old * 2, sin.old.replace("y", "q")):
        with pytest.raises(ValueError, match="must occur once"):
            sin.commit(source)


@pytest.mark.parametrize(
    "good, bad, match",
    [("what: a\n", "", "fields"), ("cpu\n", "cpu\nmore: d\n", "fields"), ("+y", "y", "'y = 3'")],
)
def test_a_file_of_another_form_is_refused(good: str, bad: str, match: str, tmp_path: Path) -> None:
    path = tmp_path / "name.diff"
    path.write_text(GOOD.replace(good, bad))
    with pytest.raises(ValueError, match=match):
        read_sin(path)


VERDICTS = {
    "assert True": "passed",
    "assert False": "failed",
    "import os; os.abort()": "crashed",
    "while True: pass": "hung",
    "import missing": "failed",
    "": "error",  # no such test
}


@pytest.fixture(scope="module")
def small_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package without contents, its guard, and a test for each verdict."""
    tree = tmp_path_factory.mktemp("small")
    (tree / "src" / "lightning_indexer").mkdir(parents=True)
    (tree / "src" / "lightning_indexer" / "__init__.py").touch()
    (tree / "tests" / "sins").mkdir(parents=True)
    for name in ("__init__.py", "guard.py"):
        (tree / "tests" / "sins" / name).write_text((ROOT / "tests" / "sins" / name).read_text())
    (tree / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    bodies = [body for body in VERDICTS if body]
    tests = [f"def test_{i}():\n    {body}\n" for i, body in enumerate(bodies)]
    (tree / "tests" / "test_it.py").write_text("\n".join(tests))
    return tree


@pytest.mark.parametrize("body, verdict", VERDICTS.items(), ids=VERDICTS.values())
def test_verdict_is_what_became_of_the_tests(body: str, verdict: str, small_tree: Path) -> None:
    test = f"tests/test_it.py::test_{list(VERDICTS).index(body)}"
    outcome = run_tests(small_tree, [test], "cpu", 3 if verdict == "hung" else 120, "-x")
    assert outcome.verdict == verdict, outcome.output
    assert outcome.failed == ((test,) if verdict == "failed" else ())
    assert outcome.rejects == (verdict in ("failed", "crashed", "hung"))


def test_another_package_than_the_copys_is_not_judged() -> None:
    with copied_tree() as tree:
        (tree / "src").rename(tree / "elsewhere")
        (tree / "tests" / "test_ok.py").write_text("def test_ok():\n    pass\n")
        outcome = run_tests(tree, ["tests/test_ok.py"], "cpu", 120)
    assert outcome.verdict == "error"
    assert "must be that of" in outcome.output
