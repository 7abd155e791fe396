"""The Slurm allocation that this process is in: its hosts, and how many processes each takes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from launchers.addresses import DEFAULT_PORT
from launchers.errors import LaunchError
from launchers.hosts import Host

_SECONDS = 30
_TASKS = re.compile(r"(?P<tasks>[1-9][0-9]*)(?:\(x(?P<hosts>[1-9][0-9]*)\))?")


@dataclass(frozen=True)
class Allocation:
    """A job's hosts, in Slurm's order, with as many slots each as Slurm gives it tasks.

    `port` is where ranks meet on the first host. It follows from the job's number, 29500 and up to 999 more, so that
    two jobs which share a host seldom meet.
    """

    job: str
    hosts: tuple[Host, ...]
    cpus_per_task: int | None = None

    @property
    def slots(self) -> int:
        return sum(host.slots for host in self.hosts)

    def check_slots(self, processes: int) -> None:
        """Raise LaunchError for more processes than the job has tasks."""
        if processes > self.slots:
            raise LaunchError(
                f"{processes} processes were asked for, but Slurm's job {self.job} has {self.slots} "
                f"{'task' if self.slots == 1 else 'tasks'}. Use -np {self.slots}, or ask Slurm for more: "
                f"--ntasks {processes}"
            )

    @property
    def port(self) -> int:
        return DEFAULT_PORT + int(self.job) % 1000 if self.job.isdecimal() else DEFAULT_PORT


def allocation(environ: Mapping[str, str] | None = None) -> Allocation | None:
    """Return the allocation, or None outside of one. Asks `scontrol` for the names of the hosts.

    Raises LaunchError for a variable of Slurm's that is missing or cannot be read, and where scontrol does not answer.
    """
    environ = os.environ if environ is None else environ
    job = environ.get("SLURM_JOB_ID")
    if not job:
        return None
    names = _host_names(_needed("SLURM_JOB_NODELIST", job, environ))
    tasks = _tasks_per_host(_needed("SLURM_TASKS_PER_NODE", job, environ))
    if len(names) != len(tasks):
        raise LaunchError(
            f"Slurm's job {job} has {len(names)} hosts by SLURM_JOB_NODELIST={environ['SLURM_JOB_NODELIST']}, but "
            f"{len(tasks)} by SLURM_TASKS_PER_NODE={environ['SLURM_TASKS_PER_NODE']}. Start from a shell that salloc "
            "or sbatch began"
        )
    cpus = environ.get("SLURM_CPUS_PER_TASK", "")
    hosts = tuple(Host(name, slots) for name, slots in zip(names, tasks, strict=True))
    return Allocation(job, hosts, int(cpus) if cpus.isdecimal() and int(cpus) else None)


def allocation_of_several_hosts() -> Allocation | None:
    """Return the allocation where it has several hosts and this process is not one of its tasks, else None."""
    if "SLURM_STEP_ID" in os.environ or os.environ.get("SLURM_JOB_NUM_NODES", "1") == "1":
        return None
    return allocation()


def allocated_hosts(launcher: str) -> tuple[Host, ...]:
    """Return the hosts of the allocation; none outside of one and for a launcher that does not start ranks there."""
    job = None
    if launcher in ("mpirun", "srun"):
        job = allocation()
    elif launcher in ("horovodrun", "torchrun"):
        job = allocation_of_several_hosts()
    return () if job is None else job.hosts


def allocated_slots(launcher: str) -> int | None:
    """Return how many processes the allocation takes, or None outside of one and for a launcher that does not start
    ranks on its hosts."""
    return sum(host.slots for host in allocated_hosts(launcher)) or None


def _needed(name: str, job: str, environ: Mapping[str, str]) -> str:
    value = environ.get(name)
    if not value:
        raise LaunchError(
            f"SLURM_JOB_ID={job} says that this is an allocation of Slurm's, but {name} is not set. "
            "Start from a shell that salloc or sbatch began, or clear what is left over: unset SLURM_JOB_ID"
        )
    return value


def _tasks_per_host(text: str) -> list[int]:
    """Read Slurm's "2(x3),1", which is 2, 2, 2, 1."""
    tasks: list[int] = []
    for part in text.split(","):
        match = _TASKS.fullmatch(part)
        if match is None:
            raise LaunchError(
                f"SLURM_TASKS_PER_NODE must be numbers of tasks as in 2(x3),1, got {text!r}. "
                "Start from a shell that salloc or sbatch began"
            )
        tasks += [int(match["tasks"])] * int(match["hosts"] or 1)
    return tasks


def _host_names(nodes: str) -> list[str]:
    program = shutil.which("scontrol")
    if program is None:
        raise LaunchError(
            f"scontrol, which tells the hosts of {nodes!r}, is not on PATH. It comes with Slurm: start from a host "
            "that has its programs"
        )
    command = [program, "show", "hostnames", nodes]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise LaunchError(f"scontrol did not tell the hosts of {nodes!r} within {_SECONDS} s. Try: sinfo") from None
    if done.returncode or not done.stdout.split():
        raise LaunchError(
            f"scontrol could not tell the hosts of {nodes!r}: {done.stderr.strip() or 'it named none'}. "
            f"Try: scontrol show hostnames {nodes}"
        )
    return done.stdout.split()
