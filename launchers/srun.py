"""srun: Slurm's own launcher, which starts ranks on the hosts of an allocation."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from unitrain.launchers import slurm
from unitrain.launchers.addresses import meeting_place
from unitrain.launchers.errors import LaunchError
from unitrain.launchers.hosts import shares
from unitrain.launchers.options import with_defaults
from unitrain.launchers.programs import find_program
from unitrain.launchers.spec import Command, LaunchSpec

DEFAULTS = (
    ("--export", "ALL"),
    # A cluster may be set to end the others some seconds after the first rank has ended, in the middle of rank 0's
    # last checkpoint. Ranks of unitrain that are waited for in vain end themselves.
    ("--wait", "0"),
)


def task_options(counts: Sequence[int]) -> list[str]:
    """Return what asks for `counts` ranks on as many hosts."""
    return [
        *("--nodes", str(len(counts)), "--ntasks", str(sum(counts)), "--ntasks-per-node", str(max(counts))),
        "--kill-on-bad-exit=1",  # a rank that fails ends the job
    ]


def build(spec: LaunchSpec) -> Command:
    """Return the command; it is typed in an allocation, as in an sbatch script or in the shell of salloc.

    Hosts are filled in Slurm's order, as by the other launchers. The ranks are told to meet on the first one, at a
    port that follows from the job's number (`slurm.Allocation`), unless MASTER_ADDR and MASTER_PORT are set. Raises
    LaunchError outside an allocation, for hosts, which are Slurm's to choose, and for more processes than it has tasks.
    """
    spec.check_no_controller("srun")
    asked = f"unitrain launch --launcher srun -np {spec.num_processes}"
    if spec.hosts:
        names = ",".join(host.name for host in spec.hosts)
        raise LaunchError(
            f"srun starts ranks on the hosts that Slurm has chosen, but -H names {names}. Leave -H out, and ask Slurm "
            f"for them: salloc --nodelist {names} --ntasks {spec.num_processes} {asked} ..."
        )
    job = slurm.allocation()
    if job is None:
        raise LaunchError(
            "srun starts ranks in an allocation of Slurm's, but SLURM_JOB_ID is not set: this is none. "
            f"Write the line into an sbatch script, or begin it with: salloc --ntasks {spec.num_processes} {asked} ..."
        )
    job.check_slots(spec.num_processes)
    remedy = "It comes with Slurm: start from a host that has its programs"
    program = find_program("srun", spec.python, remedy, planned=spec.planned)
    spec = replace(spec, hosts=job.hosts)
    counts = shares(spec.num_processes, job.hosts)
    options = [
        # Without their names Slurm may choose any of them, and the ranks wait for the first.
        *("--nodelist", ",".join(host.name for host in job.hosts[: len(counts)])),
        *task_options(counts),
    ]
    if job.cpus_per_task is not None:
        # From Slurm 22.05 on srun does not take it over from sbatch, and each rank would have one core.
        options += ["--cpus-per-task", str(job.cpus_per_task)]
    if "SLURM_STEP_ID" in os.environ:
        options.append("--overlap")  # in the shell of `srun --pty`, whose step would else keep the cores: a hang
    variables = spec.variables
    if "OMP_NUM_THREADS" not in {**os.environ, **spec.environment}:
        # The cores of the job, which are not all of the host.
        variables["OMP_NUM_THREADS"] = str(job.cpus_per_task or 1)
    variables |= meeting_place(job.hosts, job.port, variables)
    options += with_defaults(DEFAULTS, spec.launcher_args)
    return Command((program, *options, spec.python, *spec.program), variables)
