"""The figures as Markdown, between two markers of docs/reliability.md."""

from __future__ import annotations

from typing import Any

from counting import FAULTS, FIGURES

from .figures import branch_share, examples_of, figure_of
from .floors import BRANCHES, EXAMPLES, MUTANTS_KILLED
from .plan import BACKENDS, ROOT

PAGE = ROOT / "docs" / "reliability.md"
BEGIN, END = "<!-- figures: make verify -->\n", "<!-- end of figures -->\n"
PASSES = ("PyTorch path", "Triton interpreter")  # BACKENDS, to a reader

Result = dict[str, Any]


def insert(page: str, tables: str) -> str:
    """`page` with `tables` between its markers."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the page must hold {BEGIN!r} and, behind it, {END!r}")
    return f"{before}{begin}{tables}{end}{after}"


def shown(page: str) -> str:
    """What is between its markers."""
    return page.partition(BEGIN)[2].partition(END)[0]


def markdown(result: Result) -> str:
    """All tables: the figures, then faults, examples and coverage in detail."""
    parts = [_about(result), _figures(result), _faults(result), _examples(result)]
    return "\n".join([*parts, *([_coverage(result)] if "coverage" in result else [])])


def _about(result: Result) -> str:
    minutes = sum(result["seconds"].values()) / 60
    versions = f"Python {result['python']}, PyTorch {result['torch']}, Triton {result['triton']}"
    return (
        f"Commit {result['commit']}, {result['date']}: {minutes:.0f} minutes on"
        f" {result['cores']} cores, {versions}.\n"
    )


def _figures(result: Result) -> str:
    sins, mutation = result["sins"], result["mutation"]
    tests = {
        b: f"{_n(outcome['passed'])} / {len(outcome['failed'])}"
        for b, outcome in result["tests"].items()
    }
    rows = [
        ["tests passed / failed", *(tests.get(b, "") for b in BACKENDS), "none fails"],
        [
            "property examples",
            *(_n(examples_of(result, backend=b)) for b in BACKENDS),
            f"≥ {_n(EXAMPLES)}",
        ],
        *(
            [figure, *(_pair(*figure_of(result, figure, b)) for b in BACKENDS), "all"]
            for figure in FIGURES
        ),
        ["sins committed / rejected", _pair(sins["committed"], sins["rejected"]), "", "all"],
        [
            "mutants of a sample / killed",
            _pair(mutation["run"], mutation["killed"]),
            "",
            f"≥ {MUTANTS_KILLED:.0%}",
        ],
        ["survivors / explained", _pair(*_survivors(mutation)), "", "all"],
    ]
    if "coverage" in result:
        share = f"{branch_share(result['coverage']):.1%}"
        rows.append(["branches of host code taken", share, "", f"≥ {BRANCHES:.0%}"])
    return _table(["figure", *PASSES, "promise"], rows)


def _survivors(mutation: Result) -> tuple[int, int]:
    survivors = mutation["run"] - mutation["killed"]
    return survivors, survivors - mutation["unexplained"]


def _faults(result: Result) -> str:
    rows = [
        [kind, *(_pair(*by[b]) if b in by else "" for b in BACKENDS)]
        for kind, by in result["figures"][FAULTS].items()
    ]
    return _table([FAULTS, *PASSES], rows)


def _examples(result: Result) -> str:
    rows = []
    for op, regimes in result["examples"].items():
        sums = {regime: sum(counts.values()) for regime, counts in regimes.items()}
        most = sorted(sums, key=lambda regime: (-sums[regime], regime))
        by = ", ".join(f"{regime} {_n(sums[regime])}" for regime in most)
        rows.append([f"`{op}`", *(_n(examples_of(result, op, b)) for b in BACKENDS), by])
    return _table(["property examples of", *PASSES, "both, by regime"], rows)


def _coverage(result: Result) -> str:
    rows = [
        [
            f"`{folder or 'lightning_indexer'}`",
            _n(row["num_branches"]),
            f"{row['covered_branches'] / max(row['num_branches'], 1):.1%}",
            f"{row['covered_lines'] / max(row['num_statements'], 1):.1%}",
        ]
        for folder, row in result["coverage"].items()
    ]
    return _table(["host code", "branches", "taken", "statements run"], rows)


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _pair(done: int, right: int) -> str:
    return f"{_n(done)} / {_n(right)}"


def _n(number: int) -> str:
    return f"{number:,}"
