"""Other variables of the model that a converted Horovod script wraps.

Horovod wraps the optimizer, so a script may train the model through any of its variables. The converted script assigns
the distributed model to one variable. Through the other variables, the model would be trained without communication.
"""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from unitrain.migrate.models import passed_arguments
from unitrain.migrate.script import Binding, Script, assigned_value, flat_targets, targets

# Members of the original model that return the same result before and after the model is distributed.
_SAFE_MEMBERS = {
    "parameters", "named_parameters", "buffers", "named_buffers", "modules", "named_modules", "children",
    "named_children", "state_dict", "load_state_dict", "zero_grad",
}  # fmt: skip


def missing_declaration(script: Script, model: cst.BaseExpression, statement: cst.CSTNode) -> str | None:
    """Return the missing declaration, such as "global model", or None. Without it, an assignment to `model` in the
    function of `statement` would create a local variable."""
    binding, function = script.binding(model), script.function(statement)
    if not isinstance(model, cst.Name) or binding is None or function is None:
        return None
    scope, name = binding
    if scope is script.scope(function):
        return None
    is_declared = any(
        isinstance(node, cst.Global | cst.Nonlocal)
        and script.function(node) is function
        and name in [item.name.value for item in node.names]
        for node in script.nodes
    )
    if is_declared:
        return None
    return f"{'global' if scope is script.scope(script.module) else 'nonlocal'} {name}"


def find_use_of_other_variable(
    script: Script, model: cst.BaseExpression, statement: cst.CSTNode
) -> cst.Name | cst.Attribute | None:
    """Return the first use of another variable of the model that may run after `statement`, which assigns the
    distributed model to `model`."""
    binding = script.binding(model)
    if binding is None:
        return None
    uses = [use for variable, after in _other_variables(script, binding, statement) for use in
            _uses_after(script, variable, after)]  # fmt: skip
    return min(uses, key=script.position, default=None)


def _other_variables(script: Script, binding: Binding, statement: cst.CSTNode) -> Iterator[tuple[Binding, cst.CSTNode]]:
    """Yield (variable, statement) for each other variable that refers to the original model. After the statement,
    `binding` refers to the distributed model, but the variable does not."""
    function = script.function(statement)
    passed = list(passed_arguments(script))
    assignments = [
        (target, value, node)
        for node in script.nodes
        if (value := assigned_value(node)) is not None
        for item in flat_targets(node)
        if (target := script.binding(item)) is not None
    ]
    pending, seen = [(binding, statement)], {binding}
    while pending:
        variable, after = pending.pop()
        if variable != binding:
            yield variable, after
        found = list[tuple[Binding | None, cst.CSTNode]]()
        for parameter, argument in passed:
            if parameter == variable:  # the variable of the caller
                call_statement = script.statement(argument) or argument
                caller = script.binding(argument)
                # The call may assign the distributed model to the variable, as in `model = wrap(model)`.
                if caller not in [script.binding(target) for target in flat_targets(call_statement)]:
                    found.append((caller, call_statement))
            elif script.binding(argument) == variable and _may_run_before(script, argument, after, function):
                # The callee may store the model.
                found += [(target, node) for target, value, node in assignments if script.binding(value) == parameter]
        for target, value, node in assignments:
            if target == variable:
                since = after if script.function(node) is script.function(after) else node
                # In `a = b = model`, all three variables hold the model.
                found += [(script.binding(other), since) for other in (value, *targets(node))]
            elif script.binding(value) == variable and _may_run_before(script, node, after, function):
                found.append((target, after))
        for other, node in found:
            if other is not None and other not in seen:
                seen.add(other)
                pending.append((other, node))


def _may_run_before(
    script: Script, node: cst.CSTNode, statement: cst.CSTNode, function: cst.FunctionDef | None
) -> bool:
    """Return whether `node` may run before `statement`."""
    if script.function(node) is script.function(statement) is function:
        return script.position(node) < script.position(statement)
    return script.function(node) is not function


def _uses_after(script: Script, variable: Binding, statement: cst.CSTNode) -> Iterator[cst.Name | cst.Attribute]:
    """Yield the uses of `variable` that may run after `statement` and depend on whether the model is distributed."""
    for node in script.nodes:
        if not isinstance(node, cst.Name | cst.Attribute) or script.binding(node) != variable:
            continue
        is_earlier = script.function(node) is script.function(statement) and (
            script.position(node) < script.position(statement) or statement in script.ancestors(node)
        )
        if not is_earlier and _depends_on_distribution(script, node):
            yield node


def _depends_on_distribution(script: Script, node: cst.CSTNode) -> bool:
    parent = script.parent(node)
    if isinstance(parent, cst.Attribute):
        return parent.value is node and parent.attr.value not in _SAFE_MEMBERS
    if isinstance(parent, cst.Call):
        return True
    return (
        isinstance(parent, cst.Arg)
        and parent.value is node
        and script.called_name(script.parent(parent) or node) not in ("torch.save",)
    )
