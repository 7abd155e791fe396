"""horovodrun: starts Horovod's ranks on all hosts over ssh, with its own Gloo controller or through MPI."""

from __future__ import annotations

import os
from dataclasses import replace

from unitrain.launchers import slurm
from unitrain.launchers.errors import LaunchError
from unitrain.launchers.hosts import check_spellings
from unitrain.launchers.programs import find_program, module_command
from unitrain.launchers.spec import Command, LaunchSpec


def build(spec: LaunchSpec) -> Command:
    """Return the command; it is typed on one host and reaches the others itself."""
    if not spec.hosts and (job := slurm.allocation_of_several_hosts()) is not None:
        job.check_slots(spec.num_processes)
        spec = replace(spec, hosts=job.hosts)
    check_spellings(spec.hosts)
    build_it = "Build Horovod for this torch with: unitrain horovod build"
    start = module_command("horovodrun", "horovod", spec.python, build_it, planned=spec.planned)
    options = ["-np", str(spec.num_processes)]
    if spec.hosts:
        options += ["-H", ",".join(map(str, spec.hosts))]
    variables = spec.variables
    # Said always, because horovodrun would else decide by how it was built: the same line then does the same
    # everywhere.
    controller = spec.controller or "gloo"
    if controller == "mpi" and spec.backend == "ddp":
        raise LaunchError(
            "Backend 'ddp' needs an address to meet at, which MPI does not give. "
            "Leave --mpi out, or use --backend horovod, or --launcher mpirun."
        )
    if controller == "mpi":
        remedy = "Install Open MPI, sudo apt-get install openmpi-bin, or leave --mpi out"
        find_program("mpirun", spec.python, remedy, planned=spec.planned)
        variables |= slurm.mpirun_variables(spec.hosts)
    options.append(f"--{controller}")
    if spec.interface is not None:
        options += ["--network-interfaces", spec.interface]
    if len(spec.hosts) > 1:
        options.append("--disable-cache")  # it remembers for an hour which hosts it could reach
    if controller == "mpi" and os.geteuid() == 0:
        variables |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return Command((*start, *options, *spec.launcher_args, spec.python, *spec.program), variables)
