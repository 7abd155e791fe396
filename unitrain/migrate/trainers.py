"""Rules for Accelerate and Fabric.

Their loops train on the process group that `unitrain.init` starts, so the script keeps them. On Horovod, they compute
the same results as on DDP. Accelerate and Fabric read the ranks from torchrun's environment variables; under another
launcher, each rank would train independently, so the converted script compares the ranks.
"""

from __future__ import annotations

import libcst as cst

from unitrain.migrate.calls import arguments, literal
from unitrain.migrate.edits import Edits, parse_statement
from unitrain.migrate.models import distributed_variables, variables_with_other_values
from unitrain.migrate.script import assigned_value, targets

ACCELERATE = ("accelerate.Accelerator", "accelerate.accelerator.Accelerator")
FABRIC = ("lightning.fabric.Fabric", "lightning.Fabric", "lightning_fabric.Fabric", "lightning.fabric.fabric.Fabric")
_FIX = "Start it with: unitrain launch --launcher torchrun"
_FABRIC_FIX = f"{_FIX}, use Fabric(strategy='ddp', devices=RANKS_PER_HOST), and call fabric.launch()"
_STRATEGIES = ("auto", "ddp", "dp", None)
_PLUGINS = ("deepspeed_plugin", "fsdp_plugin", "megatron_lm_plugin", "torch_tp_plugin", "parallelism_config")


def convert(edits: Edits) -> None:
    """Refuse settings that need another process group, add a comparison of the ranks, and remove `end_training`."""
    script = edits.script
    accelerators = list[cst.CSTNode]()
    for node in script.nodes:
        if not isinstance(node, cst.Call):
            continue
        name = script.called_name(node)
        if name in ACCELERATE:
            statement = script.statement(node)
            accelerators += targets(statement) if statement is not None else ()
            _check_accelerator(edits, node)
            _add_rank_comparison(edits, node, "process_index", _FIX)
        elif name in FABRIC:
            _check_fabric(edits, node)
            _add_rank_comparison(edits, node, "global_rank", _FABRIC_FIX)
    variables = distributed_variables(script, accelerators)
    ambiguous = variables_with_other_values(script, variables)
    for node in script.nodes:
        if not isinstance(node, cst.Call) or not isinstance(node.func, cst.Attribute) or node.args:
            continue
        if node.func.attr.value != "end_training" or script.imported_name(node.func) is not None:
            continue
        variable = script.binding(node.func.value)
        if variable in ambiguous:
            edits.refuse(
                node,
                "This variable is an Accelerator only in some calls of its function. Write a function for each case",
            )
        elif variable in variables:
            _convert_end_training(edits, node)
        elif accelerators:
            edits.explain(node, "unchanged: if this object is the Accelerator, remove the call")


def _check_accelerator(edits: Edits, call: cst.Call) -> None:
    for name in _PLUGINS:
        argument = (arguments(call, ()) or {}).get(name)
        if argument is not None and literal(argument) is not None:
            edits.refuse(argument, "unitrain's process group supports only DDP: remove this argument", name=name)
    edits.explain(call, "Accelerate trains on the process group that unitrain starts, with the same results")


def _check_fabric(edits: Edits, call: cst.Call) -> None:
    call_arguments = arguments(call, ("accelerator", "strategy", "devices", "num_nodes"))
    if call_arguments is None:
        edits.refuse(call, 'Pass the arguments by name: Fabric(strategy="ddp")')
        return
    strategy = literal(call_arguments.get("strategy"))
    if strategy not in _STRATEGIES:
        edits.refuse(
            call_arguments["strategy"], 'unitrain\'s process group supports only strategy="ddp"', name="strategy"
        )
    edits.explain(
        call,
        "Fabric trains on the process group that unitrain starts, with the same results; strategy, devices and "
        "num_nodes must match the launcher, also if `fabric run` set them",
    )


def _add_rank_comparison(edits: Edits, call: cst.Call, rank_attribute: str, fix: str) -> None:
    """After the statement that assigns the object, add an assertion that compares the ranks. The assertion has the
    message `fix`, and its result is the same on all ranks."""
    statement = edits.script.statement(call)
    target = targets(statement) if statement is not None else ()
    if statement is None or len(target) != 1 or assigned_value(statement) is not call:
        edits.refuse(call, "Assign it to a variable in a statement of its own")
        return
    name = edits.script.text(target[0])
    ranks = f"{edits.backend}.allgather_object({name}.{rank_attribute}) == [*range({edits.backend}.size)]"
    check = parse_statement(f'assert {ranks}, "{fix}"')
    edits.replace_statement(statement, lambda updated: [updated, check])
    edits.backend_uses.append(call)
    edits.explain(call, "under a launcher other than torchrun, each rank would train independently")


def _convert_end_training(edits: Edits, call: cst.Call) -> None:
    """Remove `accelerator.end_training()`, which destroys the process group, if the script has no trackers."""
    script = edits.script
    statement = script.statement(call)
    has_trackers = any(
        isinstance(node, cst.Name) and node.value in ("log_with", "init_trackers") for node in script.nodes
    )
    if has_trackers or statement is None or assigned_value(statement) is not call:
        edits.refuse(call, "It destroys the process group. Use: for tracker in accelerator.trackers: tracker.finish()")
    else:
        edits.remove_statement(statement)
        edits.explain(call, "it would destroy the process group before the backend is shut down")
