"""The order in which the statements of a script run, followed through calls of its functions.

The order is determined without running the script: both branches of a condition may run, a loop may run zero times, and
a function runs where it is called or passed to another function. Methods are found by name. Functions that the script
does not call are not followed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import libcst as cst

from unitrain.migrate.script import Script

# Functions that store the function that they receive, and do not call it before the script continues.
_REGISTER_FUNCTIONS = ("atexit.register", "signal.signal")
_ALWAYS = frozenset({"True"})

# The conditions under which the ranks have been started, as source text: `_ALWAYS`, a set of conditions, or `_NEVER` if
# no such condition is known. None if a statement is not reached.
_State = frozenset[str] | None
_NEVER: frozenset[str] = frozenset()


def nodes_before_start(script: Script, start: cst.CSTNode, nodes: Collection[cst.CSTNode]) -> list[cst.CSTNode]:
    """Return the subset of `nodes` that may run before the statement `start`, or without it, in the order of the
    script."""
    execution = _Execution(script, start, nodes)
    execution.run()
    return sorted(execution.early, key=script.position)


def ends_process(script: Script, node: cst.CSTNode | None) -> bool:
    """Return whether `node` is a call that ends the process, such as `sys.exit()`."""
    return isinstance(node, cst.Call) and (
        script.called_name(node) in ("sys.exit", "os._exit") or script.text(node.func) in ("exit", "quit")
    )


class _Execution:
    def __init__(self, script: Script, start: cst.CSTNode, nodes: Collection[cst.CSTNode]) -> None:
        self.early = set[cst.CSTNode]()
        self._script, self._start, self._nodes = script, start, set(nodes)
        self._results = dict[tuple[cst.FunctionDef, frozenset[str]], frozenset[str]]()
        self._returned = list[list[_State]]()  # for each running function, the states at its return statements
        self._functions = _functions_by_name(script)
        self._methods = _unique_methods(script)

    def run(self) -> None:
        self._block(self._script.module.body, _NEVER)
        function = self._script.function(self._start)
        if function is not None and not any(called is function for called, _ in self._results):
            self._function(function, _NEVER)  # another file calls it

    def _block(self, statements: Iterable[cst.CSTNode], state: _State) -> _State:
        for statement in statements:
            if state is None:
                break
            state = self._statement(statement, state)
        return state

    def _statement(self, statement: cst.CSTNode, state: frozenset[str]) -> _State:
        if statement is self._start:
            state = _ALWAYS
        self._check(statement, state)
        if isinstance(statement, cst.SimpleStatementLine | cst.SimpleStatementSuite):
            return self._block(statement.body, state)
        if isinstance(statement, cst.If):
            return self._if(statement, state)
        if isinstance(statement, cst.For | cst.While):
            return self._loop(statement, state)
        if isinstance(statement, cst.Try | cst.TryStar):
            return self._try(statement, state)
        if isinstance(statement, cst.With):
            for item in statement.items:
                state = self._expression(item, state)
            return self._block(statement.body.body, state)
        if isinstance(statement, cst.Match):
            state = self._expression(statement.subject, state)
            return _merge([state, *(self._block(case.body.body, state) for case in statement.cases)])
        if isinstance(statement, cst.FunctionDef):
            return self._children([*statement.decorators, statement.params], state)
        if isinstance(statement, cst.ClassDef):
            state = self._children([*statement.decorators, *statement.bases, *statement.keywords], state)
            return self._block(statement.body.body, state)
        if isinstance(statement, cst.Return):
            state = self._children(self._script.children(statement), state)
            if self._returned:
                self._returned[-1].append(state)
            return None
        state = self._children(self._script.children(statement), state)
        if isinstance(statement, cst.Expr) and ends_process(self._script, statement.value):
            return None
        return None if isinstance(statement, cst.Raise | cst.Break | cst.Continue) else state

    def _if(self, statement: cst.If, state: frozenset[str]) -> _State:
        state = self._expression(statement.test, state)
        if self._script.is_main_guard(statement):
            return self._block(statement.body.body, state)
        then = self._block(statement.body.body, _assume(statement.test, state, is_true=True))
        other_state = _assume(statement.test, state, is_true=False)
        other: _State = other_state
        if isinstance(statement.orelse, cst.If):
            other = self._statement(statement.orelse, other_state)
        elif statement.orelse is not None:
            other = self._block(statement.orelse.body.body, other_state)
        merged = _merge([then, other])
        if merged is None or merged == _ALWAYS:
            return merged
        if then == _ALWAYS:
            return merged | {_condition(statement.test, is_true=True)}
        return merged | {_condition(statement.test, is_true=False)} if other == _ALWAYS else merged

    def _loop(self, statement: cst.For | cst.While, state: frozenset[str]) -> _State:
        if isinstance(statement, cst.For):
            state = self._expression(statement.iter, state)
            state = self._expression(statement.target, state)
        else:
            state = self._expression(statement.test, state)
        self._block(statement.body.body, state)
        return self._block(statement.orelse.body.body, state) if statement.orelse is not None else state

    def _try(self, statement: cst.Try | cst.TryStar, state: frozenset[str]) -> _State:
        """Assume that the handlers and the `finally` block run after the start if the body contains the start: if they
        run before it, the start has failed."""
        result = self._block(statement.body.body, state)
        after_body = state if result is None else result
        if statement.orelse is not None and result is not None:
            result = self._block(statement.orelse.body.body, result)
        results = [result]
        handled = [self._block(handler.body.body, after_body) for handler in statement.handlers]
        results += [state for end in handled if end is not None]
        merged = _merge(results)
        if statement.finalbody is not None:
            final = self._block(statement.finalbody.body.body, after_body)
            merged = None if final is None else merged
        return merged

    def _children(self, children: Sequence[cst.CSTNode], state: frozenset[str]) -> frozenset[str]:
        for child in children:
            state = self._expression(child, state)
        return state

    def _expression(self, node: cst.CSTNode, state: frozenset[str]) -> frozenset[str]:
        if isinstance(node, cst.Lambda):
            return self._children([node.params], state)
        if isinstance(node, cst.IfExp):
            self._check(node, state)
            state = self._expression(node.test, state)
            self._expression(node.body, _assume(node.test, state, is_true=True))
            self._expression(node.orelse, _assume(node.test, state, is_true=False))
            return state
        if isinstance(node, cst.BooleanOperation):
            self._check(node, state)
            state = self._expression(node.left, state)
            self._expression(node.right, _assume(node.left, state, is_true=isinstance(node.operator, cst.And)))
            return state
        state = self._children(self._script.children(node), state)
        self._check(node, state)
        if isinstance(node, cst.Call):
            for function in self._called(node):
                state = self._function(function, state)
        return state

    def _check(self, node: cst.CSTNode, state: frozenset[str]) -> None:
        if state != _ALWAYS and node in self._nodes:
            self.early.add(node)

    def _called(self, call: cst.Call) -> list[cst.FunctionDef]:
        """Return the functions of the script that `call` calls or passes to another function."""
        passed = [argument.value.value for argument in call.args if isinstance(argument.value, cst.Name)]
        functions = [self._functions[name] for name in passed if name in self._functions]
        callee = self._script.called_function(call)
        if callee is not None:
            return [callee[0], *functions]
        if isinstance(call.func, cst.Attribute) and self._script.imported_name(call.func) is None:
            method = self._methods.get(call.func.attr.value)
            if method is not None:
                return [method, *functions]
        return [] if self._script.called_name(call) in _REGISTER_FUNCTIONS else functions

    def _function(self, function: cst.FunctionDef, state: frozenset[str]) -> frozenset[str]:
        key = function, state
        if key not in self._results:
            self._results[key] = state  # for recursive calls
            self._returned.append([])
            end = self._block(function.body.body, state)
            result = _merge([end, *self._returned.pop()])
            self._results[key] = state if result is None else result
        return self._results[key]


def _merge(states: Iterable[_State]) -> _State:
    """Return the conditions that hold in each of `states`, except those that are not reached."""
    reached = [state for state in states if state is not None]
    if not reached:
        return None
    conditions = [state for state in reached if state != _ALWAYS]
    return frozenset.intersection(*conditions) if conditions else _ALWAYS


def _assume(test: cst.BaseExpression, state: frozenset[str], *, is_true: bool) -> frozenset[str]:
    """Return the state in the branch in which the condition `test` is true or false."""
    if _condition(test, is_true=is_true) in state:
        return _ALWAYS
    if isinstance(test, cst.UnaryOperation) and isinstance(test.operator, cst.Not):
        return _assume(test.expression, state, is_true=not is_true)
    if isinstance(test, cst.BooleanOperation) and isinstance(test.operator, cst.And if is_true else cst.Or):
        return _assume(test.right, _assume(test.left, state, is_true=is_true), is_true=is_true)
    return state


def _condition(test: cst.BaseExpression, *, is_true: bool) -> str:
    """Return the source of the condition that `test` has the given value."""
    while isinstance(test, cst.UnaryOperation) and isinstance(test.operator, cst.Not):
        test, is_true = test.expression, not is_true
    text = cst.Module([]).code_for_node(test.with_changes(lpar=(), rpar=()))
    return text if is_true else f"not ({text})"


def _functions_by_name(script: Script) -> dict[str, cst.FunctionDef]:
    return {
        node.name.value: node
        for node in script.nodes
        if isinstance(node, cst.FunctionDef) and not script.is_method(node)
    }


def _unique_methods(script: Script) -> dict[str, cst.FunctionDef]:
    """Return the methods by name, except for special methods and names that several classes define."""
    methods = dict[str, list[cst.FunctionDef]]()
    for node in script.nodes:
        if isinstance(node, cst.FunctionDef) and script.is_method(node):
            methods.setdefault(node.name.value, []).append(node)
    return {name: found[0] for name, found in methods.items() if len(found) == 1 and not name.startswith("__")}
