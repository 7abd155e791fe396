"""Validation of the arguments of `Pipeline`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from torch import nn

from unitrain import validation
from unitrain.backends import checks
from unitrain.backends.base import Backend
from unitrain.backends.capabilities import SupportsPointToPoint, require_capability
from unitrain.errors import ConfigError, ModelError

Balance = Literal["time", "memory"]
ScheduleName = Literal["1f1b", "gpipe"]


def check_pipeline_arguments(
    model: Any,
    backend: Backend,
    loss_fn: Any,
    example_inputs: Any,
    *,
    stages: Any,
    micro_batches: Any,
    schedule: Any,
    balance: Any,
) -> None:
    """Raise ConfigError or UnsupportedError for invalid arguments, and ModelError for a model that cannot be divided
    into stages."""
    validation.check_integer("Pipeline(stages=...)", stages, 1, "Use stages=2 to divide the model into two stages")
    fix = "Use micro_batches=4 to start with"
    validation.check_integer("Pipeline(micro_batches=...)", micro_batches, 1, fix)
    validation.check_choice("Pipeline(schedule=...)", schedule, get_args(ScheduleName))
    validation.check_function("Pipeline(loss_fn)", _get_forward(loss_fn), "Use a function loss_fn(output, targets)")
    if backend.size % stages:
        raise ConfigError(
            f"Pipeline(stages={stages}) needs a number of ranks that is divisible by {stages}, but this job has "
            f"{backend.size}. Start it with {stages} or {2 * stages} ranks, or use stages=1."
        )
    if stages > 1:
        require_capability(backend, SupportsPointToPoint, f"Pipeline(stages={stages})")
    _check_model(model, backend, stages)
    if stages == 1:
        return
    if isinstance(balance, str):
        validation.check_choice("Pipeline(balance=...)", balance, get_args(Balance))
        if example_inputs is None:
            raise ConfigError(
                f"Pipeline(balance={balance!r}) measures the blocks on a batch, but example_inputs is None. Pass a "
                "batch, example_inputs=inputs, or the number of blocks of each stage, such as balance=[3, 5]."
            )
    elif not (
        isinstance(balance, Sequence)
        and all(isinstance(count, int) and count > 0 for count in balance)
        and len(balance) == stages
        and sum(balance) == len(model)
    ):
        raise ConfigError(
            f"Pipeline(balance={validation.describe_value(balance)}) must be 'time', 'memory', or the numbers of "
            f"blocks of {stages} stages, whose sum is {len(model)}. Use balance='time'."
        )


def _get_forward(function: Any) -> Any:
    return function.forward if isinstance(function, nn.Module) else function


def _check_model(model: Any, backend: Backend, stages: int) -> None:
    checks.check_unwrapped_model("Pipeline(model)", model)
    if not isinstance(model, nn.Sequential) or type(model).forward is not nn.Sequential.forward:
        raise ModelError(
            f"Pipeline divides a torch.nn.Sequential into stages, got {type(model).__name__}. Write the model as "
            "nn.Sequential(block, block, ...)."
        )
    if len(model) < stages:
        raise ModelError(
            f"Pipeline(stages={stages}) needs at least one block per stage, but the model has {len(model)}. Use fewer "
            "stages, or divide the model into more blocks."
        )
    if next(model.parameters(recurse=False), None) is not None:
        raise ModelError(
            "The nn.Sequential has parameters that belong to no block, so they have no stage. Move them into a block."
        )
    for name, module in model.named_modules():
        if any(base.__name__ in ("SyncBatchNorm", "SyncedForward") for base in type(module).__mro__):
            raise ModelError(
                f"Module {name!r} is a synchronized BatchNorm, which would wait for the ranks of other stages. Use "
                "BatchNorm, whose statistics are those of a micro-batch, or GroupNorm."
            )
    checks.check_trainable_model(model, "none", torch.device("cpu") if _is_on_cpu(model) else backend.device)


def _is_on_cpu(model: nn.Module) -> bool:
    return all(parameter.device.type == "cpu" for parameter in model.parameters())
