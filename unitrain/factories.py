"""Import and call a training function that is named on the command line. The function returns the arguments of
`Trainer` and `fit`."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unitrain.errors import ConfigError, did_you_mean
from unitrain.launchers.spec import CONFIG_SUFFIXES

FIT_ARGUMENTS = ("train_data", "val_data")
_REQUIRED = ("model", "optimizer", "config", "train_data")


def call_training_function(target: str) -> Mapping[str, Any]:
    """Call the function `target`, package.module:function or file.py:function, and return its result.

    `target` may also be a configuration file of `unitrain train`, such as config.yaml. The result then contains the
    arguments in the file. The function takes no arguments, and returns a dictionary with "model", "optimizer",
    "config", "train_data" and optionally other arguments of `Trainer` and `Trainer.fit`, except "backend". Raises
    ConfigError if the function does not exist or does not return such a dictionary.
    """
    import unitrain

    if Path(target).suffix in CONFIG_SUFFIXES:
        from unitrain.config_files.instantiation import load_arguments

        return load_arguments([target])
    arguments = _import_function(target)()
    if not isinstance(arguments, Mapping):
        raise ConfigError(
            f"{target} returned an object of class {type(arguments).__name__}. Return a dictionary with the "
            "arguments of Trainer and fit: model, optimizer, config, train_data and others."
        )
    known_names = [*inspect.signature(unitrain.Trainer).parameters, *FIT_ARGUMENTS]
    known_names.remove("backend")
    for name in arguments:
        if name not in known_names:
            raise ConfigError(
                f"{target} returned {name!r}, which is not an argument of Trainer or fit. "
                f"{did_you_mean(str(name), known_names)}Available: {', '.join(known_names)}."
            )
    missing_names = [name for name in _REQUIRED if name not in arguments]
    if missing_names:
        raise ConfigError(
            f"{target} did not return {', '.join(missing_names)}. Add them to the dictionary: Trainer and fit require "
            "them."
        )
    return arguments


def _import_function(target: str) -> Any:
    module, _, name = target.rpartition(":")
    if not module or not name:
        raise ConfigError(
            f"{target!r} is not the name of a function. Give a module or a file and the function: "
            "package.module:function, or train.py:function."
        )
    if module.endswith(".py"):
        path = Path(module).resolve()
        if not path.is_file():
            raise ConfigError(f"There is no file '{module}' for {target}. Pass an existing file: train.py:{name}.")
        sys.path.insert(0, str(path.parent))
        module = path.stem
    try:
        attributes = vars(importlib.import_module(module))
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module exists, but one of its imports does not
        raise ConfigError(
            f"There is no module {error.name!r} for {target}. "
            f"Name a file, as in train.py:{name}, or install the package."
        ) from None
    if not callable(attributes.get(name)):
        raise ConfigError(
            f"There is no function {name!r} in {module}. Pass a function that returns the arguments of Trainer."
        )
    return attributes[name]
