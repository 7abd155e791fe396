"""Placement of the `unitrain.init` call and of the shutdown of the backend.

`unitrain.init` replaces the call that starts the ranks if this call is at the top level of the module, or if the script
shuts down its process group. If this call is in a function, `unitrain.init` is placed before the first read of the rank
in the same block. In other scripts, and if this function may run after a read of the rank or not at all, the call of
the main function is moved into `with unitrain.init() as backend:`. If a statement under `if __name__ == "__main__":`
reads the rank before the call of the main function, `unitrain.init` is placed before that statement instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import libcst as cst

from unitrain.migrate.edits import Edits, Statement, parse_statement
from unitrain.migrate.execution import ends_process, nodes_before_start
from unitrain.migrate.script import Block, Script, assigned_value

# Functions and methods of multiprocessing, torch.multiprocessing and concurrent.futures.
_STARTS_PROCESSES = (
    "Process", "start_processes", "spawn", "submit", "map", "imap", "starmap", "apply", "apply_async", "map_async",
)  # fmt: skip


@dataclass(frozen=True)
class Startup:
    """The calls that start and shut down the ranks. `init_source` is the source of the call of `unitrain.init`.

    If `is_kept` is True, `call` remains in the script, and `unitrain.init` is called before it.
    """

    call: cst.Call
    shutdown_calls: Sequence[cst.Call]
    init_source: str = "unitrain.init()"
    is_kept: bool = False


def convert(edits: Edits, startup: Startup) -> None:
    """Insert `unitrain.init` and the shutdown of the backend. Refuse a script in which their positions cannot be
    determined."""
    script = edits.script
    statement = script.statement(startup.call)
    if statement is None or (not startup.is_kept and assigned_value(statement) is not startup.call):
        edits.refuse(startup.call, "Call it in a statement of its own")
        return
    if script.enclosing_control_flow(statement):
        edits.refuse(
            startup.call,
            "It is called under a condition. Remove the condition: unitrain.init() also works in a single process",
        )
        return
    for call in startup.shutdown_calls:
        line = script.statement(call)
        if call.args or line is None or assigned_value(line) is not call:
            edits.refuse(call, "Call it without arguments, in a statement of its own")
            return
    if _refuse_processes(edits, startup.call):
        return
    function = script.function(statement)
    early = _find_early_uses(edits, startup, statement)
    if function is None:
        if early:
            _refuse_early_uses(edits, early)
        else:
            _start_in_place(edits, startup, statement, statement)
        return
    if startup.shutdown_calls and not startup.is_kept:
        block = script.block(statement)
        lines = [line for node in early if (line := script.statement(node)) is not None and script.block(line) is block]
        first = min(lines, key=script.position, default=statement)
        if not _find_early_uses(edits, startup, first):
            _start_in_place(edits, startup, statement, first)
            return
    _start_in_main_block(edits, startup, statement, function)


def _refuse_processes(edits: Edits, start: cst.Call) -> bool:
    """Refuse calls that start processes with a function that calls `start`, and return whether there are any."""
    script = edits.script
    is_found = False
    for call in script.nodes:
        if not isinstance(call, cst.Call) or not isinstance(call.func, cst.Name | cst.Attribute):
            continue
        name = call.func.value if isinstance(call.func, cst.Name) else call.func.attr.value
        if name not in _STARTS_PROCESSES:
            continue
        function = script.function(start)
        if any(
            isinstance(argument.value, cst.Name) and _reaches(script, cst.Call(argument.value), function, set())
            for argument in call.args
        ):
            edits.refuse(
                call,
                "The script starts its own ranks. Remove the call, and start the function once per rank with: "
                "unitrain launch -np 4 train.py",
                is_structural=True,
            )
            is_found = True
    return is_found


def _find_early_uses(edits: Edits, startup: Startup, start: cst.CSTNode) -> list[cst.CSTNode]:
    """Return the uses of the backend that may run before the statement `start`, or without it."""
    uses = [node for node in edits.backend_uses if node is not startup.call]
    return nodes_before_start(edits.script, start, [*uses, *startup.shutdown_calls])


def _refuse_early_uses(edits: Edits, nodes: Sequence[cst.CSTNode]) -> None:
    for node in nodes:
        edits.refuse(
            node,
            "It may run before the ranks are started. Move it after the start, and start the ranks without a condition",
        )


def _start_in_place(edits: Edits, startup: Startup, statement: Statement, anchor: Statement) -> None:
    """Insert the statement that assigns the backend before `anchor`, and remove `statement` unless it is kept."""
    script, backend = edits.script, edits.backend
    function = script.function(anchor)
    outside = [
        node for node in (*edits.backend_uses, *startup.shutdown_calls) if not _is_inside(script, node, function)
    ]
    new = [parse_statement(f"global {backend}")] if function is not None and outside else []
    new.append(parse_statement(f"{backend} = {startup.init_source}"))
    if anchor is statement and not startup.is_kept:
        edits.replace_statement(statement, lambda _: new)
    else:
        edits.insert_before(anchor, new)
        if not startup.is_kept:
            edits.remove_statement(statement)
            if script.function(statement) is not function:
                edits.explain(anchor, "starts the backend, because the following lines use it")
                _remove_empty_function(edits, statement)
    edits.converted.add(startup.call)
    edits.explain(startup.call, "starts the backend that the launcher or UNITRAIN_BACKEND selects")
    for call in startup.shutdown_calls:
        edits.replace(call, f"{backend}.shutdown()", uses_backend=False)
        edits.converted.add(call)
        edits.explain(call, "shuts down the backend and its process group")
    block = script.block(anchor)
    if not startup.shutdown_calls and block is not None:
        _append_shutdown(edits, block, parse_statement(f"{backend}.shutdown()"))


def _append_shutdown(edits: Edits, block: Block, statement: Statement) -> None:
    last_statement = block.body[-1]
    assert isinstance(last_statement, Statement)
    if _is_exit(edits.script, last_statement):
        edits.refuse(last_statement, "The shutdown of the backend must be the last statement: remove this call")
        return
    if edits.is_replaced(last_statement):
        edits.refuse(last_statement, "The shutdown of the backend must follow this line: add a statement after it")
        return
    edits.replace_statement(last_statement, lambda updated: [updated, statement])
    edits.explain(last_statement, "the backend is shut down when training is complete")


def _is_exit(script: Script, statement: Statement) -> bool:
    """Return whether no statement after `statement` is executed."""
    if not isinstance(statement, cst.SimpleStatementLine):
        return False
    if ends_process(script, assigned_value(statement)):
        return True
    return isinstance(statement.body[-1], cst.Raise | cst.Return)


def _is_inside(script: Script, node: cst.CSTNode, function: cst.FunctionDef | None) -> bool:
    return function is None or any(ancestor is function for ancestor in script.ancestors(node))


def _start_in_main_block(edits: Edits, startup: Startup, statement: Statement, function: cst.FunctionDef) -> None:
    """Start the backend for the statement that calls `function`, directly or indirectly: in a `with` block, or before
    earlier statements under `if __name__ == "__main__":` that use the backend."""
    script = edits.script
    block = script.main_block()
    statements = [
        child
        for child in block.body
        if not isinstance(child, cst.FunctionDef | cst.ClassDef)
        and any(_reaches(script, call, function, set()) for call in script.calls_in(child))
    ]
    if len(statements) != 1 or not isinstance(statements[0], cst.SimpleStatementLine):
        edits.refuse(
            startup.call,
            'Call the function from one statement under if __name__ == "__main__":, without a condition',
        )
        return
    main = statements[0]
    early = _find_early_uses(edits, startup, main)
    if not early:
        _wrap_main(edits, startup, main, function)
        return
    lines = [child for child in block.body if any(child in (node, *script.ancestors(node)) for node in early)]
    first = lines[0] if lines else None
    if (
        isinstance(block, cst.IndentedBlock)
        and isinstance(first, Statement)
        and not startup.is_kept
        and not _find_early_uses(edits, startup, first)
    ):
        _start_in_place(edits, startup, statement, first)
    else:
        _refuse_early_uses(edits, early)


def _wrap_main(edits: Edits, startup: Startup, main: Statement, function: cst.FunctionDef) -> None:
    """Move the statement `main`, which calls `function`, into a `with` block."""
    script = edits.script
    functions = {script.function(node) for node in edits.backend_uses}
    late = [
        node
        for node in script.nodes
        if script.function(node) is None
        and script.position(node) > script.position(main)
        and main not in (node, *script.ancestors(node))
        and (
            node in edits.backend_uses
            or (isinstance(node, cst.Call) and any(_reaches(script, node, used, set()) for used in functions))
        )
    ]
    for node in late:
        edits.refuse(node, f"It is called after the backend is shut down. Move it into {function.name.value}")
    if late:
        return
    name = f" as {edits.backend}" if edits.backend_uses else ""
    edits.replace_statement(main, lambda updated: [_wrap_in_with(f"{startup.init_source}{name}", updated)])
    edits.explain(
        main,
        "starts the backend that the launcher or UNITRAIN_BACKEND selects, and shuts it down at the end; "
        "a failure of this rank is reported to the other ranks",
    )
    removed = [*startup.shutdown_calls] if startup.is_kept else [startup.call, *startup.shutdown_calls]
    for call in removed:
        line = script.statement(call)
        assert line is not None
        edits.converted.add(call)
        edits.remove_statement(line)
        edits.explain(call, "not needed: the with statement starts and shuts down the backend")
        _remove_empty_function(edits, line)


def _wrap_in_with(context: str, statement: Statement) -> Statement:
    block = parse_statement(f"with {context}:\n    pass")
    assert isinstance(block, cst.With)
    return block.with_changes(body=cst.IndentedBlock([statement.with_changes(leading_lines=())]))


def _reaches(script: Script, call: cst.Call, function: cst.FunctionDef | None, seen: set[cst.CSTNode]) -> bool:
    """Return whether `call` calls `function`, directly or through functions of the script."""
    callee = script.called_function(call)
    if callee is None or callee[0] in seen:
        return False
    if callee[0] is function:
        return True
    seen.add(callee[0])
    return any(_reaches(script, inner_call, function, seen) for inner_call in script.calls_in(callee[0]))


def _remove_empty_function(edits: Edits, statement: Statement) -> None:
    """If the function that contains `statement` has no other statements, remove the function and its calls."""
    script = edits.script
    function = script.function(statement)
    if function is None or script.block(function) is not script.module:
        return
    remaining_statements = [
        child for child in function.body.body if child is not statement and not _is_docstring(child)
    ]
    if remaining_statements:
        return
    name = function.name.value
    uses = [
        node
        for node in script.nodes
        if isinstance(node, cst.Name) and node.value == name and script.parent(node) is not function
    ]
    lines = [script.statement(node) for node in uses]
    calls = [script.parent(node) for node in uses]
    if all(line is not None and assigned_value(line) is call for line, call in zip(lines, calls, strict=True)):
        for line in lines:
            assert line is not None
            edits.remove_statement(line)
        edits.remove_statement(function)


def _is_docstring(node: cst.CSTNode) -> bool:
    return isinstance(assigned_value(node), cst.SimpleString)
