"""A parsed script: the names that its expressions refer to, and the position, function and block of each node."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeGuard

import libcst as cst
from libcst.metadata import (
    MetadataWrapper,
    PositionProvider,
    QualifiedNameSource,
    Scope,
    ScopeProvider,
)

Block = cst.Module | cst.IndentedBlock
Binding = tuple[Any, str]  # a scope or class, and a name in it
_WHITESPACE = (cst.BaseParenthesizableWhitespace, cst.TrailingWhitespace, cst.EmptyLine)


class Script:
    """A parsed script. Raises libcst.ParserSyntaxError if `source` is not valid Python.

    `nodes` are all nodes in the order of the source, except whitespace and comments.
    """

    def __init__(self, source: str) -> None:
        # The parser creates each node once, so a copy is not needed. The providers of libcst visit the module several
        # times each, so the other metadata is computed here: it takes a fraction of the time.
        wrapper = MetadataWrapper(cst.parse_module(source), unsafe_skip_copy=True)
        self.module = wrapper.module
        metadata = wrapper.resolve_many([PositionProvider, ScopeProvider])
        self._positions: Mapping[cst.CSTNode, Any] = metadata[PositionProvider]
        self._scopes: Mapping[cst.CSTNode, Any] = metadata[ScopeProvider]
        self._imported_names = dict[cst.CSTNode, str | None]()
        self._children = dict[cst.CSTNode, Sequence[cst.CSTNode]]()
        self._parents = dict[cst.CSTNode, cst.CSTNode]()
        self.nodes = list(self.walk(self.module))
        for node in self.nodes:
            self._parents |= dict.fromkeys(self.children(node), node)
        self._definitions = dict[str, cst.FunctionDef | cst.ClassDef]()  # the first of each name, except methods
        self._returned_values = dict[cst.FunctionDef | None, list[cst.BaseExpression]]()
        for node in self.nodes:
            if isinstance(node, cst.ClassDef) or (isinstance(node, cst.FunctionDef) and not self.is_method(node)):
                self._definitions.setdefault(node.name.value, node)
            elif isinstance(node, cst.Return) and node.value is not None:
                self._returned_values.setdefault(self.function(node), []).append(node.value)

    def line(self, node: cst.CSTNode) -> int:
        """Return the first line of `node`, counted from 1."""
        return int(self._positions[node].start.line)

    def position(self, node: cst.CSTNode) -> tuple[int, int]:
        """Return the line and the column at which `node` starts."""
        start = self._positions[node].start
        return int(start.line), int(start.column)

    def text(self, node: cst.CSTNode) -> str:
        """Return the source of `node`."""
        return self.module.code_for_node(node)

    def children(self, node: cst.CSTNode) -> Sequence[cst.CSTNode]:
        """Return the direct children of `node`, except whitespace and comments."""
        children = self._children.get(node)
        if children is None:
            children = [child for child in node.children if not isinstance(child, _WHITESPACE)]
            self._children[node] = children
        return children

    def walk(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """Yield `node` and its descendants in the order of the source, except whitespace and comments."""
        pending = [node]
        while pending:
            node = pending.pop()
            yield node
            pending += reversed(self.children(node))

    def parent(self, node: cst.CSTNode) -> cst.CSTNode | None:
        """Return the node that contains `node`, or None for the module."""
        return self._parents.get(node)

    def ancestors(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """Yield the nodes that contain `node`, from the inside out."""
        current = self.parent(node)
        while current is not None:
            yield current
            current = self.parent(current)

    def imported_name(self, node: cst.CSTNode) -> str | None:
        """Return the full name of the imported object that `node` refers to, such as "torch.distributed.barrier"."""
        # libcst also returns a qualified name for a member of a call's result: f.x for f().x
        if not _is_dotted_name(node):
            return None
        if node not in self._imported_names:
            scope = self._scopes.get(node)
            names = () if scope is None else scope.get_qualified_names_for(node)
            imported = {name.name for name in names if name.source is QualifiedNameSource.IMPORT}
            self._imported_names[node] = next(iter(imported)) if len(imported) == 1 else None
        return self._imported_names[node]

    def called_name(self, node: cst.CSTNode) -> str | None:
        """Return the full name of the imported function that `node` calls, or None."""
        return self.imported_name(node.func) if isinstance(node, cst.Call) else None

    def imported_references(self) -> Iterator[tuple[cst.Name | cst.Attribute, str]]:
        """Yield each expression that refers to an imported object, and the full name of the object."""
        for node in self.nodes:
            if not isinstance(node, cst.Name | cst.Attribute) or self.is_inside_import(node):
                continue
            parent = self.parent(node)
            if isinstance(parent, cst.Attribute):  # the longest expression is yielded
                continue
            if (name := self.imported_name(node)) is not None:
                yield node, name

    def is_inside_import(self, node: cst.CSTNode) -> bool:
        """Return whether `node` is a part of an import statement."""
        return any(isinstance(ancestor, cst.Import | cst.ImportFrom) for ancestor in self.ancestors(node))

    def function(self, node: cst.CSTNode) -> cst.FunctionDef | None:
        """Return the innermost function whose body contains `node`."""
        inner = node
        for ancestor in self.ancestors(node):
            if isinstance(ancestor, cst.FunctionDef) and inner is ancestor.body:
                return ancestor
            inner = ancestor
        return None

    def statement(self, node: cst.CSTNode) -> cst.SimpleStatementLine | None:
        """Return the simple statement that contains `node`, or None if it belongs to the header of a block."""
        for ancestor in (node, *self.ancestors(node)):
            if isinstance(ancestor, cst.SimpleStatementLine):
                return ancestor
            if isinstance(ancestor, cst.BaseCompoundStatement):
                return None
        return None

    def block(self, statement: cst.CSTNode) -> Block | None:
        """Return the block that directly contains `statement`."""
        parent = self.parent(statement)
        return parent if isinstance(parent, Block) else None

    def enclosing_control_flow(self, node: cst.CSTNode) -> list[cst.CSTNode]:
        """Return the if, for, while, try and match statements between `node` and its function or the module, except the
        main guard (see `is_main_guard`)."""
        statements = list[cst.CSTNode]()
        for ancestor in self.ancestors(node):
            if isinstance(ancestor, cst.FunctionDef | cst.ClassDef):
                break
            if isinstance(ancestor, cst.If | cst.For | cst.While | cst.Try | cst.Match) and not self.is_main_guard(
                ancestor
            ):
                statements.append(ancestor)
        return statements

    def is_main_guard(self, node: cst.CSTNode) -> TypeGuard[cst.If]:
        """Return whether `node` is the statement `if __name__ == "__main__":`."""
        if not isinstance(node, cst.If) or not isinstance(self.parent(node), cst.Module):
            return False
        return self.text(node.test).replace("'", '"').replace(" ", "") == '__name__=="__main__"'

    def main_block(self) -> Block:
        """Return the body of `if __name__ == "__main__":`, or the module if the script has no such statement."""
        for node in self.module.body:
            if self.is_main_guard(node) and isinstance(node.body, cst.IndentedBlock):
                return node.body
        return self.module

    def binding(self, node: cst.CSTNode) -> Binding | None:
        """Return the variable that `node`, a name or an attribute of `self`, refers to."""
        if isinstance(node, cst.Attribute) and isinstance(node.value, cst.Name) and node.value.value == "self":
            owner = next((ancestor for ancestor in self.ancestors(node) if isinstance(ancestor, cst.ClassDef)), None)
            return None if owner is None else (owner, node.attr.value)
        if not isinstance(node, cst.Name):
            return None
        scope = self._scopes.get(node)
        return None if scope is None else self._binding_in(scope, node.value)

    def scope(self, node: cst.FunctionDef | cst.Module) -> Any:
        """Return the scope of the variables of a function or of the module."""
        return self._scopes.get(node.body if isinstance(node, cst.FunctionDef) else node)

    def parameter(self, function: cst.FunctionDef, name: str) -> Binding | None:
        """Return the variable of the parameter `name` of `function`."""
        scope = self._scopes.get(function.body)
        return None if scope is None else self._binding_in(scope, name)

    def _binding_in(self, scope: Scope, name: str) -> Binding | None:
        scopes = {assignment.scope for assignment in scope[name]}
        return (next(iter(scopes)), name) if len(scopes) == 1 else None

    def called_function(self, call: cst.Call) -> tuple[cst.FunctionDef, int] | None:
        """Return the function of the script that `call` calls, and the number of its leading parameters, such as
        `self`, that receive no argument of the call. Return None if the function is unknown.

        The call of a class is a call of its `__init__`, and `self.name()` calls a method of the same class.
        """
        func = call.func
        if isinstance(func, cst.Name):
            definition = self._definitions.get(func.value)
            if isinstance(definition, cst.FunctionDef):
                return definition, 0
            method = None if definition is None else _method(definition, "__init__")
            return None if method is None else (method, 1)
        if isinstance(func, cst.Attribute) and self.text(func.value) == "self":
            owner = next((ancestor for ancestor in self.ancestors(call) if isinstance(ancestor, cst.ClassDef)), None)
            method = None if owner is None else _method(owner, func.attr.value)
            return None if method is None else (method, 1)
        return None

    def returned_values(self, function: cst.FunctionDef) -> Sequence[cst.BaseExpression]:
        """Return the values in the return statements of `function`."""
        return self._returned_values.get(function, ())

    def is_method(self, node: cst.FunctionDef) -> bool:
        """Return whether `node` is defined directly in a class."""
        block = self.parent(node)
        return block is not None and isinstance(self.parent(block), cst.ClassDef)

    def calls_in(self, node: cst.CSTNode) -> list[cst.Call]:
        """Return the calls inside `node`."""
        return [descendant for descendant in self.walk(node) if isinstance(descendant, cst.Call)]

    def uses_name(self, name: str) -> bool:
        """Return whether the script uses `name` as a variable or a parameter of a function."""
        return any(
            isinstance(node, cst.Name)
            and node.value == name
            and not (isinstance(self.parent(node), cst.Arg) and _is_keyword(self.parent(node), node))
            and not _is_attribute_name(self.parent(node), node)
            for node in self.nodes
        )


def targets(statement: cst.CSTNode) -> Sequence[cst.BaseExpression]:
    """Return the targets of an assignment that is the only statement on its line."""
    if not isinstance(statement, cst.SimpleStatementLine) or len(statement.body) != 1:
        return ()
    assignment = statement.body[0]
    if isinstance(assignment, cst.Assign):
        return [target.target for target in assignment.targets]
    return [assignment.target] if isinstance(assignment, cst.AnnAssign) else ()


def flat_targets(statement: cst.CSTNode) -> list[cst.BaseExpression]:
    """Return the targets of an assignment, with tuples and lists replaced by their elements."""
    pending, flat = list(targets(statement)), list[cst.BaseExpression]()
    while pending:
        target = pending.pop()
        if isinstance(target, cst.Tuple | cst.List):
            pending += [element.value for element in target.elements]
        else:
            flat.append(target)
    return flat


def assigned_value(statement: cst.CSTNode) -> cst.BaseExpression | None:
    """Return the value of an assignment or an expression that is the only statement on its line."""
    if not isinstance(statement, cst.SimpleStatementLine) or len(statement.body) != 1:
        return None
    small_statement = statement.body[0]
    return small_statement.value if isinstance(small_statement, cst.Assign | cst.AnnAssign | cst.Expr) else None


def _method(owner: cst.ClassDef, name: str) -> cst.FunctionDef | None:
    return next(
        (child for child in owner.body.body if isinstance(child, cst.FunctionDef) and child.name.value == name), None
    )


def _is_dotted_name(node: cst.CSTNode) -> bool:
    while isinstance(node, cst.Attribute):
        node = node.value
    return isinstance(node, cst.Name)


def _is_keyword(parent: cst.CSTNode | None, node: cst.Name) -> bool:
    return isinstance(parent, cst.Arg) and parent.keyword is node


def _is_attribute_name(parent: cst.CSTNode | None, node: cst.Name) -> bool:
    return isinstance(parent, cst.Attribute) and parent.attr is node
