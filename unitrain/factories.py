"""Functions that say what to train: named on a command line, they return the arguments of `Trainer` and `fit`."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unitrain.errors import ConfigError, did_you_mean

FIT = ("train_data", "val_data")
_NEEDED = ("model", "optimizer", "loss_fn", "config", "train_data")


def made_by(target: str) -> Mapping[str, Any]:
    """Return what the function named by `target`, package.module:function or file.py:function, returns.

    It takes no arguments and returns a dictionary with "model", "optimizer", "loss_fn", "config" and "train_data", and
    what else `Trainer` and `Trainer.fit` take, without "backend". Raises ConfigError for a function that is not there,
    or returns something else.
    """
    import unitrain

    made = _function(target)()
    if not isinstance(made, Mapping):
        raise ConfigError(
            f"{target} returned a {type(made).__name__}. Let it return a dictionary with the arguments of Trainer "
            "and fit: model, optimizer, loss_fn, config and train_data."
        )
    known = [*inspect.signature(unitrain.Trainer).parameters, *FIT]
    known.remove("backend")
    for name in made:
        if name not in known:
            raise ConfigError(
                f"{target} returned {name!r}, which is no argument of Trainer or fit. {did_you_mean(str(name), known)}"
                f"Known: {', '.join(known)}."
            )
    lacking = [name for name in _NEEDED if name not in made]
    if lacking:
        raise ConfigError(
            f"{target} returned no {', '.join(lacking)}. Trainer and fit need {'it' if len(lacking) == 1 else 'them'}."
        )
    return made


def _function(target: str) -> Any:
    module, _, name = target.rpartition(":")
    if not module or not name:
        raise ConfigError(
            f"{target!r} names no function. Give a module or a file and the function in it: package.module:function, "
            "or train.py:function."
        )
    if module.endswith(".py"):
        path = Path(module).resolve()
        if not path.is_file():
            raise ConfigError(f"There is no file '{module}' for {target}. Name one that exists: train.py:{name}.")
        sys.path.insert(0, str(path.parent))
        module = path.stem
    try:
        found = vars(importlib.import_module(module))
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # an import of the module's own
        raise ConfigError(
            f"There is no module {error.name!r} for {target}. "
            f"Name a file, as in train.py:{name}, or install the package."
        ) from None
    if not callable(found.get(name)):
        raise ConfigError(f"There is no function {name!r} in {module}. Name one that returns the arguments of Trainer.")
    return found[name]
