"""Import of the modules that a configuration names, before jsonargparse imports them: jsonargparse would replace the
exceptions that a module raises."""

from __future__ import annotations

import importlib
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TypeVar

import yaml

from unitrain.config_files.sources import ConfigEntry, ConfigFile, read_value
from unitrain.errors import ConfigError, Preempted, add_note

CLASS_PATH = "class_path"
# Top-level keys whose value may be an import path.
_KEYS = ("model", "optimizer", "scheduler", "loss_fn", "forward", "train_data", "val_data", "metrics", "callbacks")
# Top-level keys whose value may be a list of import paths, or may map names to import paths.
_LIST_KEYS = ("metrics", "val_data", "callbacks", "loggers")
Result = TypeVar("Result")
_IMPORT_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")


class ExitError(ConfigError):
    """A module, class or function that a configuration names called sys.exit."""


def import_modules(files: Iterable[ConfigFile], overrides: Sequence[str]) -> None:
    """Import the modules of the import paths in `files` and in the options `overrides`.

    An exception that a module raises is raised unchanged, with a note that contains the location of the import path.
    Raises ExitError if a module calls sys.exit. Ignores missing modules, which jsonargparse reports.
    """
    for location, path in _import_paths(files, overrides):
        module = path.rpartition(".")[0]
        try:
            call_without_exit(location, f"the import of {module}", partial(importlib.import_module, module))
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module}.".startswith(f"{error.name}."):
                _add_note(error, location, module)
                raise
        except ExitError:
            raise
        except Exception as error:
            _add_note(error, location, module)
            raise


def find_object(path: str) -> object:
    """Return the object with the import path `path` if its module is imported; otherwise None."""
    module, _, name = path.rpartition(".")
    return getattr(sys.modules.get(module), name, None)


def find_import_path(key: str, files: Sequence[ConfigFile], overrides: Sequence[str]) -> str | None:
    """Return the import path that `key` specifies, or None if `key` is not set to a single value. Options take
    precedence over files, and later options and files over earlier ones."""
    names = (key, f"{key}.{CLASS_PATH}")
    for option, value in reversed(list(option_values(overrides))):
        if option in names and _IMPORT_PATH.fullmatch(value):
            return value
    for file in reversed(files):
        for entry in file.entries:
            if ".".join(map(str, entry.key)) in names and entry.value is not None:
                return entry.value
    return None


def call_without_exit(location: str, callee: str, function: Callable[[], Result]) -> Result:
    """Call `function` and return its result. Raises ExitError if `function` calls sys.exit. The message contains
    `location` and `callee`, which describes what is called."""
    try:
        return function()
    except Preempted:
        raise
    except SystemExit as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise ExitError(
            f"{location}: {callee} called sys.exit({error.code!r}) in {frame.filename}, line {frame.lineno}. Raise an "
            'exception instead, or call sys.exit only below: if __name__ == "__main__":'
        ) from error


def option_values(overrides: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the names and values of the options --NAME VALUE and --NAME=VALUE; the value may be empty."""
    for index, word in enumerate(overrides):
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            following = overrides[index + 1] if index + 1 < len(overrides) else ""
            yield name.rstrip("+"), value if equals or following.startswith("--") else following


def _import_paths(files: Iterable[ConfigFile], overrides: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the locations and values of the import paths."""
    for file in files:
        for entry in file.entries:
            if _is_import_path(entry):
                names = [part for part in entry.key if isinstance(part, str) and part != CLASS_PATH]
                yield f"{file.location(entry)}: {'.'.join(names)}", str(entry.value)
    for name, text in option_values(overrides):
        try:
            entries = read_value(tuple(name.split(".")), text)
        except (yaml.YAMLError, ConfigError, RecursionError):
            continue  # jsonargparse reports the error
        yield from ((f"--{name}", str(entry.value)) for entry in entries if _is_import_path(entry))


def _is_import_path(entry: ConfigEntry) -> bool:
    names = [*str(entry.key[0]).split("."), *entry.key[1:]]
    if entry.value is None or not _IMPORT_PATH.fullmatch(entry.value):
        return False
    if names[-1] == CLASS_PATH:
        return True
    return (len(names) == 1 and names[0] in _KEYS) or (len(names) == 2 and names[0] in _LIST_KEYS)


def _add_note(error: Exception, location: str, module: str) -> None:
    add_note(error, f"{location}: the exception was raised while the module {module!r} was imported")
