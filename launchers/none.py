"""No launcher: one process, started as it is."""

from __future__ import annotations

import shlex

from unitrain.launchers.errors import LaunchError
from unitrain.launchers.hosts import check_is_here
from unitrain.launchers.spec import Command, LaunchSpec


def build(spec: LaunchSpec) -> Command:
    """Return the plain command. Raises LaunchError for more than one process, a controller, or a launcher's options."""
    if spec.num_processes > 1 or len(spec.hosts) > 1:
        raise LaunchError(
            f"One process on this host needs no launcher, but {spec.num_processes} were asked for. "
            f"Use --backend ddp or --backend horovod for -np {spec.num_processes}, or -np 1 for one process."
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
        check_is_here(host, "Without a launcher unitrain")
    return Command((spec.python, *spec.program), spec.variables)
