"""Errors in a launch request, raised before any rank starts."""

from __future__ import annotations


class LaunchError(ValueError):
    """The requested launch is not possible. The message states the reason and a fix to paste."""


class MissingLauncherError(LaunchError):
    """The program of the launcher is not installed on this host."""
