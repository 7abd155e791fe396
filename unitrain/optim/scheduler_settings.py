"""The settings of a learning-rate scheduler, compared between a run and its checkpoint.

`load_state_dict` of torch's schedulers replaces settings such as `T_max` by those of the checkpoint, so a scheduler
that was built for another number of steps would silently use the old number.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from unitrain.data.batch import fingerprint
from unitrain.errors import CheckpointError

Settings = dict[str, int | float | str | bool | None]

# The learning rates of the optimizer, which are compared separately, and the progress of the scheduler.
_NOT_SETTINGS = {"base_lrs", "_last_lr", "last_epoch", "_step_count"}
_MAX_COMPARED_ITEMS = 100


def read_settings(scheduler: LRScheduler) -> Settings:
    """Return the plain values in the state of `scheduler`, and the numbers that its functions, such as those of
    LambdaLR, use. The keys are expressions such as "_schedulers[1].T_max"."""
    settings: Settings = {}
    _add_values(settings, "", {**scheduler.state_dict(), **_read_functions(scheduler)})
    for name, value in vars(scheduler).items():
        for index, part in enumerate(value if isinstance(value, list | tuple) else ()):
            if isinstance(part, LRScheduler):  # a part of a SequentialLR or ChainedScheduler
                _add_values(settings, f"{name}[{index}]", _read_functions(part))
    return settings


def unchanged_settings(initial: Settings, scheduler: LRScheduler) -> Settings:
    """Return the values of `initial`, the result of `read_settings` before the first step, that are still the same:
    other values are the progress of the scheduler."""
    current = read_settings(scheduler)
    return {name: value for name, value in initial.items() if name in current and _are_equal(current[name], value)}


def check_settings(saved: Settings, current: Settings, scheduler: LRScheduler) -> None:
    """Raise CheckpointError if a setting differs between `saved`, those of the checkpoint, and `current`, those with
    which `scheduler` was built."""
    for name, value in saved.items():
        if name in current and not _are_equal(value, current[name]):
            class_name = type(scheduler).__name__
            raise CheckpointError(
                f"The checkpoint's {class_name} was built with {name}={value!r}, but the {class_name} of this run was "
                f"built with {name}={current[name]!r}, which changes its learning rates. Build it with {name}="
                f"{value!r}, or start a new run from the weights of the checkpoint: trainer.load_weights(checkpoint)."
            )


def _add_values(settings: Settings, path: str, value: Any) -> None:
    """Add the plain values in `value`, at any depth, to `settings`."""
    if isinstance(value, np.generic):
        value = value.item()  # checkpoints contain Python numbers only
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        for key, item in value.items():
            if key not in _NOT_SETTINGS:
                _add_values(settings, f"{path}.{key}" if path else key, item)
    elif isinstance(value, Mapping):  # such as the milestones of a MultiStepLR
        _add_values(settings, path, str(dict(value)))
    elif isinstance(value, list | tuple) and len(value) <= _MAX_COMPARED_ITEMS:
        settings[f"len({path})"] = len(value)
        for index, item in enumerate(value):
            _add_values(settings, f"{path}[{index}]", item)
    elif isinstance(value, Tensor | list | tuple):
        settings[f"hash of {path}"] = fingerprint(value)
    elif value is None or isinstance(value, int | float | str | bool):
        settings[path] = value


def _read_functions(scheduler: Any) -> dict[str, Any]:
    """Return the values that the functions in the attributes of `scheduler` use, by attribute."""
    found = {}
    for name, value in vars(scheduler).items():
        functions = value if isinstance(value, list | tuple) else [value]
        used = [_read_function(function) for function in functions if callable(function)]
        if any(used):
            found[name] = used
    return found


def _read_function(function: Any) -> dict[str, Any]:
    """Return the arguments that a functools.partial binds, and the numbers that a Python function refers to."""
    if isinstance(function, functools.partial):
        bound = {f"argument {index}": value for index, value in enumerate(function.args)}
        return {**_read_function(function.func), **bound, **function.keywords}
    if not inspect.isfunction(function):
        return {}
    try:
        variables = inspect.getclosurevars(function)
    except ValueError:  # a variable is not assigned yet
        return {}
    used = {**variables.globals, **variables.nonlocals}
    return {name: value for name, value in used.items() if isinstance(value, int | float)}


def _are_equal(one: Any, other: Any) -> bool:
    return bool(one == other or (one != one and other != other))  # NaN equals NaN
