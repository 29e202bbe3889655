"""What is changed: cosmic-ray's mutants, one for each place and operator.

Cosmic-ray makes 25,000 of these three folders, two thirds of them because a binary operator has
eleven replacements. Here a place is changed once by an operator, to its nearest neighbour; and
what is no other program is left out (`DROPPED`).
"""

from __future__ import annotations

import ast
import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator

FOLDERS = ("kernels", "indexer", "speculator")

BINARY = (
    "Add_Sub Sub_Add Mul_Add Div_Mul FloorDiv_Mul Mod_Mul Pow_Mul LShift_RShift RShift_LShift"
    " BitAnd_BitOr BitOr_BitAnd BitXor_BitAnd"
)
COMPARISON = "Lt_LtE LtE_Lt Gt_GtE GtE_Gt Eq_NotEq NotEq_Eq Is_IsNot IsNot_Is"
OPERATORS = (
    *(f"ReplaceBinaryOperator_{name}" for name in BINARY.split()),
    *(f"ReplaceComparisonOperator_{name}" for name in COMPARISON.split()),
    *(f"ReplaceUnaryOperator_Delete_{name}" for name in ("USub", "Not", "Invert")),
    "NumberReplacer",  # one more; one less is not tried
    "AddNot",
    "ReplaceAndWithOr",
    "ReplaceOrWithAnd",
    "ReplaceTrueWithFalse",
    "ReplaceFalseWithTrue",
    "ReplaceBreakWithContinue",
    "ReplaceContinueWithBreak",
    "ZeroIterationForLoop",
    "ExceptionReplacer",
    "RemoveDecorator",
)

#: Why a mutant is not run: it is no other program, or none that this machine could tell apart.
DROPPED = {
    "no program": "it does not parse: a bare * or / between parameters is no operator",
    "annotation": "it lies in an annotation, which is never evaluated, or in `if TYPE_CHECKING`",
    "jit": "it removes @triton.jit: the interpreter calls a plain helper as well, a GPU does not",
}


_STARS = ("ReplaceBinaryOperator_Mul_Add", "ReplaceBinaryOperator_Div_Mul")


@dataclass(frozen=True)
class Mutant:
    """The `occurrence`-th place of `file` that `operator` changes."""

    file: str
    operator: str
    occurrence: int
    line: int
    start: tuple[int, int]
    end: tuple[int, int]
    dropped: str  # a key of DROPPED, or empty

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line} {self.operator}#{self.occurrence}"

    @property
    def cosmic_occurrence(self) -> int:
        """As cosmic-ray counts, which has two changes of a number: one more, one less."""
        return self.occurrence * _step(self.operator)

    def source(self, text: str) -> str:
        """`text`, the source of the file, with this mutant in it."""
        return mutate_code(text, get_operator(f"core/{self.operator}")(), self.cosmic_occurrence)

    def key(self, text: str) -> str:
        """Names the mutant as long as the text of its file stays as it is."""
        return hashlib.sha1(f"{self.place}\n{text}".encode()).hexdigest()


def files(root: Path) -> list[str]:
    """The modules that are mutated."""
    return [str(p.relative_to(root)) for f in FOLDERS for p in sorted((root / f).glob("*.py"))]


@cache
def mutants_of(file: str, text: str) -> tuple[Mutant, ...]:
    """All mutants of a module, those that are dropped too."""
    spans = _never_run(ast.parse(text))
    lines = text.splitlines()
    nodes = list(ast_nodes(get_ast(text)))
    found = []
    for operator in OPERATORS:
        places = get_operator(f"core/{operator}")().mutation_positions
        positions = [(node, *position) for node in nodes for position in places(node)]
        for occurrence, (node, start, end) in enumerate(positions[:: _step(operator)]):
            why = ""
            if any(first <= start and end <= last for first, last in spans):
                why = "annotation"
            elif operator == "RemoveDecorator" and lines[start[0] - 1].strip() == "@triton.jit":
                why = "jit"
            elif node.parent is not None and node.parent.type in ("parameters", "lambdef"):
                why = "no program" if operator in _STARS else ""
            found.append(Mutant(file, operator, occurrence, start[0], start, end, why))
    return tuple(found)


def count_dropped(mutants: list[Mutant]) -> dict[str, int]:
    return dict(Counter(m.dropped for m in mutants if m.dropped))


def _step(operator: str) -> int:
    return 2 if operator == "NumberReplacer" else 1


_Span = tuple[tuple[int, int], tuple[int, int]]


def _never_run(tree: ast.Module) -> list[_Span]:
    """Where annotations and `if TYPE_CHECKING` begin and end."""
    return [
        ((node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset))
        for node in _nodes_never_run(tree)
    ]


def _nodes_never_run(tree: ast.Module) -> Iterator[ast.AST]:
    for node in ast.walk(tree):
        if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation:
            yield node.annotation
        elif isinstance(node, ast.FunctionDef) and node.returns:
            yield node.returns
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            yield node
