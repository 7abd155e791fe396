"""Checks of arguments and settings: what is wrong is one sentence that names the argument and the value found, and a
second one that can be pasted.

Each function returns the value, or raises ConfigError, or the `error` that it is given. `name` is the argument as the
user writes it, such as "TrainConfig.max_epochs" or "unitrain.init(timeout_seconds=...)", and `fix` the second sentence,
without its full stop.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from unitrain.errors import ConfigError, did_you_mean


def found(value: object) -> str:
    """Return how a message shows `value`: whole where it is short, otherwise its type; a class is called one."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if value is None or isinstance(value, str | int | float | bool | Path):
        return repr(value)
    text = repr(value) if isinstance(value, list | tuple | dict) else ""
    # An address would not be the same on every rank.
    return text if 0 < len(text) <= 60 and " at 0x" not in text else f"an object of class {type(value).__name__}"


def whole_number(name: str, value: Any, least: int, fix: str, *, optional: bool = False) -> Any:
    """Check that `value` is an integer of at least `least`, or None where it is `optional`."""
    if value is None and optional:
        return value
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"{name} must be a whole number, got {found(value)}. {fix}.")
    if value < least:
        raise ConfigError(f"{name} must be at least {least}, got {value}. {fix}.")
    return value


def positive(name: str, value: Any, fix: str, *, optional: bool = False) -> Any:
    """Check that `value` is a finite number above 0, or None where it is `optional`."""
    if value is None and optional:
        return value
    if not _is_number(value) or not (math.isfinite(value) and value > 0):
        raise ConfigError(f"{name} must be a number above 0, got {found(value)}. {fix}.")
    return value


def not_negative(name: str, value: Any, fix: str) -> Any:
    """Check that `value` is a finite number of at least 0."""
    if not _is_number(value) or not 0 <= value < math.inf:
        raise ConfigError(f"{name} must be a number of at least 0, got {found(value)}. {fix}.")
    return value


def switch(name: str, value: Any, *, optional: bool = False) -> Any:
    """Check that `value` is True or False, or None where it is `optional`."""
    if not isinstance(value, bool) and not (optional and value is None):
        argument = name.rpartition(".")[2]
        allowed = "True, False or None" if optional else "True or False"
        raise ConfigError(f"{name} must be {allowed}, got {found(value)}. Use {argument}=True to turn it on.")
    return value


def choice(name: str, value: Any, choices: Sequence[str]) -> Any:
    """Check that `value` is one of `choices`."""
    if not isinstance(value, str) or value not in choices:
        near = did_you_mean(str(value), choices)
        shown = repr(value) if isinstance(value, str) else found(value)
        raise ConfigError(f"Unknown {name} {shown}. {near}Available: {', '.join(choices)}.")
    return value


def text(name: str, value: Any, fix: str, *, optional: bool = False) -> Any:
    """Check that `value` is a string with at least one character, or None where it is `optional`."""
    if not (optional and value is None) and not (isinstance(value, str) and value):
        raise ConfigError(f"{name} must be a text that is not empty, got {found(value)}. {fix}.")
    return value


def folder(name: str, value: Any, fix: str, *, optional: bool = False) -> Any:
    """Check that `value` is a path that is not empty, or None where it is `optional`."""
    if not (optional and value is None) and not (isinstance(value, str | Path) and str(value)):
        raise ConfigError(f"{name} must be a path that is not empty, got {found(value)}. {fix}.")
    if isinstance(value, str) and "\0" in value:
        raise ConfigError(f"{name} must be a path, got {value!r}, which has a NUL character. {fix}.")
    return value


def instance(
    name: str,
    value: Any,
    kinds: type | tuple[type, ...],
    what: str,
    fix: str,
    *,
    optional: bool = False,
    error: type[Exception] = ConfigError,
) -> Any:
    """Check that `value` is an object of one of `kinds`, which a message calls `what`, and not one of these classes."""
    if not (optional and value is None) and not isinstance(value, kinds):
        raise error(f"{name} must be {what}, got {found(value)}. {fix}.")
    return value


def function(name: str, value: Any, fix: str, *, optional: bool = False) -> Any:
    """Check that `value` can be called and is no class: to call that would make an object."""
    if not (optional and value is None) and (not callable(value) or isinstance(value, type)):
        raise ConfigError(f"{name} must be a function, got {found(value)}. {fix}.")
    return value


def known(name: str, value: str, available: Iterable[str]) -> str:
    """Check that `value` is one of the results `available` in a run."""
    choices = tuple(available)
    if value not in choices:
        near = did_you_mean(value, choices)
        raise ConfigError(f"{name} {value!r} is not a result of this run. {near}Available: {', '.join(choices)}.")
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
