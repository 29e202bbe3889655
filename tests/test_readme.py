"""The README's examples run as printed, links lead somewhere, tables match the code."""

import inspect
import re
from pathlib import Path

import pytest

import lightning_indexer

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def python_examples(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def test_python_examples_run() -> None:
    examples = python_examples(README)
    assert examples
    scope: dict[str, object] = {"__name__": "readme"}
    for example in examples:  # one after another: later ones use names of earlier ones
        exec(compile(example, "README.md", "exec"), scope)


@pytest.mark.once
def test_example_of_an_own_runtime_runs() -> None:
    page = (ROOT / "docs/integration.md").read_text()
    example = python_examples(page)[0]
    assert 40 <= len(example.splitlines()) <= 50
    scope: dict[str, object] = {"__name__": "integration"}
    exec(compile(example, "integration.md", "exec"), scope)
    assert scope["one_more"].isfinite().all()


@pytest.mark.once
def test_readme_has_at_most_120_lines() -> None:
    assert len(README.splitlines()) <= 120


@pytest.mark.once
@pytest.mark.parametrize(
    "page", ["README.md", "CONTRIBUTING.md", *(f"docs/{p.name}" for p in ROOT.glob("docs/*.md"))]
)
def test_links_lead_to_files(page: str) -> None:
    links = re.findall(r"\]\(([^)#\s]+)\)", (ROOT / page).read_text())
    missing = [link for link in links if not ((ROOT / page).parent / link).exists()]
    assert not missing


@pytest.mark.once
def test_readme_names_real_make_targets() -> None:
    makefile = (ROOT / "Makefile").read_text()
    pages = README + (ROOT / "CONTRIBUTING.md").read_text()
    named = set(re.findall(r"`make ([a-z0-9-]+)|^make ([a-z0-9-]+)", pages, re.MULTILINE))
    assert named
    for target in {a or b for a, b in named}:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


@pytest.mark.once
def test_table_of_ops_matches_the_signatures() -> None:
    rows = re.findall(
        r"^\| `((\w+)\([^`]*\))` \|", (ROOT / "docs/ops.md").read_text(), re.MULTILINE
    )
    assert rows
    for row, name in rows:
        signature = inspect.signature(getattr(lightning_indexer, name))
        plain = signature.replace(
            parameters=[p.replace(annotation=p.empty) for p in signature.parameters.values()],
            return_annotation=signature.empty,
        )
        assert row == f"{name}{plain}".replace("'", '"')
