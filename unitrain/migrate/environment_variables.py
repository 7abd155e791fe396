"""Convert reads of the launcher's environment variables, such as RANK, which only some launchers set."""

from __future__ import annotations

import libcst as cst

from unitrain.migrate.calls import arguments, literal
from unitrain.migrate.edits import Edits
from unitrain.migrate.models import distributed_variables
from unitrain.migrate.script import Binding, Script, assigned_value, targets

_ATTRIBUTES = {
    "RANK": "rank",
    "LOCAL_RANK": "local_rank",
    "WORLD_SIZE": "size",
    "LOCAL_WORLD_SIZE": "local_size",
    "GROUP_RANK": "node_rank",
    "OMPI_COMM_WORLD_RANK": "rank",
    "OMPI_COMM_WORLD_LOCAL_RANK": "local_rank",
    "OMPI_COMM_WORLD_SIZE": "size",
    "SLURM_PROCID": "rank",
    "SLURM_LOCALID": "local_rank",
    "SLURM_NTASKS": "size",
}
_ADDRESSES = ("MASTER_ADDR", "MASTER_PORT")
_METHODS = ("get", "setdefault", "pop")
_FUNCTIONS = ("os.getenv", "os.putenv", "os.unsetenv")


def convert(edits: Edits) -> None:
    """Convert `int(os.environ["RANK"])` and similar reads to attributes of the backend, and refuse other uses."""
    script = edits.script
    aliases = _find_aliases(script)
    for node in script.nodes:
        if _defines_local_rank(node):
            edits.refuse(
                node,
                f"Only torch.distributed.launch passes this option. Remove it, and use {edits.backend}.local_rank",
            )
        if _selects_device(script, node):
            edits.refuse(node, f"The backend selects the GPU. Remove the line, and use {edits.backend}.device")
        name = _accessed_variable(script, node, aliases)
        if name is None:
            continue
        attribute = _ATTRIBUTES.get(name)
        call = _int_call_around(script, node)
        if attribute is None:
            edits.refuse(node, "The launcher sets this variable: remove the line")
        elif call is None or not _has_equivalent_default(node, attribute):
            edits.refuse(
                node,
                f"Only some launchers set {name}. Call unitrain.init() without a condition, and use "
                f"{edits.backend}.{attribute}; without a launcher, the size is 1",
            )
        else:
            edits.replace(call, f"{edits.backend}.{attribute}")
            edits.explain(node, f"only some launchers set {name}; the backend determines it under every launcher")


def _find_aliases(script: Script) -> set[Binding]:
    """Return the variables that hold `os.environ`."""
    assignments = [
        node
        for node in script.nodes
        if (value := assigned_value(node)) is not None and _is_environ(script, value, set())
    ]
    return distributed_variables(script, [target for statement in assignments for target in targets(statement)])


def _is_environ(script: Script, node: cst.CSTNode, aliases: set[Binding]) -> bool:
    return script.imported_name(node) == "os.environ" or script.binding(node) in aliases


def reads_rank(script: Script, node: cst.CSTNode) -> bool:
    """Return whether `node` is converted to an attribute of the backend, such as `int(os.environ["RANK"])`."""
    if not isinstance(node, cst.Call) or len(node.args) != 1:
        return False
    value = node.args[0].value
    return (
        _int_call_around(script, value) is node
        and _accessed_variable(script, value, _find_aliases(script)) in _ATTRIBUTES
    )


def _accessed_variable(script: Script, node: cst.CSTNode, aliases: set[Binding]) -> str | None:
    """Return the environment variable of the launcher that `node` reads, sets or tests for, or None."""
    value: object = None
    if isinstance(node, cst.Subscript) and _is_environ(script, node.value, aliases):
        element = node.slice[0].slice
        value = literal(cst.Arg(element.value)) if isinstance(element, cst.Index) else None
    elif isinstance(node, cst.Call) and _accesses_variable(script, node, aliases) and node.args:
        value = literal(node.args[0])
    elif isinstance(node, cst.Call) and script.called_name(node) == "os.environ.update":
        return next((name for name in _updated_variables(node) if name in (*_ATTRIBUTES, *_ADDRESSES)), None)
    elif isinstance(node, cst.Comparison) and len(node.comparisons) == 1:
        comparison = node.comparisons[0]
        if isinstance(comparison.operator, cst.In | cst.NotIn) and _is_environ(script, comparison.comparator, aliases):
            value = literal(cst.Arg(node.left))
    return value if isinstance(value, str) and value in (*_ATTRIBUTES, *_ADDRESSES) else None


def _accesses_variable(script: Script, call: cst.Call, aliases: set[Binding]) -> bool:
    """Return whether `call` calls a function of the os module, or a method of `os.environ`, that accesses one
    variable."""
    if script.called_name(call) in _FUNCTIONS:
        return True
    func = call.func
    return isinstance(func, cst.Attribute) and func.attr.value in _METHODS and _is_environ(script, func.value, aliases)


def _updated_variables(call: cst.Call) -> list[object]:
    """Return the variables that `os.environ.update` sets, if they are keywords or keys of a dict in the call."""
    names: list[object] = [argument.keyword.value for argument in call.args if argument.keyword is not None]
    for argument in call.args:
        elements = argument.value.elements if isinstance(argument.value, cst.Dict) else ()
        names += [literal(cst.Arg(element.key)) for element in elements if isinstance(element, cst.DictElement)]
    return names


def _defines_local_rank(node: cst.CSTNode) -> bool:
    """Return whether `node` defines the command-line option of torch.distributed.launch."""
    if not isinstance(node, cst.Call) or not isinstance(node.func, cst.Attribute):
        return False
    options = [literal(argument) for argument in node.args if argument.keyword is None]
    return node.func.attr.value == "add_argument" and bool({"--local_rank", "--local-rank"} & set(options))


def _selects_device(script: Script, node: cst.CSTNode) -> bool:
    """Return whether `node` sets CUDA_VISIBLE_DEVICES to a value that is not a constant, such as the local rank."""
    if not isinstance(node, cst.Assign) or isinstance(node.value, cst.SimpleString):
        return False
    target = node.targets[0].target
    if not isinstance(target, cst.Subscript) or script.imported_name(target.value) != "os.environ":
        return False
    element = target.slice[0].slice
    return isinstance(element, cst.Index) and literal(cst.Arg(element.value)) == "CUDA_VISIBLE_DEVICES"


def _int_call_around(script: Script, node: cst.CSTNode) -> cst.Call | None:
    """Return the call `int(node)`, or None."""
    parent = script.parent(node)
    call = script.parent(parent) if isinstance(parent, cst.Arg) else None
    is_integer = isinstance(call, cst.Call) and isinstance(call.func, cst.Name) and call.func.value == "int"
    return call if is_integer and isinstance(call, cst.Call) and len(call.args) == 1 else None


def _has_equivalent_default(node: cst.CSTNode, attribute: str) -> bool:
    """Return whether the read has no default, or a default that equals the value of `attribute` without a launcher."""
    if not isinstance(node, cst.Call):
        return True
    call_arguments = arguments(node, ("key", "default"))
    if call_arguments is None:
        return False
    default = literal(call_arguments.get("default"))
    return default is None or str(default) == ("1" if attribute.endswith("size") else "0")
