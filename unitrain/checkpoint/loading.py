"""Load checkpoints, in either format, into a matching model, optimizer and scheduler."""

from __future__ import annotations

import copy
import math
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from unitrain.backends.optimizer_loading import load_optimizer_state
from unitrain.backends.sharding.tensor_chunks import is_distributed_tensor
from unitrain.checkpoint import sharded_files
from unitrain.checkpoint.files import MODEL, RUN_ID, TRAINING, load_model_file, read_manifest, read_tensors
from unitrain.errors import CheckpointError
from unitrain.modules.buffers import load_state
from unitrain.optim.schedulers import PlannedScheduler
from unitrain.output import get_logger

_log = get_logger(__name__)


SHARDED = "sharded"
"""Key in the training state that `load` returns: the path of a sharded checkpoint."""
RESULTS = "results"
"""Key in the training state that `load` returns: the results of the weights, from the manifest."""
LOCAL_SGD = "local_sgd"
"""Key in the training state: the state of local SGD."""


def load(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: Any,
    *,
    defers_optimizer_state: bool = False,
) -> dict[str, Any]:
    """Load a valid checkpoint into `model`, `optimizer` and `scheduler`; return its training state, except the
    optimizer state.

    With `defers_optimizer_state`, only the hyperparameters of the optimizer are loaded from a sharded checkpoint; each
    rank loads its shard of the optimizer state later. The averaged weights of a sharded checkpoint are not loaded.
    Raises CheckpointError if the checkpoint does not match the arguments.
    """
    training: dict[str, Any] = torch.load(path / TRAINING, map_location="cpu", weights_only=True)
    manifest = read_manifest(path)
    training[RUN_ID] = manifest.get(RUN_ID)
    training[RESULTS] = {
        name: math.nan if value is None else value for name, value in manifest.get("results", {}).items()
    }
    _check_classes(path, training.get("classes", {}), optimizer, scheduler)
    # A checkpoint of another program may have no scheduler state. In this case, the scheduler starts from its initial
    # state.
    has_scheduler_state = "scheduler" in training
    if has_scheduler_state and (training["scheduler"] is None) != (scheduler is None):
        saved, current = ("no", "one") if scheduler is not None else ("a", "none")
        raise CheckpointError(
            f"Checkpoint '{path}' has {saved} scheduler and this run has {current}. Create the Trainer as in the run "
            "that wrote it."
        )
    is_sharded = sharded_files.is_sharded(path)
    try:
        _load_model(path, model)
        if (state := training.pop("optimizer")) is not None:
            groups = [dict(group) for group in state["param_groups"]]
            _check_hyperparameter_names(path, groups, optimizer)
            report = partial(
                _report_changed_hyperparameters, path, groups, optimizer, has_scheduler=scheduler is not None
            )
            if isinstance(scheduler, PlannedScheduler) and scheduler.scheduler is None:
                scheduler.call_after_build(report)  # the scheduler determines the initial learning rates
            else:
                report()
            if is_sharded:
                training[SHARDED] = str(path)
                stored = {} if defers_optimizer_state else sharded_files.StoredOptimizerState.open(path).full_state()
                state = {**state, "state": stored}
            load_optimizer_state(optimizer, state)
        if is_sharded and LOCAL_SGD in training:
            training[LOCAL_SGD]["ranks"] = sharded_files.read_local_states(path)
        if scheduler is not None and has_scheduler_state:
            scheduler.load_state_dict(copy.deepcopy(training["scheduler"]))  # CyclicLR removes a key
    except (RuntimeError, ValueError, LookupError) as error:
        error_text = " ".join(str(error).split())
        raise CheckpointError(
            f"Checkpoint '{path}' does not fit {type(model).__name__} with {type(optimizer).__name__}: {error_text}. "
            "Use the same model and optimizer as the run that wrote it."
        ) from error
    return training


def load_weights(path: Path, model: nn.Module, average: nn.Module | None) -> None:
    """Load the weights of a valid checkpoint into `model`, and the averaged weights into `average`.

    Raises CheckpointError if they do not match the model, or if `average` is not None and the checkpoint has no
    averaged weights.
    """
    try:
        if average is not None:
            _load_average(path, average)
        _load_model(path, model)
    except (RuntimeError, ValueError, LookupError) as error:
        error_text = " ".join(str(error).split())
        raise CheckpointError(
            f"The weights of checkpoint '{path}' do not fit {type(model).__name__}: {error_text}. "
            "Use the same model as the run that wrote it."
        ) from error


def _load_model(path: Path, model: nn.Module) -> None:
    if sharded_files.is_sharded(path):
        sharded_files.load_module(path, sharded_files.MODEL_FOLDER, model)
    elif any(map(is_distributed_tensor, model.parameters())):
        _load_shards(model, read_tensors(path / MODEL))
    else:
        load_model_file(model, path / MODEL)


def _load_average(path: Path, average: nn.Module) -> None:
    is_sharded = sharded_files.is_sharded(path)
    if is_sharded:
        has_average = bool(sharded_files.open_tensors(path, sharded_files.AVERAGE_FOLDER).tensors)
    else:
        training = torch.load(path / TRAINING, map_location="cpu", weights_only=True)
        has_average = "average" in training
    if not has_average:
        raise CheckpointError(
            f"Checkpoint '{path}' has no averaged weights, because its run had no ema_decay. Leave "
            "TrainConfig.ema_decay out to load its weights."
        )
    if is_sharded:
        sharded_files.load_module(path, sharded_files.AVERAGE_FOLDER, average)
    else:
        load_state(average, training["average"]["model"])


def _load_shards(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Load this rank's shards of the complete `tensors`, in which tied parameters occur once."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    for tied in names.values():
        stored = next((tensors[name] for name in tied if name in tensors), None)
        tensors |= {} if stored is None else dict.fromkeys(tied, stored)
    load_state(model, tensors)


def class_names(optimizer: torch.optim.Optimizer, scheduler: Any) -> dict[str, str | None]:
    """Return the class names of optimizer and scheduler, to be stored in a checkpoint."""
    return {
        "optimizer": type(optimizer).__name__,
        "scheduler": None if scheduler is None else type(scheduler).__name__,
    }


def _check_classes(
    path: Path, saved_classes: dict[str, str | None], optimizer: torch.optim.Optimizer, scheduler: Any
) -> None:
    """Raise CheckpointError if the checkpoint contains the state of a different optimizer or scheduler class."""
    for role, name in class_names(optimizer, scheduler).items():
        if saved_classes.get(role) is not None and name is not None and saved_classes[role] != name:
            raise CheckpointError(
                f"Checkpoint '{path}' has the state of {saved_classes[role]}, but the {role} of this run is {name}. "
                f"Use {saved_classes[role]}, or start a new run from the weights: "
                f"trainer.load_weights('{path}')."
            )


def _check_hyperparameter_names(path: Path, groups: list[dict[str, Any]], optimizer: torch.optim.Optimizer) -> None:
    """Raise CheckpointError if the names of the hyperparameters show that another optimizer wrote the checkpoint.

    A new version of torch may add or remove hyperparameters. Therefore, names other than "lr" may be missing from the
    checkpoint, or the checkpoint may have additional names, but not both.
    """
    for saved_settings, current_settings in zip(groups, optimizer.param_groups, strict=False):
        missing_settings = [name for name in current_settings if name not in saved_settings and name != "initial_lr"]
        if "lr" in missing_settings or (
            missing_settings
            and [name for name in saved_settings if name not in current_settings and name != "initial_lr"]
        ):
            raise CheckpointError(
                f"Checkpoint '{path}' has no {', '.join(missing_settings)} of {type(optimizer).__name__}: another "
                "optimizer wrote it. Use the same optimizer as the run that wrote it, or start a new run from the "
                f"weights: trainer.load_weights('{path}')."
            )


def _report_changed_hyperparameters(
    path: Path, groups: list[dict[str, Any]], optimizer: torch.optim.Optimizer, *, has_scheduler: bool
) -> None:
    """Log a warning for each hyperparameter whose value in the checkpoint differs from the value in the optimizer.

    `groups` are the parameter groups of the checkpoint. The checkpoint's values are used, because schedulers and
    callbacks may have changed them during the run.
    """
    for index, (saved_settings, current_settings) in enumerate(zip(groups, optimizer.param_groups, strict=False)):
        for name in saved_settings:
            # With a scheduler, compare only the initial learning rate, because the scheduler may have changed other
            # settings.
            compared_name = "initial_lr" if has_scheduler and name == "lr" else name
            if (
                name in ("params", "initial_lr")
                or (has_scheduler and name != "lr")
                or compared_name not in saved_settings
            ):
                continue
            saved_value = saved_settings[compared_name]
            current_value = current_settings.get(compared_name, current_settings.get(name))
            if (
                current_value is not None
                and _is_number(saved_value)
                and _is_number(current_value)
                and float(saved_value) != float(current_value)
            ):
                _log.warning(
                    "Checkpoint '%s' has %s=%g in parameter group %d, and the optimizer of this run was built with "
                    "%s=%g. The run continues with %g. To change it, set it after the Trainer is built: "
                    "optimizer.param_groups[%d][%r] = %g",
                    path, name, saved_value, index, name, current_value, saved_value, index, name, current_value,
                )  # fmt: skip


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)
