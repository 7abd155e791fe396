"""Options of the launcher itself that the user gives with --launcher-args."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence

from unitrain.launchers.errors import LaunchError


def parse_options(texts: Iterable[str]) -> tuple[str, ...]:
    """Return the words of all texts, taken apart as a shell does. Raises LaunchError where that is not possible."""
    words: list[str] = []
    for text in texts:
        try:
            found = shlex.split(text)
        except ValueError as error:
            raise LaunchError(
                f"--launcher-args {text!r} cannot be taken apart: {error}. Quote it as for a shell, as in "
                '--launcher-args "--bind-to core"'
            ) from error
        if not found or not found[0].startswith("-"):
            # The launcher would take its first word for the program to run.
            raise LaunchError(
                f"--launcher-args {text!r} does not begin with an option. Give the option with its values, as in "
                '--launcher-args "--bind-to core"'
            )
        words += found
    return tuple(words)


def with_defaults(defaults: Iterable[Sequence[str]], given: Sequence[str]) -> tuple[str, ...]:
    """Return the options `given` after those `defaults` that they do not set: Open MPI refuses a setting made twice.

    The last word of a default is its value: what comes before it says which setting it is, with one dash or two.
    """
    plain = [word.lstrip("-") for word in given]
    kept: list[str] = []
    for default in defaults:
        setting = [word.lstrip("-") for word in default[:-1]]
        if not any(plain[at : at + len(setting)] == setting for at in range(len(plain))):
            kept += default
    return (*kept, *given)
