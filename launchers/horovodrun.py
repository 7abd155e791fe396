"""horovodrun: starts Horovod's ranks on all hosts over ssh, with its own Gloo controller or through MPI."""

from __future__ import annotations

import os
from dataclasses import replace

from launchers import slurm
from launchers.errors import LaunchError
from launchers.exports import looks_secret
from launchers.hosts import check_spellings, is_here
from launchers.programs import find_program
from launchers.spec import Command, LaunchSpec


def build(spec: LaunchSpec) -> Command:
    """Return the command; it is typed on one host and reaches the others itself."""
    if not spec.hosts and (job := slurm.allocation_of_several_hosts()) is not None:
        job.check_slots(spec.num_processes)
        spec = replace(spec, hosts=job.hosts)
    check_spellings(spec.hosts)
    program = find_program("horovodrun", spec.python, "Build Horovod for this torch with: unitrain horovod build")
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
        find_program("mpirun", spec.python, "Install Open MPI, sudo apt-get install openmpi-bin, or leave --mpi out")
    options.append(f"--{controller}")
    if spec.interface is not None:
        options += ["--network-interfaces", spec.interface]
    secrets = [name for name in spec.forwarded if looks_secret(name, os.environ.get(name, ""))]
    if secrets and controller == "gloo" and not all(map(is_here, spec.hosts)):
        raise LaunchError(
            f"horovodrun shows the values of all variables to everybody who lists this host's processes, and "
            f"-x {secrets[0]} hands on one that looks secret. "
            f"Use --launcher mpirun, which names it only, or set it on each host and leave -x {secrets[0]} out"
        )
    if len(spec.hosts) > 1:
        options.append("--disable-cache")  # it remembers for an hour which hosts it could reach
    if controller == "mpi" and os.geteuid() == 0:
        variables |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return Command((program, *options, *spec.launcher_args, spec.python, *spec.program), variables)
