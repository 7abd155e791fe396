"""Replacements of expressions and statements of a script, their reasons, and the problems that prevent a conversion."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import libcst as cst

from unitrain.migrate.script import Script

ExpressionBuilder = Callable[[cst.CSTNode], cst.BaseExpression]
Statement = cst.SimpleStatementLine | cst.BaseCompoundStatement
StatementsBuilder = Callable[[Statement], Sequence[Statement]]


@dataclass(frozen=True, order=True)
class Reason:
    """Why a line of the original script changes, or a hint about this line."""

    line: int
    text: str


@dataclass(frozen=True, order=True)
class Problem:
    """A part of the script that cannot be converted. `name` is its source, and `fix` states how to change the script.

    If `is_structural` is True, the script as a whole cannot be converted; otherwise an edit of this line is sufficient.
    """

    line: int
    name: str
    fix: str
    is_structural: bool = False


class Edits:
    """Collects edits of a script. `backend_uses` contains the nodes that become uses of the variable `backend`."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.reasons = set[Reason]()
        self.problems = set[Problem]()
        self.converted = set[cst.CSTNode]()  # nodes with references that the conversion removes
        self.backend_uses = list[cst.CSTNode]()
        self.backend = "backend"
        while script.uses_name(self.backend):
            self.backend = f"unitrain_{self.backend}"
        self._expressions = dict[cst.CSTNode, ExpressionBuilder]()
        self._statements = dict[cst.CSTNode, StatementsBuilder]()

    def explain(self, node: cst.CSTNode, text: str) -> None:
        """Record why the line of `node` changes, or a hint about it."""
        self.reasons.add(Reason(self.script.line(node), text))

    def refuse(self, node: cst.CSTNode, fix: str, *, name: str | None = None, is_structural: bool = False) -> None:
        """Record that `node` cannot be converted."""
        text = " ".join((name or self.script.text(node)).split())
        text = text if len(text) <= 80 else text[:77] + "..."
        self.problems.add(Problem(self.script.line(node), text, fix, is_structural))

    def replace(self, node: cst.CSTNode, expression: str | ExpressionBuilder, *, uses_backend: bool = True) -> None:
        """Replace the expression `node` with the source `expression`. If `expression` is a function, replace `node`
        with its result for the node with converted children."""
        build = expression if callable(expression) else (lambda _: cst.parse_expression(str(expression)))
        self._expressions[node] = build
        if uses_backend:
            self.backend_uses.append(node)

    def replace_statement(self, node: cst.CSTNode, build: StatementsBuilder) -> None:
        """Replace a statement with the statements that `build` returns for the statement with converted children."""
        self._statements[node] = build

    def insert_before(self, node: cst.CSTNode, statements: Sequence[Statement]) -> None:
        """Insert `statements` before the statement `node`. If `node` is also replaced, call `replace_statement`
        first."""
        build = self._statements.get(node)

        def with_inserted(updated: Statement) -> Sequence[Statement]:
            replacements = list(build(updated)) if build is not None else [updated]
            if replacements:  # otherwise, the statement is removed
                replacements[0] = replacements[0].with_changes(leading_lines=())
            return [*statements, *replacements]

        self._statements[node] = with_inserted

    def remove_statement(self, node: cst.CSTNode) -> None:
        """Remove a statement and its comments."""
        self.replace_statement(node, lambda _: ())

    def is_replaced(self, node: cst.CSTNode) -> bool:
        """Return whether a statement is replaced or removed."""
        return node in self._statements

    def source(self) -> str:
        """Return the source of the converted script."""
        converted = self.script.module.visit(_Transformer(self.script, self._expressions, self._statements))
        assert isinstance(converted, cst.Module)
        return converted.code


class _Transformer(cst.CSTTransformer):
    def __init__(
        self,
        script: Script,
        expressions: dict[cst.CSTNode, ExpressionBuilder],
        statements: dict[cst.CSTNode, StatementsBuilder],
    ) -> None:
        super().__init__()
        self._expressions, self._statements = expressions, statements
        self._containing = {ancestor for node in (*expressions, *statements) for ancestor in script.ancestors(node)}

    def on_visit(self, node: cst.CSTNode) -> bool:
        return node in self._containing  # only nodes that contain edits have other children in the converted script

    def on_leave(self, original_node: Any, updated_node: Any) -> Any:
        updated = super().on_leave(original_node, updated_node)
        if (build := self._expressions.get(original_node)) is not None:
            assert isinstance(updated, cst.CSTNode)
            return _keep_parentheses(original_node, build(updated))
        if (build_statements := self._statements.get(original_node)) is not None:
            assert isinstance(updated, Statement)
            statements = list(build_statements(updated))
            if not statements:
                return cst.RemoveFromParent()
            if updated not in statements:  # comments before the statement remain
                statements[0] = statements[0].with_changes(leading_lines=updated.leading_lines)
            return statements[0] if len(statements) == 1 else cst.FlattenSentinel(statements)
        return updated


def _keep_parentheses(original: cst.CSTNode, new: cst.BaseExpression) -> cst.BaseExpression:
    lpar, rpar = getattr(original, "lpar", ()), getattr(original, "rpar", ())
    return new.with_changes(lpar=[*lpar, *new.lpar], rpar=[*new.rpar, *rpar]) if lpar else new


def parse_statement(text: str) -> Statement:
    """Return the statement with the source `text`."""
    statement = cst.parse_statement(text)
    assert isinstance(statement, Statement)
    return statement
