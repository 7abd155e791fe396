"""Rules for torch.distributed and DistributedDataParallel.

unitrain's backends start torch.distributed's default process group, over Gloo, NCCL or Horovod. Collectives of
torch.distributed and DistributedSampler therefore remain in the script.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import libcst as cst

from unitrain.migrate.calls import arguments, build_call, literal
from unitrain.migrate.edits import Edits
from unitrain.migrate.environment_variables import reads_rank
from unitrain.migrate.models import convert_reads, distributed_variables, passed_arguments
from unitrain.migrate.script import Binding, Script, assigned_value, targets

INIT = ("torch.distributed.init_process_group", "torch.distributed.distributed_c10d.init_process_group")
SHUTDOWN = ("torch.distributed.destroy_process_group", "torch.distributed.distributed_c10d.destroy_process_group")
WRAPPERS = (
    "torch.nn.parallel.DistributedDataParallel",
    "torch.nn.parallel.distributed.DistributedDataParallel",
    "torch.nn.DistributedDataParallel",
)
_SYNC_BATCH_NORM = "torch.nn.SyncBatchNorm.convert_sync_batchnorm"
# Functions and constants of torch.distributed that work on the process group of every backend.
KEPT_NAMES = {
    "all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all", "all_to_all_single",
    "barrier", "broadcast", "broadcast_object_list", "gather", "gather_object", "get_rank", "get_world_size", "group",
    "irecv", "is_available", "is_initialized", "isend", "new_group", "recv", "reduce", "reduce_scatter",
    "reduce_scatter_tensor", "ReduceOp", "scatter", "scatter_object_list", "send", "nn.functional", "ProcessGroup",
    "monitored_barrier",
}  # fmt: skip
_NEEDS_NO_GROUP = ("torch.distributed.is_available", "torch.distributed.is_initialized")
_INIT_PARAMETERS = (
    "backend", "init_method", "timeout", "world_size", "rank", "store", "group_name", "pg_options", "device_id",
)  # fmt: skip
_CONVERTED_INIT_ARGUMENTS = ("backend", "init_method", "timeout", "world_size", "rank", "device_id")
_GPU_NAMES = re.compile("cuda|gpu|device|accelerator", re.IGNORECASE)
_PARAMETERS = ("module", "device_ids", "output_device", "dim", "broadcast_buffers")
_KEPT_ARGUMENTS = ("find_unused_parameters", "broadcast_buffers")
# Arguments that are removed, because they do not affect the results, and hints about the behavior of the backend.
_REMOVED_ARGUMENTS = {
    "device_ids": "move the inputs to {backend}.device: DDP with device_ids moves them, but the backend may not",
    "output_device": "",
    "dim": "",
    "check_reduction": "",
    "bucket_cap_mb": "the backend chooses the size of the buckets, or reads it from the variable UNITRAIN_BUCKETS_MB",
    "gradient_as_bucket_view": "with the backend, gradients are views of the buckets by default, and copies with "
    "UNITRAIN_BUCKET_VIEW=0",
}
_REFUSED_ARGUMENTS = {
    "static_graph": "Remove it. If some parameters are unused in a backward pass, pass find_unused_parameters=True "
    "instead",
    "forward_sync_buffers": "Rename it to broadcast_buffers, which the backend supports",
    "process_group": "The backend reduces gradients over all ranks: remove this argument",
    "init_sync": "The backend always broadcasts the parameters from rank 0: remove this argument",
    "mixed_precision": "Use torch.autocast in the training loop: remove this argument",
}


def is_kept(name: str) -> bool:
    """Return whether `name` of torch.distributed remains in the script."""
    member = name.removeprefix("torch.distributed.")
    return any(member == kept or member.startswith(kept + ".") for kept in KEPT_NAMES)


def convert(edits: Edits) -> None:
    """Convert DistributedDataParallel, synchronized BatchNorm, and reads of the members of distributed models."""
    script = edits.script
    wrapped, wrapper_calls = list[cst.CSTNode](), list[cst.CSTNode]()
    for node in script.nodes:
        name = script.called_name(node)
        if not isinstance(node, cst.Call):
            continue
        if name in WRAPPERS:
            _convert_wrapper(edits, node)
            statement = script.statement(node)
            if statement is not None and len(statement.body) > 1:
                edits.refuse(node, "Write each statement on a line of its own")
            wrapped += targets(statement) if statement is not None else ()
            wrapper_calls.append(node)
        elif name == _SYNC_BATCH_NORM:
            _convert_sync_batch_norm(edits, node)
    if wrapper_calls:
        variables = distributed_variables(script, wrapped, wrapper_calls)
        is_kept = _needs_process_group(script)
        convert_reads(edits, variables, was_wrapped=True, is_kept=is_kept)
        if not is_kept:
            _explain_other_members(edits, variables)


def _explain_other_members(edits: Edits, variables: set[Binding]) -> None:
    """Explain reads of `module` and `no_sync` of objects that may be distributed models, but are not in `variables`."""
    script, backend = edits.script, edits.backend
    for node in script.nodes:
        if not isinstance(node, cst.Attribute) or script.imported_name(node) is not None:
            continue
        if node.attr.value not in ("module", "no_sync") or script.binding(node.value) in variables:
            continue
        value = script.text(node.value)
        use = f"{backend}.unwrap({value})" if node.attr.value == "module" else f"{backend}.no_sync({value})"
        edits.explain(node, f"unchanged: if {value} is a distributed model, use {use}")


def _needs_process_group(script: Script) -> bool:
    """Return whether the script still needs torch.distributed's process group, which the local backend does not have.

    If so, the script runs on other backends only, where the distributed model is a DistributedDataParallel.
    """
    for node in script.nodes:
        name = script.called_name(node) or ""
        if name.startswith("torch.distributed.") and is_kept(name) and name not in _NEEDS_NO_GROUP:
            return True
        if name.endswith(".DistributedSampler") and isinstance(node, cst.Call):
            sampler_arguments = arguments(node, ("dataset", "num_replicas", "rank"))
            if sampler_arguments is not None and "num_replicas" not in sampler_arguments:
                return True
    return False


def _convert_wrapper(edits: Edits, call: cst.Call) -> None:
    ddp_arguments = arguments(call, _PARAMETERS)
    if ddp_arguments is None or "module" not in ddp_arguments:
        edits.refuse(
            call,
            f"Use {edits.backend}.distributed_model(model), with find_unused_parameters and broadcast_buffers by name",
        )
        return
    removed = list[str]()
    for name, argument in ddp_arguments.items():
        if name == "module" or (name in _KEPT_ARGUMENTS and literal(argument) is not None):
            continue
        if literal(argument) is None or (literal(argument) is False and name in ("static_graph", *_REMOVED_ARGUMENTS)):
            removed.append(name)  # the default
        elif name in _REMOVED_ARGUMENTS:
            removed.append(name)
            if hint := _REMOVED_ARGUMENTS[name].format(backend=edits.backend):
                edits.explain(argument, f"{name} is removed: {hint}")
        else:
            fix = f"{edits.backend}.distributed_model does not support this argument: remove it"
            edits.refuse(argument, _REFUSED_ARGUMENTS.get(name, fix), name=name)

    def build(updated: cst.CSTNode) -> cst.BaseExpression:
        assert isinstance(updated, cst.Call)
        values = {name: updated.args[call.args.index(argument)].value for name, argument in ddp_arguments.items()}
        keywords = {name: values[name] for name in _KEPT_ARGUMENTS if name in set(ddp_arguments) - set(removed)}
        return build_call(f"{edits.backend}.distributed_model", [values["module"]], **keywords)

    edits.replace(call, build)
    edits.converted.add(call.func)
    edits.explain(call, "the backend distributes the model on the device of its parameters")
    if "broadcast_buffers" not in ddp_arguments or literal(ddp_arguments["broadcast_buffers"]) is not False:
        edits.explain(
            call,
            "if the model contains BatchNorm and all ranks evaluate it, call unitrain.broadcast_buffers(model, "
            f"{edits.backend}) on all ranks before model.eval(): DDP broadcasts the running statistics of rank 0 in "
            "each forward pass, but the backend does not",
        )


def _convert_sync_batch_norm(edits: Edits, call: cst.Call) -> None:
    if len(call.args) != 1:
        edits.refuse(call, f"Use unitrain.sync_batch_norm(model, {edits.backend})")
        return
    edits.replace(
        call,
        lambda updated: build_call(
            "unitrain.sync_batch_norm",
            [updated.args[0].value, cst.Name(edits.backend)],  # type: ignore[attr-defined]
        ),
    )
    edits.converted.add(call.func)
    edits.explain(call, "synchronizes on every backend, also on CPUs")


def convert_init_arguments(edits: Edits, call: cst.Call) -> str:
    """Convert the arguments of `call`, a call of `init_process_group`. Return the source of the arguments of
    `unitrain.init`, and explain or refuse each argument that is left out."""
    script = edits.script
    call_arguments = arguments(call, _INIT_PARAMETERS)
    if call_arguments is None:
        edits.refuse(call, "Use unitrain.init()")
        return ""
    method = literal(call_arguments.get("init_method"))
    if method is not None and (method is ... or not str(method).startswith("env://")):
        edits.refuse(call, "The launcher defines the rendezvous: remove init_method", name="init_method")
    for name, argument in call_arguments.items():
        if name not in _CONVERTED_INIT_ARGUMENTS and literal(argument) is not None:
            edits.refuse(call, f"unitrain.init does not support {name}: remove it", name=name)
    if literal(call_arguments.get("device_id")) is not None:
        edits.explain(
            call_arguments["device_id"], f"device_id is removed: the backend selects the GPU, {edits.backend}.device"
        )
    ignored = [name for name in ("rank", "world_size") if name in call_arguments]
    for name in ignored:
        attribute = {"rank": "rank", "world_size": "size"}[name]
        if _is_used_elsewhere(script, call_arguments[name].value, call, set()):
            value = script.text(call_arguments[name].value)
            edits.refuse(
                call_arguments[name],
                f"The launcher defines the {name}. Remove the argument, and use {edits.backend}.{attribute} instead of "
                f"{value} in the script",
                name=f"{name}={value}",
            )
    text = (
        "unitrain selects the transport based on the device, and the backend based on the launcher or UNITRAIN_BACKEND"
    )
    if ignored:
        text += f"; the launcher defines {_join(ignored)}"
    device = _convert_transport(edits, call_arguments.get("backend"))
    timeout = call_arguments.get("timeout")
    if timeout is None or literal(timeout) is None:
        edits.explain(call, f"{text}; the timeout is 300 s")
        return device
    edits.explain(call, text)
    return ", ".join(filter(None, [device, f"timeout_seconds=({script.text(timeout.value)}).total_seconds()"]))


def _convert_transport(edits: Edits, transport: cst.Arg | None) -> str:
    """Return the argument of `unitrain.init` for a script that trains on CPUs with Gloo, also on hosts with GPUs.
    Return "" for other scripts, and explain which transport is selected if it may differ from that of the script."""
    script = edits.script
    if transport is None or literal(transport) is None or _selects_default_transport(script, transport.value):
        return ""
    name = literal(transport)
    if name == "gloo" and not may_use_gpus(script):
        edits.explain(transport, 'the script trains on CPUs: without device="cpu", unitrain would select a GPU')
        return 'device="cpu"'
    if name == "gloo":
        edits.explain(
            transport,
            "unitrain selects a GPU and NCCL if there is a GPU. To train on CPUs, use "
            'unitrain.init(device="cpu"); to train on GPUs with Gloo, set UNITRAIN_TRANSPORT=gloo',
        )
    elif name is ...:
        edits.explain(
            transport,
            f"{script.text(transport.value)} no longer selects the transport: set UNITRAIN_TRANSPORT, or use "
            'unitrain.init(device="cpu") to train on CPUs of a host with GPUs',
        )
    else:
        edits.explain(
            transport,
            f"{name} is not selected: unitrain selects NCCL for GPUs and Gloo for CPUs. Set UNITRAIN_TRANSPORT to use "
            "another transport",
        )
    return ""


def _selects_default_transport(script: Script, value: cst.BaseExpression) -> bool:
    """Return whether `value` selects NCCL, with Gloo for CPU tensors or hosts without GPUs, as unitrain does."""
    if isinstance(value, cst.IfExp):
        branches = literal(cst.Arg(value.body)), literal(cst.Arg(value.orelse))
        return script.called_name(value.test) == "torch.cuda.is_available" and branches == ("nccl", "gloo")
    return literal(cst.Arg(value)) in ("nccl", "cpu:gloo,cuda:nccl", "cuda:nccl,cpu:gloo")


def may_use_gpus(script: Script) -> bool:
    """Return whether the script may use GPUs: it contains a name or string that refers to them, or moves tensors to a
    device other than the CPU."""
    for node in script.nodes:
        if isinstance(node, cst.Name) and _GPU_NAMES.search(node.value):
            return True
        is_string = isinstance(node, cst.SimpleString) and not isinstance(script.parent(node), cst.Expr)
        if is_string and _GPU_NAMES.search(script.text(node)):
            return True
        if isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute) and node.func.attr.value == "to":
            values = [argument.value for argument in node.args if argument.keyword is None]
            if any(literal(cst.Arg(value)) != "cpu" and script.imported_name(value) is None for value in values):
                return True
    return False


def _is_used_elsewhere(script: Script, value: cst.CSTNode, call: cst.Call, seen: set[str]) -> bool:
    """Return whether the variables or functions from which `value` is computed are also used outside `call`.

    Constants and imported functions do not count, nor do environment variables of the launcher, whose reads are
    converted everywhere.
    """
    if reads_rank(script, value) or script.imported_name(value) is not None:
        return False
    if not isinstance(value, cst.Name | cst.Attribute):
        return any(_is_used_elsewhere(script, child, call, seen) for child in script.children(value))
    text = script.text(value)
    if text in seen or text in ("int", "str", "len", "max", "None"):
        return False
    seen.add(text)
    binding = script.binding(value)
    sources = [passed for parameter, passed in passed_arguments(script) if parameter == binding]
    for node in script.nodes:
        assigned = assigned_value(node)
        if assigned is not None and text in [script.text(target) for target in targets(node)]:
            sources.append(assigned)
    if sources:
        return any(_is_used_elsewhere(script, source, call, seen) for source in sources)
    return any(_is_use(script, node, call) for node in script.nodes if _is_same_variable(script, node, value))


def _is_same_variable(script: Script, node: cst.CSTNode, value: cst.Name | cst.Attribute) -> bool:
    """Return whether `node` and `value` are the same variable."""
    if not isinstance(node, type(value)) or script.text(node) != script.text(value):
        return False
    return script.binding(node) == script.binding(value)


def _is_use(script: Script, node: cst.CSTNode, call: cst.Call) -> bool:
    """Return whether `node` is a use outside `call`. Definitions, names of arguments and names of attributes are not
    uses."""
    parent = script.parent(node)
    if isinstance(parent, cst.Param | cst.FunctionDef) or (isinstance(parent, cst.Arg) and parent.keyword is node):
        return False
    if isinstance(parent, cst.Attribute) and parent.attr is node:
        return False
    return call not in script.ancestors(node)


def _join(names: Sequence[str]) -> str:
    return " and ".join(names)
