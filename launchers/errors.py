"""What can be wrong with a launch, found before anything starts."""

from __future__ import annotations


class LaunchError(ValueError):
    """The launch that was asked for cannot work: one sentence of what was found, one that can be pasted."""


class MissingLauncherError(LaunchError):
    """The launcher's program is not installed on this host."""
