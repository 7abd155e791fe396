"""Validation of arguments and settings.

Each `check_` function returns the value, or raises ConfigError (or `error`). The first sentence of the message names
the argument and the invalid value; the second suggests a fix. `name` is the argument as the user writes it, such as
"TrainConfig.max_epochs" or "unitrain.init(timeout_seconds=...)"; `fix` is a sentence without a full stop. With
`optional`, None is valid.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from unitrain.errors import ConfigError, did_you_mean

# A Path has replaced "//" by "/".
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
_MAX_SHOWN_CHARACTERS = 60
_MAX_TEXT_CHARACTERS = 400  # longer than most paths
_MAX_SHOWN_INTEGER = 10**60  # Python does not format integers of more than 4,300 digits
# Python's ranges and torch's tensors do not support larger integers.
_MAX_INTEGER = 2**63 - 1


def describe_value(value: object) -> str:
    """Format `value` for a message, with the same result on every rank.

    Strings, numbers and paths are shown completely (only the start of a string above 400 characters), lists, tuples and
    dictionaries if their repr is short, and other objects by their class.
    """
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, str) and len(value) > _MAX_TEXT_CHARACTERS:
        return f"a string of {len(value)} characters that starts with {value[:_MAX_SHOWN_CHARACTERS]!r}"
    if isinstance(value, int) and abs(value) >= _MAX_SHOWN_INTEGER:
        return f"an integer of {value.bit_length()} bits"
    if value is None or isinstance(value, str | int | float | bool | Path):
        return repr(value)
    try:
        text = repr(value) if isinstance(value, list | tuple | dict) else ""
    except Exception:  # an element's __repr__ may raise any exception
        text = ""
    # Memory addresses differ between ranks.
    is_shown = 0 < len(text) <= _MAX_SHOWN_CHARACTERS and " at 0x" not in text
    return text if is_shown else f"an object of class {type(value).__name__}"


def check_integer(
    name: str, value: Any, minimum: int, fix: str, *, optional: bool = False, is_limited: bool = True
) -> Any:
    """Check that `value` is an integer of at least `minimum` and, if `is_limited`, at most 2**63 - 1."""
    if value is None and optional:
        return value
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"{name} must be a whole number, got {describe_value(value)}. {fix}.")
    if value < minimum:
        raise ConfigError(f"{name} must be at least {minimum}, got {describe_value(value)}. {fix}.")
    if is_limited and value > _MAX_INTEGER:
        raise ConfigError(f"{name} must be at most {_MAX_INTEGER} (2**63 - 1), got {describe_value(value)}. {fix}.")
    return value


def check_positive(name: str, value: Any, fix: str, *, optional: bool = False) -> Any:
    """Check that `value` is a finite number above 0."""
    if value is None and optional:
        return value
    if not is_finite_number(value) or value <= 0:
        raise ConfigError(f"{name} must be a number above 0, got {describe_value(value)}. {fix}.")
    return value


def check_non_negative(name: str, value: Any, fix: str) -> Any:
    """Check that `value` is a finite number of at least 0."""
    if not is_finite_number(value) or value < 0:
        raise ConfigError(f"{name} must be a number of at least 0, got {describe_value(value)}. {fix}.")
    return value


def check_boolean(name: str, value: Any, *, optional: bool = False) -> Any:
    """Check that `value` is True or False."""
    if not isinstance(value, bool) and not (optional and value is None):
        argument = name.rpartition(".")[2]
        allowed = "True, False or None" if optional else "True or False"
        raise ConfigError(f"{name} must be {allowed}, got {describe_value(value)}. Use {argument}=True to turn it on.")
    return value


def check_choice(name: str, value: Any, choices: Sequence[str]) -> Any:
    """Check that `value` is one of `choices`."""
    if not isinstance(value, str) or value not in choices:
        suggestion = did_you_mean(value, choices) if isinstance(value, str) else ""
        raise ConfigError(f"Unknown {name} {describe_value(value)}. {suggestion}Available: {', '.join(choices)}.")
    return value


def check_text(name: str, value: Any, fix: str, *, optional: bool = False) -> Any:
    """Check that `value` is a non-empty string."""
    if not (optional and value is None) and not (isinstance(value, str) and value):
        raise ConfigError(f"{name} must be a non-empty string, got {describe_value(value)}. {fix}.")
    return value


def check_path(name: str, value: Any, fix: str, *, optional: bool = False) -> Any:
    """Check that `value` is a non-empty path of a mounted file system. Return it with "~" replaced by the home folder.

    Python opens neither URLs, such as "s3://bucket", nor "~": both would silently be folders in the working directory.
    """
    if not (optional and value is None) and not (isinstance(value, str | Path) and str(value)):
        raise ConfigError(f"{name} must be a non-empty path, got {describe_value(value)}. {fix}.")
    if value is None:
        return value
    if "\0" in str(value):
        raise ConfigError(f"{name} must be a path, got {str(value)!r}, which has a NUL character. {fix}.")
    if _URL.match(str(value)):
        raise ConfigError(
            f"{name} must be a path in a file system that is mounted on every host, got the URL {str(value)!r}. {fix}, "
            "and copy it to the URL, or mount the bucket."
        )
    if not str(value).startswith("~"):
        return value
    try:
        return type(value)(Path(value).expanduser())
    except RuntimeError:  # raised for an unknown user
        raise ConfigError(
            f"{name} is {str(value)!r}, but the home folder of this user is unknown. {fix}, or './{value}' for a "
            "folder in the working directory."
        ) from None


def check_instance(
    name: str,
    value: Any,
    types: type | tuple[type, ...],
    description: str,
    fix: str,
    *,
    optional: bool = False,
    error: type[Exception] = ConfigError,
) -> Any:
    """Check that `value` is an instance of one of `types`. The message describes these types as `description`."""
    if not (optional and value is None) and not isinstance(value, types):
        raise error(f"{name} must be {description}, got {describe_value(value)}. {fix}.")
    return value


def check_function(name: str, value: Any, fix: str, *, optional: bool = False) -> Any:
    """Check that `value` is callable and not a class (calling a class would create an object)."""
    if not (optional and value is None) and (not callable(value) or isinstance(value, type)):
        raise ConfigError(f"{name} must be a function, got {describe_value(value)}. {fix}.")
    return value


def check_result_name(name: str, value: str, available: Iterable[str]) -> str:
    """Check that `value` is the name of one of the results `available` in a run."""
    choices = tuple(available)
    if value not in choices:
        suggestion = did_you_mean(value, choices)
        raise ConfigError(f"{name} {value!r} is not a result of this run. {suggestion}Available: {', '.join(choices)}.")
    return value


def is_positive_integer(value: Any) -> bool:
    """Return whether `value` is an integer of at least 1, and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def is_finite_number(value: Any) -> bool:
    """Return whether `value` is a finite number within the range of floats, and not a bool."""
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer above the range of floats
        return False
