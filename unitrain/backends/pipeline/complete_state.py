"""State dicts of the complete model and its optimizer, gathered from the stages and divided among them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from unitrain.backends.base import Communicator
from unitrain.backends.objects import broadcast_with_tensors
from unitrain.backends.pipeline.stage_runner import StageModule
from unitrain.backends.synchronized_errors import call_on_all_ranks
from unitrain.errors import CheckpointError, ModelError
from unitrain.validation import describe_value

_MAX_LISTED = 4


def gather_model_state(communicator: Communicator, stages: int, module: StageModule) -> dict[str, Tensor]:
    """Return the state dict of the complete model, on the CPU, from the stages of replica 0. All ranks must call this
    function."""
    own = {name: value.detach().cpu() for name, value in module.state_dict().items()}
    state: dict[str, Tensor] = {}
    for stage in range(stages):
        state.update(broadcast_with_tensors(communicator, own, root=stage))
    return state


def load_model_state(module: StageModule, names: list[str], state: Mapping[str, Any]) -> None:
    """Load this stage's part of `state`, a state dict of the complete model with the keys `names`.

    Raises CheckpointError if `state` is not a dictionary, if keys are missing or unknown, or if shapes do not match.
    """
    if not isinstance(state, Mapping):
        raise CheckpointError(
            f"Pipeline.load_state_dict takes the state dict of the complete model, got {describe_value(state)}. Pass "
            "the result of pipeline.state_dict()."
        )
    missing_names, unknown_names = (
        [name for name in names if name not in state],
        [name for name in state if name not in names],
    )
    if missing_names or unknown_names:
        names_text = ", ".join((missing_names or unknown_names)[:_MAX_LISTED])
        raise CheckpointError(
            f"Pipeline.load_state_dict takes the state of the complete model, but {len(missing_names)} of its "
            f"{len(names)} tensors are missing and {len(unknown_names)} are unknown: {names_text}. Pass the state dict "
            "of the same model."
        )
    try:
        module.load_state_dict({name: state[name] for name in module.state_dict()})
    except RuntimeError as error:
        raise CheckpointError(
            f"The state does not fit the model of the pipeline: {' '.join(str(error).split())}. Pass the state dict of "
            "the same model."
        ) from error


def gather_optimizer_state(
    communicator: Communicator, stages: int, module: StageModule, optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    """Return the state dict of an optimizer of the complete model. All ranks must call this function.

    It equals the state dict of the same optimizer in one process: parameters are numbered group by group, and in model
    order within a group.
    """
    names = call_on_all_ranks(communicator, lambda: _names_by_group(module, optimizer))
    own = optimizer.state_dict()
    order = [name for group in names for name in group]
    own_state = {
        "state": {order[key]: entry for key, entry in own["state"].items()},
        "groups": [{**group, "params": names[index]} for index, group in enumerate(own["param_groups"])],
    }
    parts = [broadcast_with_tensors(communicator, own_state, root=stage) for stage in range(stages)]
    groups = _join_groups([part["groups"] for part in parts])
    entries = {name: entry for part in parts for name, entry in part["state"].items()}
    index_by_name = {name: index for index, name in enumerate(name for group in groups for name in group["params"])}
    return {
        "state": {index: entries[name] for name, index in index_by_name.items() if name in entries},
        "param_groups": [{**group, "params": [index_by_name[name] for name in group["params"]]} for group in groups],
    }


def load_optimizer_state(
    communicator: Communicator,
    stages: int,
    module: StageModule,
    optimizer: torch.optim.Optimizer,
    state: Mapping[str, Any],
) -> None:
    """Load this stage's part of `state`, an optimizer state dict for the complete model. All ranks must call this
    function.

    Raises CheckpointError on every rank if `state` is not the state of such an optimizer.
    """
    own_names = call_on_all_ranks(communicator, lambda: _names_by_group(module, optimizer))
    names_by_stage = [communicator.broadcast_object(own_names, root=stage) for stage in range(stages)]

    def load() -> None:
        try:
            _load_stage(optimizer, own_names, names_by_stage, state)
        except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:
            raise CheckpointError(
                f"The optimizer state cannot be loaded: {type(error).__name__}: {error}. Pass the result of "
                "pipeline.optimizer_state_dict(optimizer)."
            ) from error

    call_on_all_ranks(communicator, load)


def _load_stage(
    optimizer: torch.optim.Optimizer,
    own_names: list[list[str]],
    names_by_stage: list[list[list[str]]],
    state: Mapping[str, Any],
) -> None:
    """Load the entries that `state` contains for this stage into `optimizer`. `own_names` contains the names of this
    stage's parameters by group, and `names_by_stage` the names of every stage's parameters by group."""
    groups = [[name for names in names_by_stage for name in names[index]] for index in range(len(own_names))]
    saved = state["param_groups"]
    if [len(group["params"]) for group in saved] != [len(group) for group in groups]:
        raise CheckpointError(
            f"The optimizer state has groups of {[len(group['params']) for group in saved]} parameters, and the "
            f"optimizer of the complete model has {[len(group) for group in groups]}. Load the state of the same "
            "optimizer and model."
        )
    index_by_name = {
        name: index
        for names, group in zip(groups, saved, strict=True)
        for name, index in zip(names, group["params"], strict=True)
    }
    order = [name for group in own_names for name in group]
    positions = {name: position for position, name in enumerate(order)}
    optimizer.load_state_dict(
        {
            "state": {
                positions[name]: state["state"][index_by_name[name]]
                for name in order
                if index_by_name[name] in state["state"]
            },
            "param_groups": [
                {**group, "params": [positions[name] for name in names]}
                for group, names in zip(saved, own_names, strict=True)
            ],
        }
    )


def _names_by_group(module: StageModule, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    name_by_id = {id(parameter): name for name, parameter in module.named_parameters()}
    groups = [[name_by_id.get(id(parameter), "") for parameter in group["params"]] for group in optimizer.param_groups]
    if any("" in group for group in groups):
        raise ModelError(
            "The optimizer holds parameters that are not in this stage of the pipeline. Build it from the parameters "
            f"of the stage, after the Pipeline: {type(optimizer).__name__}(pipeline.parameters(), ...)."
        )
    return groups


def _join_groups(groups_by_stage: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the parameter groups of the complete model. Raises ModelError if the number or the settings of the groups
    differ between stages."""
    settings = [[{**group, "params": None} for group in groups] for groups in groups_by_stage]
    for stage, stage_settings in enumerate(settings):
        if stage_settings != settings[0]:
            raise ModelError(
                f"The optimizers of stage 0 and stage {stage} have different parameter groups, so they are not parts "
                "of one optimizer. Use the same groups and settings on every rank; a group may be empty."
            )
    return [
        {**group, "params": [name for groups in groups_by_stage for name in groups[group_index]["params"]]}
        for group_index, group in enumerate(groups_by_stage[0])
    ]
