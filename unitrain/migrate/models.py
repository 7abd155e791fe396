"""The variables that hold distributed models or other wrapped objects, and reads of the members of these models.

A variable holds a distributed model if a wrapped model or another such variable is assigned to it. A parameter of a
function that the script defines holds a distributed model if such a variable is passed for the parameter. Optimizers
and Accelerators are tracked in the same way.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial

import libcst as cst

from unitrain.migrate.calls import build_call
from unitrain.migrate.edits import Edits
from unitrain.migrate.script import Binding, Script, assigned_value, targets

# Members that work in the same way on the distributed model and on the user's model.
_SAME_MEMBERS = {"train", "eval", "parameters", "zero_grad", "training", "requires_grad_", "cuda", "cpu", "to"}
_UNSUPPORTED_MEMBERS = {
    "require_backward_grad_sync": "Use the context manager: with backend.no_sync(model)",
    "register_comm_hook": 'Use backend.distributed_model(model, compression="fp16"), or "bf16"',
    "_set_static_graph": "Remove it: unitrain does not need a static graph",
    "join": "Use unitrain.ShardedLoader, which gives all ranks the same number of batches",
}


def distributed_variables(
    script: Script, wrapped: Iterable[cst.CSTNode], calls: Collection[cst.CSTNode] = ()
) -> set[Binding]:
    """Return the variables that hold a distributed model. `wrapped` are the names or attributes to which wrapped models
    are assigned, and `calls` are calls that return wrapped models."""
    return _follow(script, {binding for node in wrapped if (binding := script.binding(node)) is not None}, calls)


def variables_with_other_values(script: Script, variables: set[Binding]) -> set[Binding]:
    """Return the subset of `variables`, a result of `distributed_variables`, that may also hold other objects: function
    parameters for which other objects are also passed, and the variables to which these parameters are assigned."""
    mixed = {
        binding
        for binding, value in passed_arguments(script)
        if binding in variables and not _holds_model(script, value, variables)
    }
    return _follow(script, mixed)


def _follow(script: Script, bindings: set[Binding], calls: Collection[cst.CSTNode] = ()) -> set[Binding]:
    """Return `bindings`, and the variables to which they or the results of `calls` are assigned or passed, directly or
    indirectly."""
    bindings = set(bindings)
    pairs = list(passed_arguments(script))
    for node in script.nodes:
        value = assigned_value(node)
        if value is not None:
            assigned = [pair for target in targets(node) for pair in _assigned_pairs(script, target, value)]
            pairs += [(binding, part) for target, part in assigned if (binding := script.binding(target)) is not None]
    while True:
        added = {binding for binding, value in pairs if _holds_model(script, value, bindings, calls)}
        if added <= bindings:
            return bindings
        bindings |= added


def _assigned_pairs(
    script: Script, target: cst.BaseExpression, value: cst.BaseExpression
) -> Iterator[tuple[cst.BaseExpression, cst.BaseExpression]]:
    """Yield (target, value) for each variable that an assignment of `value` to `target` sets, where the value is
    known."""
    if not isinstance(target, cst.Tuple | cst.List):
        yield target, value
        return
    for returned in [value, *_returned_values(script, value)]:
        if isinstance(returned, cst.Tuple | cst.List) and len(returned.elements) == len(target.elements):
            for part, element in zip(target.elements, returned.elements, strict=True):
                yield from _assigned_pairs(script, part.value, element.value)


def _holds_model(
    script: Script, value: cst.CSTNode, variables: set[Binding], calls: Collection[cst.CSTNode] = ()
) -> bool:
    """Return whether `value` is one of `variables` or `calls`, a conditional expression with one of them, or a call of
    a function of the script that returns one of them."""
    if value in calls or script.binding(value) in variables:
        return True
    if isinstance(value, cst.IfExp):
        return any(_holds_model(script, branch, variables, calls) for branch in (value.body, value.orelse))
    return any(
        returned in calls or script.binding(returned) in variables for returned in _returned_values(script, value)
    )


def _returned_values(script: Script, call: cst.CSTNode) -> Sequence[cst.BaseExpression]:
    """Return the values in the return statements of the function of the script that `call` calls."""
    callee = script.called_function(call) if isinstance(call, cst.Call) else None
    if callee is None or callee[0].name.value == "__init__":
        return ()
    return script.returned_values(callee[0])


def passed_arguments(script: Script) -> Iterator[tuple[Binding, cst.BaseExpression]]:
    """Yield (variable of the parameter, argument) for each argument that is passed to a function of the script."""
    for call in script.nodes:
        callee = script.called_function(call) if isinstance(call, cst.Call) else None
        if callee is None or not isinstance(call, cst.Call):
            continue
        function, skipped = callee
        positional = [*function.params.posonly_params, *function.params.params][skipped:]
        names = {parameter.name.value for parameter in (*positional, *function.params.kwonly_params)}
        for index, argument in enumerate(call.args):
            if argument.star:
                break
            name = None
            if argument.keyword is not None:
                name = argument.keyword.value
            elif index < len(positional):
                name = positional[index].name.value
            binding = script.parameter(function, name) if name in names and name is not None else None
            if binding is not None:
                yield binding, argument.value


def convert_reads(
    edits: Edits,
    variables: set[Binding],
    *,
    was_wrapped: bool,
    is_kept: bool = False,
    wrapping_statement: cst.CSTNode | None = None,
) -> None:
    """Convert reads of the members of distributed models.

    `was_wrapped` states whether the script already wrapped the model, in DDP. Otherwise, the script expects its own
    module, without the prefix "module." in the names of parameters. With `is_kept`, members that the distributed model
    has in common with DDP remain. Reads before the statement `wrapping_statement`, in its function or at the top
    level of the module, are not converted, because the model is not distributed yet.
    """
    script = edits.script
    for node in script.nodes:
        if script.binding(node) not in variables or not isinstance(node, cst.Name | cst.Attribute):
            continue
        if _is_before(script, node, wrapping_statement) or any(
            ancestor in edits.converted for ancestor in script.ancestors(node)
        ):
            continue
        parent = script.parent(node)
        if isinstance(parent, cst.Arg) and not is_kept:
            _convert_argument(edits, node, parent, was_wrapped=was_wrapped)
        if not isinstance(parent, cst.Attribute) or parent.value is not node:
            continue
        member = parent.attr.value
        outer = script.parent(parent)
        if member in _UNSUPPORTED_MEMBERS:
            edits.refuse(parent, _UNSUPPORTED_MEMBERS[member].replace("backend.", f"{edits.backend}."))
        elif is_kept:
            continue
        elif member == "module" and was_wrapped:
            edits.replace(parent, lambda updated: _unwrap(edits, _value(updated)))
            edits.explain(parent, "backend.unwrap returns the model that was distributed, on every backend")
        elif member == "no_sync" and isinstance(outer, cst.Call) and outer.func is parent:
            edits.replace(
                outer,
                lambda updated: build_call(f"{edits.backend}.no_sync", [_value(updated.func)]),  # type: ignore[attr-defined]
            )
            edits.explain(parent, "no_sync is a method of the backend")
        elif not was_wrapped and member not in _SAME_MEMBERS:
            edits.replace(parent, partial(_member_of_user_model, edits))
            edits.explain(parent, f"{member} of the user's model: names without the prefix 'module.'")


def _is_before(script: Script, node: cst.CSTNode, statement: cst.CSTNode | None) -> bool:
    if statement is None or script.position(node) > script.position(statement):
        return False
    return script.function(node) is script.function(statement) or script.function(node) is None


def _convert_argument(edits: Edits, node: cst.Name | cst.Attribute, argument: cst.Arg, *, was_wrapped: bool) -> None:
    """Convert a distributed model that is passed to `torch.save`, and explain that other imported functions receive the
    distributed model."""
    script = edits.script
    call = script.parent(argument)
    if not isinstance(call, cst.Call):
        return
    name = script.called_name(call)
    if name == "torch.save":
        edits.replace(node, partial(_unwrap, edits))
        edits.explain(node, "a distributed model cannot be pickled: save the user's model")
    elif name is not None and not was_wrapped:
        edits.explain(
            node,
            f"unchanged: {name} receives the distributed model. If it uses the names of parameters, pass "
            f"{edits.backend}.unwrap({script.text(node)})",
        )


def _unwrap(edits: Edits, model: cst.CSTNode) -> cst.Call:
    assert isinstance(model, cst.BaseExpression)
    return build_call(f"{edits.backend}.unwrap", [model])


def _member_of_user_model(edits: Edits, attribute: cst.CSTNode) -> cst.BaseExpression:
    assert isinstance(attribute, cst.Attribute)
    return cst.Attribute(_unwrap(edits, attribute.value), attribute.attr)


def _value(attribute: cst.CSTNode) -> cst.BaseExpression:
    assert isinstance(attribute, cst.Attribute)
    return attribute.value
