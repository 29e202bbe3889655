"""Names statements of a module by their function, so that they keep their names as lines move."""

from __future__ import annotations

import ast


class Places:
    """The statements inside functions; a place is "name+2", in lines after the function's first."""

    def __init__(self, text: str) -> None:
        self._by_line: dict[int, tuple[str, int, tuple[int, int]]] = {}
        self._around: dict[int, str] = {}
        self._visit(ast.parse(text).body, "", 0)

    def of_line(self, line: int) -> str:
        """The innermost statement at a line; empty outside functions."""
        name, first, (start, _) = self._by_line.get(line, ("", 0, (0, 0)))
        return f"{name}+{start - first}" if name else ""

    def of_mutant(self, start: tuple[int, int]) -> str:
        """The same; for a decorator or a default, the name of its function alone."""
        line, column = start
        _, _, (_, first_column) = self._by_line.get(line, ("", 0, (0, 0)))
        inside = self.of_line(line)
        return inside if inside and column >= first_column else self._around.get(line, "")

    def _visit(self, body: list[ast.stmt], name: str, first: int) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef):
                top = min([node.lineno, *(d.lineno for d in node.decorator_list)])
                for line in range(top, (node.end_lineno or top) + 1):
                    self._around[line] = node.name
                self._visit(node.body, node.name, top)
                continue
            if name:
                for line in range(node.lineno, (node.end_lineno or node.lineno) + 1):
                    self._by_line[line] = (name, first, (node.lineno, node.col_offset))
            for inner in _bodies(node):
                self._visit(inner, name, first)


def _bodies(node: ast.AST) -> list[list[ast.stmt]]:
    fields = [getattr(node, name, []) for name in ("body", "orelse", "finalbody")]
    handlers = [handler.body for handler in getattr(node, "handlers", [])]
    return [body for body in [*fields, *handlers] if isinstance(body, list) and body]
