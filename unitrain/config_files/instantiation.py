"""The arguments of `Trainer` and `fit` from a parsed configuration."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from unitrain.config_files.imports import ExitError, call_without_exit
from unitrain.config_files.parser import ParsedConfig, parse
from unitrain.config_files.settings import build_config, check_values
from unitrain.errors import add_note
from unitrain.randomness import seed_generators

_TOTAL_STEPS = "total_steps"


def build_arguments(parsed: ParsedConfig) -> dict[str, Any]:
    """Return the arguments of `Trainer` and `fit`, except "backend", as a dictionary.

    Seeds the generators of torch, numpy and Python with the configuration's seed, and then creates the model before any
    other object. Raises ConfigError for invalid settings, for a function that returns an object of the wrong type, and
    for a function that calls sys.exit. If a user's class raises an exception, a note that names the key is added to the
    exception.
    """
    config = build_config(parsed)
    seed_generators(config.seed)
    model = _build(parsed, "model")
    _check_type(parsed, "model", model, nn.Module, "a torch.nn.Module")
    build_optimizer = _build(parsed, "optimizer")
    optimizer = _call(parsed, "optimizer", lambda: build_optimizer(model.parameters()))
    _check_type(parsed, "optimizer", optimizer, Optimizer, "a torch.optim.Optimizer")
    arguments = {
        "model": model,
        "optimizer": optimizer,
        "loss_fn": _build(parsed, "loss_fn"),
        "config": config,
        "metrics": _build(parsed, "metrics"),
        "forward": _build(parsed, "forward"),
        "callbacks": _build(parsed, "callbacks"),
        "loggers": _build(parsed, "loggers"),
    }
    scheduler = _build(parsed, "scheduler")
    if scheduler is not None:
        built = _call(parsed, "scheduler", lambda: _build_scheduler(scheduler, optimizer))
        is_function = callable(built) and not isinstance(built, LRScheduler)
        # The Trainer calls the function when the number of steps is known.
        arguments["scheduler"] = partial(_call_scheduler, parsed, built) if is_function else built
    return arguments | {name: _build(parsed, name) for name in ("train_data", "val_data")}


def load_arguments(argv: Sequence[str]) -> Mapping[str, Any]:
    """Return the arguments of `Trainer` and `fit` for `argv`, the command-line arguments of `unitrain train`.

    Raises ConfigError, or MissingDependencyError if jsonargparse is missing.
    """
    return build_arguments(read_command_line(argv))


def read_command_line(argv: Sequence[str]) -> ParsedConfig:
    """Parse the command line of `unitrain train`, and check its values, before the ranks communicate.

    Raises ConfigError for invalid values, or MissingDependencyError if jsonargparse is missing. See `parser.parse`.
    """
    parsed = parse(argv)
    check_values(parsed)
    return parsed


def _build(parsed: ParsedConfig, name: str) -> Any:
    """Create the object that the key `name` specifies."""
    return _call(parsed, name, lambda: parsed.instantiate(name))


def _call(parsed: ParsedConfig, name: str, function: Callable[[], Any]) -> Any:
    """Call `function`. If it raises an exception, add a note with the location of the key `name`."""
    try:
        return call_without_exit(parsed.location(name), _describe(parsed, name), function)
    except ExitError:
        raise
    except Exception as error:
        add_note(error, str(parsed.error([name], "the exception was raised while this object was created")))
        raise


def _check_type(parsed: ParsedConfig, name: str, value: Any, expected: type, description: str) -> None:
    """Raise ConfigError unless `value`, which the key `name` specifies, is an instance of `expected`."""
    if not isinstance(value, expected):
        found = "None" if value is None else f"an object of type {type(value).__name__}"
        fix = f"Return {description} from this function"
        raise parsed.error([name], f"{_describe(parsed, name)} returned {found}, not {description}. {fix}.")


def _describe(parsed: ParsedConfig, name: str) -> str:
    """Return the import path that the key `name` contains, or a description if it is not the only one."""
    value = parsed.values[name]
    if inspect.isfunction(value):
        return f"{value.__module__}.{value.__qualname__}"
    return str(getattr(value, "class_path", "a class or function of this key"))


def _call_scheduler(parsed: ParsedConfig, function: Callable[..., Any], optimizer: Optimizer, total_steps: int) -> Any:
    return _call(parsed, "scheduler", lambda: function(optimizer, total_steps))


def _build_scheduler(scheduler: Any, optimizer: Optimizer) -> Any:
    """Return a scheduler, or a function scheduler(optimizer, total_steps) for the Trainer.

    `scheduler` is the user's function, or a functools.partial of a scheduler class with its arguments.
    """
    if isinstance(scheduler, partial):
        if _TOTAL_STEPS in scheduler.keywords and scheduler.keywords[_TOTAL_STEPS] is None:
            if scheduler.keywords.get("steps_per_epoch") is not None:  # OneCycleLR computes total_steps from it
                return scheduler(optimizer)
            return lambda optimizer, total_steps: scheduler(optimizer, total_steps=total_steps)
        return scheduler(optimizer)
    required = [
        parameter
        for parameter in inspect.signature(scheduler).parameters.values()
        if parameter.default is inspect.Parameter.empty
        and parameter.kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    ]
    return scheduler if len(required) > 1 else scheduler(optimizer)
