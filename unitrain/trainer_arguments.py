"""Validation of the Trainer's arguments, and overrides, with which tools change these arguments without editing the
user's script (see `unitrain.bootstrap.overrides`).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from unitrain import validation
from unitrain.backends.base import Backend
from unitrain.backends.checks import (
    check_is_optimizer,
    check_no_meta_tensors,
    check_same_settings,
    check_single_optimizer,
    check_unwrapped_model,
)
from unitrain.backends.synchronized_errors import call_on_all_ranks, gather_if_different
from unitrain.bootstrap.overrides import load_tool_overrides
from unitrain.config import CHECKPOINT_SETTINGS, TrainConfig
from unitrain.data.loading import Data, check_is_dataset
from unitrain.errors import ConfigError, UnsupportedError
from unitrain.optim.step import untrained_loss_error
from unitrain.prediction_writer import PredictionWriter

if TYPE_CHECKING:
    from unitrain.callbacks.callback import Callback

_METRICS_FIX = 'Use metrics={"accuracy": lambda output, target: (output.argmax(1) == target).float()}'


def dry_run_config(config: TrainConfig) -> TrainConfig:
    """Return `config` limited to one validation batch, without output files or a metrics endpoint."""
    return replace(
        config,
        limit_val_batches=1,
        output_dir=None,
        resume=False,
        metrics_port=None,
        **{name: getattr(TrainConfig, name) for name in CHECKPOINT_SETTINGS},
    )


def check_backend(argument: str, backend: Any) -> None:
    """Raise ConfigError unless `backend` is a Backend, as returned by `unitrain.init`."""
    fix = "Use the backend that unitrain.init() returned: with unitrain.init() as backend"
    validation.check_instance(argument, backend, Backend, "a backend", fix)


def check_trainer_arguments(
    model: Any,
    optimizer: Any,
    loss_fn: Any,
    config: Any,
    scheduler: Any,
    metrics: Any,
    callbacks: Any,
    config_text: Any,
) -> None:
    """Raise ConfigError, ModelError or UnsupportedError for an invalid argument of the Trainer."""
    check_unwrapped_model("Trainer(model)", model)
    check_no_meta_tensors(model)
    check_single_optimizer(optimizer)
    check_is_optimizer("Trainer(optimizer)", optimizer)
    _check_learning_rates(optimizer, config)
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UnsupportedError(
            f"{type(optimizer).__name__} evaluates the loss several times per step through a closure, which the "
            "Trainer does not support. Use an optimizer without a closure, such as torch.optim.AdamW, or write your "
            "own loop with backend.distributed_model and backend.distributed_optimizer."
        )
    fix = "Use an object, such as nn.CrossEntropyLoss(), or a function: loss_fn=nn.functional.cross_entropy"
    validation.check_function("Trainer(loss_fn)", loss_fn, fix, optional=True)
    _check_loss_parameters(loss_fn, model)
    validation.check_instance(
        "Trainer(config=...)", config, TrainConfig, "a TrainConfig", "Use TrainConfig(max_epochs=10)"
    )
    _check_scheduler(scheduler, optimizer)
    _check_metrics(metrics)
    fix = "Use callbacks=[unitrain.EarlyStopping()]"
    if isinstance(callbacks, str | Mapping):
        raise ConfigError(f"Trainer(callbacks=...) must be a list, got {validation.describe_value(callbacks)}. {fix}.")
    validation.check_instance("Trainer(callbacks=...)", callbacks, Sequence, "a list", fix)
    fix = 'Use config_text=Path("config.yaml").read_text(), or leave it out'
    validation.check_text("Trainer(config_text=...)", config_text, fix, optional=True)


def _check_loss_parameters(loss_fn: Any, model: nn.Module) -> None:
    """Raise ModelError if `loss_fn` is a module with trainable parameters outside of `model`, or a method or partial
    function of such a module. The gradients of these parameters would not be reduced."""
    while isinstance(loss_fn, functools.partial):
        loss_fn = loss_fn.func
    module = loss_fn if isinstance(loss_fn, nn.Module) else getattr(loss_fn, "__self__", None)
    if not isinstance(module, nn.Module):
        return
    own_ids = set(map(id, model.parameters()))
    names = [name for name, value in module.named_parameters() if value.requires_grad and id(value) not in own_ids]
    if names:
        raise untrained_loss_error(f"Trainer(loss_fn), of class {type(module).__name__}, has {names[0]!r}")


def _check_learning_rates(optimizer: torch.optim.Optimizer, config: Any) -> None:
    name, fix = type(optimizer).__name__, "Build the optimizer with a learning rate, such as lr=0.1"
    if not optimizer.param_groups:
        raise ConfigError(f"Trainer(optimizer), of class {name}, has no parameter groups. {fix}.")
    for group_index, group in enumerate(optimizer.param_groups):
        description = f"lr in parameter group {group_index} of the Trainer's {name}"
        # Optimizers that compute their own learning rates, such as Adafactor of transformers, have lr=None.
        # Those of torch do not.
        if "lr" in group and group["lr"] is None and not type(optimizer).__module__.startswith("torch.optim"):
            if getattr(config, "lr_scaling", "none") != "none":
                raise ConfigError(
                    f"{description} is None, so TrainConfig.lr_scaling {config.lr_scaling!r} cannot scale it. "
                    "Use lr_scaling='none', or build the optimizer with a learning rate."
                )
            continue
        rate = group.get("lr")
        plain = float(rate) if isinstance(rate, torch.Tensor) and rate.numel() == 1 else rate
        validation.check_non_negative(description, plain, fix)


def _check_scheduler(scheduler: Any, optimizer: torch.optim.Optimizer) -> None:
    if scheduler is None:
        return
    fix = "Use a scheduler of the same optimizer, such as torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)"
    if not (callable(scheduler) and not isinstance(scheduler, type)):  # a function builds the scheduler later
        validation.check_instance("Trainer(scheduler=...)", scheduler, LRScheduler, "a learning rate scheduler", fix)
    scheduled_optimizer = getattr(scheduler, "optimizer", optimizer)
    if scheduled_optimizer is not optimizer:
        class_name = type(scheduler).__name__
        raise ConfigError(
            f"Trainer(scheduler=...), of class {class_name}, was built on another optimizer, of class "
            f"{type(scheduled_optimizer).__name__}, so the learning rate of the Trainer's {type(optimizer).__name__} "
            "would never change. "
            f"Build it on the same optimizer: {class_name}(optimizer, ...)."
        )


def _check_metrics(metrics: Any) -> None:
    if metrics is None or (isinstance(metrics, nn.Module) and not isinstance(metrics, type)):
        return
    validation.check_instance("Trainer(metrics=...)", metrics, Mapping, "a dictionary of functions", _METRICS_FIX)
    for name, metric in metrics.items():
        validation.check_text("A name in Trainer(metrics=...)", name, _METRICS_FIX)
        if not callable(metric) or isinstance(metric, type):
            raise ConfigError(
                f"Trainer(metrics={{{name!r}: ...}}) must be a function or a torchmetrics object, got "
                f"{validation.describe_value(metric)}. {_METRICS_FIX}."
            )


def check_metric_names(names: Sequence[str]) -> None:
    """Raise ConfigError if a metric has the name of the loss."""
    if "loss" in names:
        raise ConfigError(
            "Trainer(metrics=...) has a result named 'loss', which is the name of the result of the loss function. "
            "Give it another name, such as 'plain_loss'."
        )


def check_checkpoint(backend: Backend, checkpoint: Any) -> Any:
    """Return the path or name for `load_weights`. Raise ConfigError on every rank unless it is the same on all
    ranks."""
    backend.check_running("Trainer.load_weights")
    name, fix = "Trainer.load_weights(checkpoint)", 'Use trainer.load_weights("best")'
    path = call_on_all_ranks(backend, lambda: validation.check_path(name, checkpoint, fix))
    checkpoints = gather_if_different(backend, str(checkpoint))
    if checkpoints is not None:
        raise ConfigError(f"{name} differs between ranks: {checkpoints}. Use the same checkpoint on every rank.")
    return path


def check_data(backend: Backend, function_name: str, **data: Any) -> None:
    """Raise DataError on every rank if an argument of a public function is not a dataset.

    `data` contains the arguments by name. `function_name` is the name of the public function for error messages, such
    as "Trainer.fit".
    """
    backend.check_running(function_name)

    def check() -> None:
        for name, value in data.items():
            check_is_dataset(f"{function_name}({name})", value)

    call_on_all_ranks(backend, check)


def check_writer(backend: Backend, writer: Any) -> None:
    """Raise ConfigError on every rank unless all ranks pass the same PredictionWriter, or None, to `predict`."""
    name, fix = "Trainer.predict(writer=...)", 'Use writer=unitrain.PredictionWriter("runs/first/predictions")'
    call_on_all_ranks(
        backend,
        lambda: validation.check_instance(name, writer, PredictionWriter, "a PredictionWriter", fix, optional=True),
    )
    check_same_settings(backend, "Trainer.predict", writer=None if writer is None else str(writer))


def validation_data_by_prefix(data: Data | Mapping[str, Data] | None, result_names: Sequence[str]) -> dict[str, Data]:
    """Return the validation datasets by result prefix: "val_", or "val_NAME_" for a mapping.

    `result_names` are the names of the results of an evaluation. Raises ConfigError for an empty mapping, for names
    that are empty or not strings, and for two results that would have the same name with their prefixes.
    """
    if data is None:
        return {}
    if not isinstance(data, Mapping):
        return {"val_": data}
    if not data or not all(isinstance(name, str) and name for name in data):
        raise ConfigError(
            f"val_data takes a dataset, or a mapping from names to datasets, got the names {list(data)}. "
            'Use trainer.fit(train_data, {"clean": clean_data, "noisy": noisy_data}).'
        )
    source_by_key: dict[str, tuple[str, str]] = {}
    for name in data:
        for result in result_names:
            key = f"val_{name}_{result}"
            if key in source_by_key:
                other_name, other_result = source_by_key[key]
                raise ConfigError(
                    f"Two results of Trainer.fit would be named {key!r}: {other_result!r} of val_data[{other_name!r}], "
                    f"and {result!r} of val_data[{name!r}]. Rename one of the datasets, or a metric in "
                    "Trainer(metrics={...})."
                )
            source_by_key[key] = name, result
    return {f"val_{name}_": dataset for name, dataset in data.items()}


def validation_data_by_argument(val_data: Data | Mapping[str, Data] | None) -> dict[str, Any]:
    """Return the validation datasets by the name of the argument in error messages, such as "val_data['clean']"."""
    if isinstance(val_data, Mapping):
        return {f"val_data[{name!r}]": data for name, data in val_data.items()}
    return {} if val_data is None else {"val_data": val_data}


@dataclass(frozen=True, kw_only=True)
class TrainerArguments:
    """The arguments of the Trainer that a tool may replace, except `model`, which a tool may only change in place."""

    model: nn.Module
    loss_fn: Callable[..., Any]
    config: TrainConfig
    callbacks: Sequence[Callback]
    forward: Callable[..., Any] | None


class TrainerOverrides(Protocol):
    """The overrides of a tool. With overrides, loggers are always disabled."""

    def override(self, arguments: TrainerArguments, backend: Backend) -> TrainerArguments:
        """Return the arguments for training. Called on every rank, after the user's arguments are validated."""
        ...


def load_overrides() -> TrainerOverrides | None:
    """Return the overrides of the tool that started this process, or None."""
    overrides: TrainerOverrides | None = load_tool_overrides()
    return overrides
