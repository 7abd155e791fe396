"""srun: Slurm's launcher, which starts ranks on the hosts of an allocation."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import replace

from unitrain.launchers import slurm
from unitrain.launchers.arguments import merge_options
from unitrain.launchers.errors import LaunchError
from unitrain.launchers.hosts import Host, processes_per_host
from unitrain.launchers.rendezvous import rendezvous_variables
from unitrain.launchers.spec import Command, LaunchSpec, find_program

DEFAULT_OPTIONS = (
    ("--export", "ALL"),
    # A cluster may be configured to kill the other tasks a few seconds after the first task exits, while rank 0 is
    # still writing its last checkpoint. unitrain's ranks exit on their own when a peer does not respond.
    ("--wait", "0"),
)


def task_options(ranks_per_host: Sequence[int]) -> list[str]:
    """Return the options for the number of hosts, the number of ranks, and the maximum number of ranks on a host.

    An additional option terminates the job step if a rank fails. Slurm distributes the ranks evenly, so unequal
    `ranks_per_host` are not reproduced.
    """
    hosts, ranks = len(ranks_per_host), sum(ranks_per_host)
    return [
        *("--nodes", str(hosts), "--ntasks", str(ranks), "--ntasks-per-node", str(max(ranks_per_host))),
        "--kill-on-bad-exit=1",  # terminate the job step if a rank fails
    ]


def build(spec: LaunchSpec) -> Command:
    """Return the command. It must run in an allocation, such as an sbatch script or the shell of salloc.

    The command uses the first hosts in Slurm's order that together have enough tasks. Slurm distributes the ranks
    evenly. The rendezvous is on the first host, on a port derived from the job ID (`slurm.Allocation.port`), unless
    MASTER_ADDR and MASTER_PORT are set. Outside an allocation, a dry run has a placeholder for the first host. Raises
    LaunchError outside an allocation, if the spec names hosts (Slurm chooses them), and for more processes than tasks.
    """
    spec.check_no_controller("srun")
    launch = f"unitrain launch --launcher srun -np {spec.num_processes}"
    if spec.hosts:
        names = ",".join(host.name for host in spec.hosts)
        raise LaunchError(
            f"srun starts ranks on the hosts that Slurm has chosen, but -H names {names}. Leave -H out, and request "
            f"the hosts from Slurm: salloc --nodelist {names} --ntasks {spec.num_processes} {launch} ..."
        )
    allocation = slurm.read_allocation()
    if allocation is None and spec.is_dry_run:  # the command that would run in an allocation of one host
        allocation = slurm.Allocation("", (Host("FIRST_HOST_OF_ALLOCATION", spec.num_processes),))
    if allocation is None:
        missing_program = (
            "" if shutil.which("srun") else "srun is not installed on this host: use a host of the cluster. "
        )
        raise LaunchError(
            f"srun starts ranks in a Slurm allocation, but SLURM_JOB_ID is not set. {missing_program}Put the command "
            f"into an sbatch script, or request an allocation for it: salloc --ntasks {spec.num_processes} {launch} ..."
        )
    allocation.check_slots(spec.num_processes)
    fix = "It is part of Slurm: run the command on a host that has Slurm's programs"
    program = find_program("srun", spec.python, fix, is_dry_run=spec.is_dry_run)
    spec = replace(spec, hosts=allocation.hosts)
    counts = processes_per_host(spec.num_processes, allocation.hosts)
    options = [
        # Without names, Slurm may choose other hosts of the allocation, and MASTER_ADDR would be wrong.
        *(("--nodelist", ",".join(host.name for host in allocation.hosts[: len(counts)])) if allocation.job_id else ()),
        *task_options(counts),
    ]
    if allocation.cpus_per_task is not None:
        # Since Slurm 22.05, srun does not inherit this option from sbatch, and each rank would have one core.
        options += ["--cpus-per-task", str(allocation.cpus_per_task)]
    if "SLURM_STEP_ID" in os.environ:
        options.append("--overlap")  # in a shell of `srun --pty`, the step holds the cores: srun would wait forever
    variables = spec.variables
    if "OMP_NUM_THREADS" not in {**os.environ, **spec.environment}:
        # The job may have fewer cores than the host.
        variables["OMP_NUM_THREADS"] = str(allocation.cpus_per_task or 1)
    variables |= rendezvous_variables(allocation.hosts, allocation.port, variables)
    options += merge_options(DEFAULT_OPTIONS, spec.launcher_args)
    return Command((program, *options, spec.python, *spec.program), variables)
