"""The Slurm allocation that this process is in: its hosts, and how many processes each takes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, replace

from unitrain.launchers.addresses import DEFAULT_PORT
from unitrain.launchers.errors import LaunchError
from unitrain.launchers.hosts import Host, is_here

_SECONDS = 30
_TASKS = re.compile(r"(?P<tasks>[1-9][0-9]*)(?:\(x(?P<hosts>[1-9][0-9]*)\))?")
_DESCRIBED = re.compile(r"(NumTasks|CPUs/Task|NtasksPerN:B:S:C)=([0-9]+)")


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
    told = _needed("SLURM_TASKS_PER_NODE", job, environ)
    tasks = _numbers_per_host("SLURM_TASKS_PER_NODE", told)
    if told == environ.get("SLURM_STEP_TASKS_PER_NODE"):
        # In a step, as in the shell of `srun --pty`, it counts the tasks of the step.
        tasks = _tasks_of_job(job, len(names), environ) or tasks
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
    """Return the allocation if it has several hosts, else None; also None in a task of a step with several tasks.

    In a step the host of this process is the first.
    """
    if is_one_of_several_tasks() or os.environ.get("SLURM_JOB_NUM_NODES", "1") == "1":
        return None
    job = allocation()
    if job is not None and "SLURM_STEP_ID" in os.environ:
        own = os.environ.get("SLURMD_NODENAME")
        job = replace(job, hosts=tuple(sorted(job.hosts, key=lambda host: host.name != own)))
    return job


def is_one_of_several_tasks() -> bool:
    """Return whether srun has started this command in each of several tasks.

    False in the shell of `srun --pty`, which is the first task: the others have no terminal, and end at once.
    """
    if os.environ.get("SLURM_STEP_NUM_TASKS", "1") == "1" or "SLURM_STEP_ID" not in os.environ:
        return False
    # The variable alone may come from such a shell, in which somebody has typed srun again.
    return "SLURM_PTY_PORT" not in os.environ or not _has_terminal()


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


def mpirun_variables(hosts: tuple[Host, ...], job: Allocation | None = None) -> dict[str, str]:
    """Return the variables with which Open MPI's mpirun starts ranks on `hosts` in an allocation.

    Hosts that are all this one are not those of the allocation, which may have fewer tasks here. If they are those of
    the allocation `job`, mpirun is given what it reads in a step as it is outside of one: there the variable counts
    the tasks of the step, whose cores are otherwise its own.
    """
    if job is not None and "SLURM_STEP_ID" in os.environ:
        return {"SLURM_TASKS_PER_NODE": ",".join(str(host.slots) for host in job.hosts), "SLURM_OVERLAP": "1"}
    if job is None and "SLURM_JOB_ID" in os.environ and hosts and all(map(is_here, hosts)):
        return {"OMPI_MCA_ras": "^slurm"}
    return {}


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


def _numbers_per_host(name: str, text: str) -> list[int]:
    """Return the numbers in the variable `name`: Slurm's "2(x3),1" is 2, 2, 2, 1. Raises LaunchError."""
    numbers: list[int] = []
    for part in text.split(","):
        match = _TASKS.fullmatch(part)
        if match is None:
            raise LaunchError(
                f"{name} must be numbers of tasks as in 2(x3),1, got {text!r}. "
                "Start from a shell that salloc or sbatch began"
            )
        numbers += [int(match["tasks"])] * int(match["hosts"] or 1)
    return numbers


def _tasks_of_job(job: str, hosts: int, environ: Mapping[str, str]) -> list[int]:
    """Return how many tasks each of the job's hosts takes, as `scontrol show job` describes it; none if it does not."""
    described = _scontrol(["show", "job", "--oneliner", job], f"describe job {job}")
    number = {name: int(value) for name, value in _DESCRIBED.findall(described)}
    total = number.get("NumTasks", 0)
    if not total:
        return []
    if per_host := number.get("NtasksPerN:B:S:C", 0):
        limits = [per_host] * hosts
    else:
        cpus = environ.get("SLURM_JOB_CPUS_PER_NODE", "")
        per_task = number.get("CPUs/Task", 1)
        limits = [one // per_task for one in _numbers_per_host("SLURM_JOB_CPUS_PER_NODE", cpus)] if cpus else []
    if len(limits) != hosts or sum(limits) < total:
        limits = [total] * hosts
    tasks = [0] * hosts
    while total:  # evenly, as far as the hosts have room
        for host in range(hosts):
            if total and tasks[host] < limits[host]:
                tasks[host] += 1
                total -= 1
    return tasks


def _host_names(nodes: str) -> list[str]:
    return _scontrol(["show", "hostnames", nodes], f"tell the hosts of {nodes!r}").split()


def _scontrol(words: list[str], task: str) -> str:
    """Return what `scontrol` with these words prints. Raises LaunchError, which says that it cannot do its `task`."""
    program = shutil.which("scontrol")
    if program is None:
        raise LaunchError(
            f"scontrol, which is to {task}, is not on PATH. It comes with Slurm: start from a host that has its "
            "programs"
        )
    try:
        done = subprocess.run([program, *words], capture_output=True, text=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise LaunchError(f"scontrol did not {task} within {_SECONDS} s. Try: sinfo") from None
    if done.returncode or not done.stdout.split():
        raise LaunchError(
            f"scontrol could not {task}: {done.stderr.strip() or 'it printed nothing'}. Try: scontrol {' '.join(words)}"
        )
    return done.stdout
