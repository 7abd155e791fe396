"""Launcher names and their build functions."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

from unitrain.launchers import horovodrun, mpirun, srun, torchrun
from unitrain.launchers.errors import LaunchError, did_you_mean
from unitrain.launchers.hosts import Host, check_is_this_host
from unitrain.launchers.spec import Command, LaunchSpec

# Default launcher per backend.
DEFAULT_LAUNCHERS = {"ddp": "torchrun", "horovod": "horovodrun", "local": "none"}
_ENTRY_POINT_GROUP = "unitrain.launchers"


def _build_without_launcher(spec: LaunchSpec) -> Command:
    """Return the command for a single process. Raises LaunchError for several processes or hosts, for another host, and
    for options of launchers."""
    if spec.num_processes > 1:
        raise LaunchError(
            f"Without a launcher, unitrain starts one process on this host, but -np requests {spec.num_processes}. "
            f"Use --backend ddp or --backend horovod for -np {spec.num_processes}, or -np 1 for one process."
        )
    if len(spec.hosts) > 1:
        raise LaunchError(
            f"Without a launcher, unitrain starts one process on this host, but -H names {len(spec.hosts)} hosts: "
            f"{', '.join(host.name for host in spec.hosts)}. Leave -H out, or choose a launcher: --launcher torchrun"
        )
    if spec.controller is not None:
        raise LaunchError(
            f"--{spec.controller} chooses horovodrun's controller, but one process is started without a launcher. "
            "Leave it out, or use: --backend horovod --launcher horovodrun"
        )
    if spec.launcher_args:
        raise LaunchError(
            f"--launcher-args {shlex.join(spec.launcher_args)!r} are for a launcher, but one process is started "
            "without one. Leave them out, or choose one with --launcher."
        )
    for host in spec.hosts:
        check_is_this_host(host, "Without a launcher, unitrain")
    return Command((spec.python, *spec.program), spec.variables)


_BUILT_IN: dict[str, Callable[[LaunchSpec], Command]] = {
    "horovodrun": horovodrun.build,
    "mpirun": mpirun.build,
    "none": _build_without_launcher,
    "srun": srun.build,
    "torchrun": torchrun.build,
}


def available() -> list[str]:
    """Return the sorted names of all launchers: built-in launchers and plug-ins."""
    return sorted({*_BUILT_IN, *(entry.name for entry in entry_points(group=_ENTRY_POINT_GROUP))})


def build(launcher: str, spec: LaunchSpec) -> Command:
    """Return the command that runs `spec` under `launcher`. Raises LaunchError, including for an unknown launcher."""
    function = _load_build_function(launcher)
    if spec.backend == "local" and spec.num_processes > 1 and launcher != "none":
        raise LaunchError(
            f"Backend 'local' runs one process, but {launcher} would start {spec.num_processes}. "
            f"Use --backend ddp or --backend horovod for -np {spec.num_processes}, or -np 1 for one process."
        )
    return function(spec).without_values_of(spec.forwarded)


def build_local(launcher: str | None, script: str, num_processes: int, backend: str, **fields: Any) -> Command:
    """Return the command that runs `script` on `num_processes` ranks on this host, even in a Slurm allocation of
    several hosts.

    The exception is srun, which starts the ranks on the hosts of the allocation. If `launcher` is None, the backend's
    default launcher is used, or torchrun for the backend of a plug-in. `fields` are additional fields of the
    LaunchSpec. Raises LaunchError.
    """
    launcher = launcher or DEFAULT_LAUNCHERS.get(backend, "torchrun")
    # The host is named explicitly, because launchers otherwise use the hosts of the allocation.
    hosts = () if launcher == "srun" else (Host("localhost", num_processes),)
    spec = LaunchSpec(script=script, num_processes=num_processes, hosts=hosts, backend=backend, **fields)
    return build(launcher, spec)


def _load_build_function(launcher: str) -> Callable[[LaunchSpec], Command]:
    if launcher in _BUILT_IN:
        return _BUILT_IN[launcher]
    for entry in entry_points(group=_ENTRY_POINT_GROUP, name=launcher):
        try:
            loaded: Callable[[LaunchSpec], Command] = entry.load()
        except ImportError as error:
            raise LaunchError(
                f"Launcher {launcher!r} cannot be loaded: {error}. "
                f"Install the requirements of the package that provides {entry.value!r}, or choose another launcher "
                "with --launcher."
            ) from error
        return loaded
    names = available()
    raise LaunchError(f"Unknown launcher {launcher!r}. {did_you_mean(launcher, names)}Available: {', '.join(names)}.")
