"""The arguments of `Trainer` and `fit` from a parsed configuration."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch.optim import Optimizer

from unitrain.config_files.parser import ParsedConfig, parse
from unitrain.config_files.settings import build_config, check_values
from unitrain.randomness import seed_generators

_TOTAL_STEPS = "total_steps"


def build_arguments(parsed: ParsedConfig) -> dict[str, Any]:
    """Return the arguments of `Trainer` and `fit`, except "backend", as a dictionary.

    Seeds the generators of torch, numpy and Python with the configuration's seed, and then creates the model before any
    other object. Raises ConfigError for invalid settings. If a user's class raises an exception, a note that names the
    key is added to the exception.
    """
    config = build_config(parsed)
    seed_generators(config.seed)
    model = _build(parsed, "model")
    optimizer = _build(parsed, "optimizer")
    arguments = {
        "model": model,
        "optimizer": _call(parsed, "optimizer", lambda: optimizer(model.parameters())),
        "loss_fn": _build(parsed, "loss_fn"),
        "config": config,
        "metrics": _build(parsed, "metrics"),
        "forward": _build(parsed, "forward"),
        "callbacks": _build(parsed, "callbacks"),
        "loggers": _build(parsed, "loggers"),
    }
    scheduler = _build(parsed, "scheduler")
    if scheduler is not None:
        arguments["scheduler"] = _call(parsed, "scheduler", lambda: _build_scheduler(scheduler, arguments["optimizer"]))
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
        return function()
    except Exception as error:
        error.add_note(str(parsed.error([name], "the exception was raised while this object was created")))
        raise


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
