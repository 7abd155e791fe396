"""Rules for Horovod: ranks, collectives, and the model and optimizer that `DistributedOptimizer` trains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import libcst as cst

from unitrain.migrate.aliases import find_use_of_other_variable, missing_declaration
from unitrain.migrate.calls import arguments, build_call, is_repeatable, literal, unused_quotation_mark
from unitrain.migrate.edits import Edits, Statement, parse_statement
from unitrain.migrate.models import convert_reads, distributed_variables, variables_with_other_values
from unitrain.migrate.script import Script, assigned_value, flat_targets, targets

MODULE = "horovod.torch"
INIT, SHUTDOWN = f"{MODULE}.init", f"{MODULE}.shutdown"
_PROPERTIES = ("rank", "size", "local_rank", "local_size")
_OPERATIONS = {"Average": "mean", "Sum": "sum", "Min": "min", "Max": "max", "Product": "product"}
_COMPRESSIONS = {"Compression.fp16": "fp16", "Compression.none": "none"}
_NO_QUOTE = "Assign the value to a variable before this line, and use the variable in the f-string"
_MODEL_AND_OPTIMIZER_FUNCTIONS = ("DistributedOptimizer", "broadcast_parameters", "broadcast_optimizer_state")
# The first positional parameters of Horovod's collectives, in order.
_COLLECTIVES = {
    "allreduce": ("tensor", "average", "name", "compression", "op"),
    "allreduce_": ("tensor", "average", "name", "op"),
    "allgather": ("tensor", "name"),
    "broadcast": ("tensor", "root_rank", "name"),
    "broadcast_": ("tensor", "root_rank", "name"),
    "broadcast_object": ("obj", "root_rank", "name"),
    "allgather_object": ("obj", "name"),
    "barrier": (),
}
_OPTIMIZER_PARAMETERS = (
    "optimizer", "named_parameters", "compression", "backward_passes_per_step", "op", "gradient_predivide_factor",
    "num_groups", "groups", "sparse_as_dense", "process_set",
)  # fmt: skip

_REMOVED_ARGUMENTS = {
    "gradient_predivide_factor": "unitrain divides the sum by the number of ranks, which can round differently",
    "num_groups": "unitrain reduces gradients in buckets, whose size UNITRAIN_BUCKETS_MB sets",
    "groups": "unitrain reduces gradients in buckets, whose size UNITRAIN_BUCKETS_MB sets",
}


def convert(edits: Edits) -> None:
    """Convert all supported uses of Horovod except `hvd.init` and `hvd.shutdown`. `migration.migrate` converts these
    two, and reports the names that are not supported."""
    script = edits.script
    references = [(node, name) for node, name in script.imported_references() if name.startswith(MODULE + ".")]
    for node, name in references:
        member = name.removeprefix(MODULE + ".")
        call = script.parent(node)
        if member in _COMPRESSIONS:
            mark = unused_quotation_mark(script, node)
            if mark is None:
                edits.refuse(node, _NO_QUOTE)
            else:
                edits.replace(node, f"{mark}{_COMPRESSIONS[member]}{mark}", uses_backend=False)
                edits.explain(
                    node,
                    "unitrain selects the compression with a string, and defines how compressed gradients are reduced",
                )
            edits.converted.add(node)
        if not isinstance(call, cst.Call) or call.func is not node:
            continue
        if member in _PROPERTIES and not call.args:
            edits.replace(call, f"{edits.backend}.{member}")
            edits.explain(node, f"the {member.replace('_', ' ')} is an attribute of the backend")
            edits.converted.add(node)
        elif member in _COLLECTIVES:
            _convert_collective(edits, call, member)
    _convert_optimizer(edits)
    _convert_synchronize(edits)


def _convert_collective(edits: Edits, call: cst.Call, member: str) -> None:
    """Convert a collective. `allreduce_` and `broadcast_` write to their argument, so the result of the backend's
    method is copied to the argument."""
    script = edits.script
    call_arguments = arguments(call, _COLLECTIVES[member])
    function = member.removesuffix("_")
    if call_arguments is None or (member != "barrier" and not {"tensor", "obj"} & set(call_arguments)):
        edits.refuse(call, f"Use {edits.backend}.{function}(tensor)")
        return
    call_arguments.pop("name", None)
    operation = _operation(script, call_arguments.pop("op", None), call_arguments.pop("average", None))
    if (
        "compression" in call_arguments
        and script.imported_name(call_arguments["compression"].value) == f"{MODULE}.Compression.none"
    ):
        call_arguments.pop("compression")
    root = call_arguments.pop("root_rank", None)
    value = call_arguments.pop("tensor", None) or call_arguments.pop("obj", None)
    if call_arguments or operation is None:
        text = ", ".join(call_arguments) or "op"
        edits.refuse(call, f"The argument {text} is not supported. Use {edits.backend}.{function}(tensor)")
        return
    if member.endswith("_") and value is not None and not is_repeatable(value.value):
        edits.refuse(call, f"Assign the tensor to a variable, and pass the variable to hvd.{member}")
        return
    mark = unused_quotation_mark(script, call)
    if mark is None and operation != "mean":
        edits.refuse(call, _NO_QUOTE)
        return
    needs_detach = function == "allreduce" and value is not None and _needs_detach(script, call, value)

    def build(updated: cst.CSTNode) -> cst.BaseExpression:
        assert isinstance(updated, cst.Call)
        positional = [updated.args[call.args.index(value)].value] if value is not None else []
        if needs_detach:
            positional = [cst.Call(cst.Attribute(positional[0], cst.Name("detach")))]
        keywords = {"root": updated.args[call.args.index(root)].value} if root is not None else {}
        if operation != "mean":
            positional.append(cst.SimpleString(f"{mark}{operation}{mark}"))
        result = build_call(f"{edits.backend}.{function}", positional, **keywords)
        if member.endswith("_") and value is not None:
            tensor = updated.args[call.args.index(value)].value
            return cst.Call(cst.Attribute(tensor, cst.Name("copy_")), [cst.Arg(result)])
        return result

    edits.replace(call, build)
    edits.converted.add(call)
    edits.explain(call, _COLLECTIVE_REASONS.get(function, "the collective is a method of the backend"))


def _needs_detach(script: Script, call: cst.Call, value: cst.Arg) -> bool:
    """Return whether `value` needs `.detach()`: it may require grad, but the result of `call` is not differentiated."""
    tensor = value.value
    if not isinstance(tensor, cst.Name | cst.Attribute):
        return False
    parent = script.parent(call)
    is_item = isinstance(parent, cst.Attribute) and parent.attr.value in ("item", "detach")
    return is_item or isinstance(parent, cst.Expr)


_COLLECTIVE_REASONS = {
    "allreduce": "the collective is a method of the backend; it raises TensorError for a tensor that requires grad and "
    "for the mean of integers, which Horovod rounds down",
}


def _operation(script: Script, operation: cst.Arg | None, average: cst.Arg | None) -> str | None:
    """Return unitrain's name of the reduction operation, or None if the operation is not supported."""
    if operation is not None:
        name = script.imported_name(operation.value) or ""
        return _OPERATIONS.get(name.removeprefix(MODULE + "."))
    value = literal(average)
    return {None: "mean", True: "mean", False: "sum"}.get(value) if value is None or isinstance(value, bool) else None


@dataclass
class _OptimizerWrapping:
    """The statement that wraps an optimizer with DistributedOptimizer, and the arguments of the call."""

    call: cst.Call
    statement: Statement
    arguments: dict[str, cst.Arg]
    target: cst.BaseExpression  # the variable of the wrapped optimizer
    model_node: cst.BaseExpression
    model: str  # the source of `model_node`

    def converted_optimizer(self, statement: Statement) -> cst.BaseExpression:
        """Return the optimizer that is passed in `statement`, which is `self.statement` with converted children."""
        call = assigned_value(statement)
        assert isinstance(call, cst.Call)
        return call.args[self.call.args.index(self.arguments["optimizer"])].value


def _convert_optimizer(edits: Edits) -> None:
    """Convert `DistributedOptimizer` and the broadcasts of parameters and optimizer state.

    The model is wrapped where its parameters are broadcast, and the optimizer where its state is broadcast, so that
    state that rank 0 loads before these statements is broadcast. The model is never wrapped after the optimizer.
    """
    script = edits.script
    calls = {
        name: [node for node in script.nodes if isinstance(node, cst.Call) and _is_call_of(script, node, name)]
        for name in _MODEL_AND_OPTIMIZER_FUNCTIONS
    }
    # These names are supported. If their arguments are not, an error about the arguments is reported.
    edits.converted |= {node.func for nodes in calls.values() for node in nodes}
    wrappers = calls["DistributedOptimizer"]
    if len(wrappers) != 1:
        for node in [*wrappers, *([] if wrappers else calls["broadcast_parameters"])]:
            edits.refuse(
                node,
                f"Wrap the model and the optimizer: model = {edits.backend}.distributed_model(model), "
                f"optimizer = {edits.backend}.distributed_optimizer(optimizer, model)",
            )
        return
    wrapping = _parse_wrapping(edits, wrappers[0])
    if wrapping is None:
        return
    problems = len(edits.problems)
    names = {edits.script.text(wrapping.target), script.text(wrapping.arguments["optimizer"].value)}
    parameters = _keep_last_broadcast(
        edits, calls["broadcast_parameters"], wrapping, lambda node: _is_state(script, node, wrapping.model)
    )
    state = _keep_last_broadcast(
        edits, calls["broadcast_optimizer_state"], wrapping, lambda node: script.text(node) in names
    )
    if len(edits.problems) == problems:
        _wrap_model_and_optimizer(edits, wrapping, parameters, state)


def _is_call_of(script: Script, node: cst.CSTNode, member: str) -> bool:
    name = script.called_name(node)
    return name in (f"{MODULE}.{member}", f"{MODULE}.functions.{member}", f"{MODULE}.optimizer.{member}")


def _parse_wrapping(edits: Edits, call: cst.Call) -> _OptimizerWrapping | None:
    script = edits.script
    statement = script.statement(call)
    optimizer_arguments = arguments(call, _OPTIMIZER_PARAMETERS)
    target = targets(statement) if statement is not None else ()
    if statement is None or optimizer_arguments is None or "optimizer" not in optimizer_arguments or len(target) != 1:
        edits.refuse(call, "Assign it in one statement: optimizer = hvd.DistributedOptimizer(optimizer, ...)")
        return None
    if assigned_value(statement) is not call or not is_repeatable(target[0]):
        edits.refuse(call, "Assign it in one statement: optimizer = hvd.DistributedOptimizer(optimizer, ...)")
        return None
    model = _find_model(script, call, optimizer_arguments)
    if model is None:
        edits.refuse(
            call, "Pass the parameters of the model: named_parameters=model.named_parameters()", name="named_parameters"
        )
        return None
    return (
        _OptimizerWrapping(call, statement, optimizer_arguments, target[0], model, script.text(model))
        if _check_settings(edits, call, optimizer_arguments)
        else None
    )


def _check_settings(edits: Edits, call: cst.Call, optimizer_arguments: dict[str, cst.Arg]) -> bool:
    """Refuse arguments of DistributedOptimizer that cannot be converted, and explain the conversion of
    `backward_passes_per_step`. Return whether all arguments can be converted."""
    script = edits.script
    is_valid = True
    for name, argument in optimizer_arguments.items():
        if name == "op":
            inside_nodes = list(script.walk(argument.value))
            inside = {script.imported_name(node) for node in inside_nodes}
            if f"{MODULE}.Adasum" in inside:
                is_valid = False  # `migrate` reports the name
                edits.converted |= {node for node in inside_nodes if script.imported_name(node) == f"{MODULE}.Average"}
            elif script.imported_name(argument.value) != f"{MODULE}.Average":
                edits.refuse(argument, "unitrain always computes the mean of the gradients: remove op", name="op")
                is_valid = False
        elif name == "process_set" or (name == "sparse_as_dense" and literal(argument) is not False):
            edits.refuse(argument, "unitrain does not support this argument: remove it", name=name)
            is_valid = False
        elif name == "backward_passes_per_step":
            edits.explain(
                call,
                "each backward pass reduces its gradients, and the accumulated gradients are the same as with Horovod; "
                f"to reduce only once per step, run all backward passes but the last in {edits.backend}.no_sync(model)",
            )
        elif name in _REMOVED_ARGUMENTS and literal(argument) is not None:
            edits.explain(argument, f"{name} is removed: {_REMOVED_ARGUMENTS[name]}")
        elif name not in _OPTIMIZER_PARAMETERS:
            edits.refuse(argument, "Unknown argument of DistributedOptimizer: remove it", name=name)
            is_valid = False
    return is_valid


def _find_model(script: Script, call: cst.Call, optimizer_arguments: dict[str, cst.Arg]) -> cst.BaseExpression | None:
    """Return the model whose parameters are passed as `named_parameters` or, in the same function, to the constructor
    of the optimizer. Return None if the model is unknown."""
    if "named_parameters" in optimizer_arguments:
        return _owner(optimizer_arguments["named_parameters"].value, "named_parameters")
    value: cst.CSTNode = optimizer_arguments["optimizer"].value
    if not isinstance(value, cst.Call):
        name = script.text(value)
        created = [node for node in script.nodes if name in [script.text(target) for target in flat_targets(node)]]
        created = [
            node for node in created if not _is_call_of(script, assigned_value(node) or node, "DistributedOptimizer")
        ]
        # A variable of another function with the same name is a different optimizer.
        if len(created) != 1 or script.function(created[0]) is not script.function(call):
            return None
        value = assigned_value(created[0]) or value
    if isinstance(value, cst.Call) and value.args:
        return _owner(value.args[0].value, "parameters")
    return None


def _owner(node: cst.CSTNode, method: str) -> cst.BaseExpression | None:
    """Return `model` if `node` is `model.method()`, and None for other expressions, or if `model` cannot be evaluated
    several times."""
    if isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute) and node.func.attr.value == method:
        return node.func.value if is_repeatable(node.func.value) else None
    return None


def _is_state(script: Script, node: cst.CSTNode, model: str) -> bool:
    """Return whether `node` is the state or the named parameters of `model`."""
    owners = [_owner(node, method) for method in ("state_dict", "named_parameters")]
    return model in [script.text(owner) for owner in owners if owner is not None]


def _keep_last_broadcast(
    edits: Edits, calls: list[cst.Call], wrapping: _OptimizerWrapping, accepts: Callable[[cst.CSTNode], bool]
) -> Statement | None:
    """Return the last statement that broadcasts the model or the optimizer of `wrapping`, or None if there is none.
    Remove the earlier statements that do so, and refuse broadcasts that cannot be converted."""
    script = edits.script
    statements = list[Statement]()
    for call in calls:
        statement = script.statement(call)
        passed = arguments(call, ("state", "root_rank"))
        value = next(iter(passed.values())).value if passed else None
        is_root_zero = passed is not None and literal(passed.get("root_rank")) == 0
        if value is None or not accepts(value) or not is_root_zero or statement is None:
            edits.refuse(
                call,
                "unitrain broadcasts only the model and its optimizer, from rank 0. For other broadcasts, use "
                f"{edits.backend}.broadcast_object",
            )
        elif assigned_value(statement) is not call or script.block(statement) is not script.block(wrapping.statement):
            edits.refuse(call, "Move it to the block of hvd.DistributedOptimizer")
        else:
            statements.append(statement)
    for repeated in statements[:-1]:
        edits.remove_statement(repeated)
    return statements[-1] if statements else None


def _wrap_model_and_optimizer(
    edits: Edits, wrapping: _OptimizerWrapping, parameters: Statement | None, state: Statement | None
) -> None:
    """Write the statements that wrap the model and the optimizer."""
    script, backend = edits.script, edits.backend
    compression = wrapping.arguments.get("compression")
    if compression is not None and script.imported_name(compression.value) == f"{MODULE}.Compression.none":
        compression = None
    keyword = ""
    if compression is not None:
        name = script.imported_name(compression.value) or ""
        known = _COMPRESSIONS.get(name.removeprefix(MODULE + "."))
        text = f'"{known}"' if known is not None else script.text(compression.value)
        inside = [script.imported_name(node) or "" for node in script.walk(compression.value)]
        if known is None and any(name.startswith(MODULE) for name in inside):
            edits.refuse(compression, 'Assign "fp16" or "none" to a variable first', name="compression")
            return
        keyword = f", compression={text}"
    model_line = f"{wrapping.model} = {backend}.distributed_model({wrapping.model}{keyword})"
    target = script.text(wrapping.target)
    passed_optimizer = script.text(wrapping.arguments["optimizer"].value)
    present = [statement for statement in (wrapping.statement, state, parameters) if statement is not None]
    optimizer_statement = max(present, key=script.position)
    # The expression of the compression may be undefined where the parameters are broadcast.
    model_statement = parameters if parameters is not None and compression is None else optimizer_statement
    if not _check_variable_of_model(edits, wrapping, model_statement):
        return

    is_in_place = optimizer_statement is wrapping.statement
    # Each builder receives the source of the wrapped optimizer, and returns the source of a line.
    builders_by_statement = dict[cst.CSTNode, list[Callable[[str], str]]]()
    for statement in (wrapping.statement, parameters, state):
        if statement is not None:
            builders_by_statement[statement] = []
    if not is_in_place and target != passed_optimizer:
        builders_by_statement[wrapping.statement].append(lambda optimizer: f"{target} = {optimizer}")
    builders_by_statement[model_statement].append(lambda _: model_line)
    builders_by_statement[optimizer_statement].append(
        lambda optimizer: (
            f"{target} = {backend}.distributed_optimizer({optimizer if is_in_place else target}, {wrapping.model})"
        )
    )
    for old_statement, builders in builders_by_statement.items():

        def build(
            updated: Statement,
            old_statement: cst.CSTNode = old_statement,
            builders: list[Callable[[str], str]] = builders,
        ) -> list[Statement]:
            optimizer = passed_optimizer
            if old_statement is wrapping.statement:  # the optimizer may contain converted calls
                optimizer = script.text(wrapping.converted_optimizer(updated))
            return [parse_statement(build_line(optimizer)) for build_line in builders]

        edits.replace_statement(old_statement, build)
        edits.backend_uses.append(old_statement)
        if old_statement is not wrapping.statement:
            edits.converted.add(old_statement)
    edits.converted |= {node for node in wrapping.call.args if node is not wrapping.arguments["optimizer"]}
    edits.explain(
        model_statement,
        "the distributed model reduces the gradients, not the optimizer; distributed_model also broadcasts the model's "
        "parameters from rank 0",
    )
    edits.explain(
        model_statement,
        "if a backward pass does not use all parameters, add find_unused_parameters=True to distributed_model: Horovod "
        "reduces zeros for unused parameters, but the backend raises ModelError",
    )
    edits.explain(
        optimizer_statement,
        "distributed_optimizer returns the user's optimizer, and broadcasts its state from rank 0 without the hidden "
        "optimizer step of hvd.broadcast_optimizer_state, which applies weight decay",
    )
    for old_statement, builders in builders_by_statement.items():
        if not builders:  # the statement is removed, and a later line replaces it
            calls = "call of distributed_optimizer" if old_statement is state else "calls"
            edits.explain(old_statement, f"replaced by the {calls} below")
    function = script.function(wrapping.statement)
    names = [
        node
        for node in script.nodes
        if isinstance(node, cst.Name | cst.Attribute)
        and script.text(node) == wrapping.model
        and script.function(node) is function
    ]
    convert_reads(edits, distributed_variables(script, names), was_wrapped=False, wrapping_statement=model_statement)


def _check_variable_of_model(edits: Edits, wrapping: _OptimizerWrapping, model_statement: Statement) -> bool:
    """Return False, and refuse the call of DistributedOptimizer, if the script would use the original model after
    `model_statement`, where the distributed model is assigned to the variable of the model."""
    script = edits.script
    declaration = missing_declaration(script, wrapping.model_node, model_statement)
    if declaration is not None:
        edits.refuse(
            wrapping.call,
            f"The distributed model is assigned to {wrapping.model}. Add the statement `{declaration}` to the start of "
            "this function",
        )
        return False
    use = find_use_of_other_variable(script, wrapping.model_node, model_statement)
    if use is not None:
        edits.refuse(
            wrapping.call,
            f"The distributed model is assigned to {wrapping.model} here, but line {script.line(use)} uses "
            f"{script.text(use)}, which refers to the original model, whose gradients are not reduced. Move the "
            "call to the function that creates the model, before other variables or objects receive the model",
        )
        return False
    if script.binding(wrapping.model_node) is None:
        edits.explain(
            model_statement,
            f"this tool does not check where {wrapping.model} and other variables of this model are used: they must "
            f"all refer to the distributed model; use {edits.backend}.unwrap({wrapping.model}) where the parameter "
            "names matter",
        )
    return True


def _convert_synchronize(edits: Edits) -> None:
    """Remove `optimizer.synchronize()` and `with optimizer.skip_synchronize():` of Horovod's optimizers.

    Other objects, such as CUDA events, have a method `synchronize` too. Their calls remain.
    """
    script = edits.script
    statements = [script.statement(node) for node in script.nodes if _is_call_of(script, node, "DistributedOptimizer")]
    optimizers = distributed_variables(
        script, [target for statement in statements if statement is not None for target in targets(statement)]
    )
    ambiguous = variables_with_other_values(script, optimizers)
    for node in script.nodes:
        if not isinstance(node, cst.Call) or not isinstance(node.func, cst.Attribute) or node.args:
            continue
        member = node.func.attr.value
        if script.imported_name(node.func) is not None or member not in ("synchronize", "skip_synchronize"):
            continue
        variable = script.binding(node.func.value)
        if variable in ambiguous:
            edits.refuse(
                node, "This variable is an optimizer only in some calls of its function. Write a function for each case"
            )
            continue
        if member == "synchronize" and variable not in optimizers:
            if isinstance(node.func.value, cst.Name | cst.Attribute):
                edits.explain(node, "unchanged: if this object is the optimizer, remove the call")
            continue
        statement = script.statement(node)
        if member == "synchronize" and statement is not None and assigned_value(statement) is node:
            edits.remove_statement(statement)
            edits.explain(node, "the gradients are already reduced when backward returns")
            continue
        block = next((ancestor for ancestor in script.ancestors(node) if isinstance(ancestor, cst.With)), None)
        is_with = member == "skip_synchronize" and block is not None
        if block is not None and is_with and [item.item for item in block.items] == [node] and variable in optimizers:
            edits.replace_statement(block, _body_of_with)
            edits.explain(node, "the gradients are already reduced when backward returns")
        else:
            edits.refuse(node, "The gradients are already reduced when backward returns: remove it")


def _body_of_with(statement: Statement) -> list[Statement]:
    assert isinstance(statement, cst.With)
    if isinstance(statement.body, cst.SimpleStatementSuite):  # on the line of the with statement
        return [cst.SimpleStatementLine(statement.body.body)]
    return [child for child in statement.body.body if isinstance(child, Statement)]
