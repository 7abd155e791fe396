"""Launcher names and the functions behind them."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from importlib.metadata import entry_points

from unitrain.launchers import horovodrun, mpirun, none, srun, torchrun
from unitrain.launchers.errors import LaunchError
from unitrain.launchers.spec import Command, LaunchSpec

# The launcher that a backend's users know.
LAUNCHER_OF = {"ddp": "torchrun", "horovod": "horovodrun", "local": "none"}
_GROUP = "unitrain.launchers"
_BUILT_IN: dict[str, Callable[[LaunchSpec], Command]] = {
    "horovodrun": horovodrun.build,
    "mpirun": mpirun.build,
    "none": none.build,
    "srun": srun.build,
    "torchrun": torchrun.build,
}


def available() -> list[str]:
    """Names of all launchers, built in and installed by other packages, sorted."""
    return sorted({*_BUILT_IN, *(entry.name for entry in entry_points(group=_GROUP))})


def build(launcher: str, spec: LaunchSpec) -> Command:
    """Return the command by which `launcher` does what `spec` asks. Raises LaunchError, also for an unknown one."""
    return _function(launcher)(spec)


def _function(launcher: str) -> Callable[[LaunchSpec], Command]:
    if launcher in _BUILT_IN:
        return _BUILT_IN[launcher]
    for entry in entry_points(group=_GROUP, name=launcher):
        try:
            loaded: Callable[[LaunchSpec], Command] = entry.load()
        except ImportError as error:
            raise LaunchError(
                f"Launcher {launcher!r} cannot be loaded: {error}. "
                f"Install what the package behind {entry.value!r} needs, or choose another with --launcher."
            ) from error
        return loaded
    names = available()
    near = difflib.get_close_matches(launcher, names, n=1)
    suggestion = f"Did you mean {near[0]!r}? " if near else ""
    raise LaunchError(f"Unknown launcher {launcher!r}. {suggestion}Available: {', '.join(names)}.")
