"""Errors in a launch request, and suggestions for misspelled names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

# Exit code of preempted ranks after a checkpoint: EX_TEMPFAIL of sysexits.h, as in `unitrain.errors`.
PREEMPTED_EXIT_CODE = 75


class LaunchError(ValueError):
    """The requested launch is not possible. The message states the reason and a fix that can be pasted."""


class MissingLauncherError(LaunchError):
    """The program of the launcher is not installed on this host."""


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """Return "Did you mean ...? " with the choice closest to `name`, or an empty string if none is close."""
    close_matches = difflib.get_close_matches(name, list(choices), n=1)
    return f"Did you mean {close_matches[0]!r}? " if close_matches else ""
