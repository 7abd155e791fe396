"""The Slurm allocation of this process: its hosts and the number of tasks per host."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, replace

from unitrain.launchers.errors import LaunchError
from unitrain.launchers.hosts import Host, is_this_host
from unitrain.launchers.rendezvous import DEFAULT_PORT

_SCONTROL_TIMEOUT_SECONDS = 30
_COUNT_PER_HOST = re.compile(r"(?P<tasks>[1-9][0-9]*)(?:\(x(?P<hosts>[1-9][0-9]*)\))?")
_DESCRIPTION_FIELD = re.compile(r"(NumTasks|CPUs/Task|NtasksPerN:B:S:C)=([0-9]+)")


@dataclass(frozen=True)
class Allocation:
    """The hosts of a job in Slurm's order. The number of slots of a host is its number of tasks."""

    job_id: str
    hosts: tuple[Host, ...]
    cpus_per_task: int | None = None

    @property
    def slots(self) -> int:
        """The total number of tasks."""
        return sum(host.slots for host in self.hosts)

    @property
    def port(self) -> int:
        """The rendezvous port, 29500 to 30499. It depends on the job ID, so jobs on the same host rarely collide."""
        return DEFAULT_PORT + int(self.job_id) % 1000 if self.job_id.isdecimal() else DEFAULT_PORT

    def check_slots(self, num_processes: int) -> None:
        """Raise LaunchError for more processes than tasks."""
        if num_processes > self.slots:
            raise LaunchError(
                f"-np requests {num_processes} processes, but Slurm job {self.job_id} has {self.slots} "
                f"{'task' if self.slots == 1 else 'tasks'}. Use -np {self.slots}, or request more from Slurm: "
                f"--ntasks {num_processes}"
            )


def read_allocation(environ: Mapping[str, str] | None = None) -> Allocation | None:
    """Return the current allocation, or None outside an allocation. Calls `scontrol` to get the host names.

    Raises LaunchError for a Slurm variable that is missing or invalid, and if scontrol fails.
    """
    environ = os.environ if environ is None else environ
    job_id = environ.get("SLURM_JOB_ID")
    if not job_id:
        return None
    names = _expand_host_names(_require_variable("SLURM_JOB_NODELIST", job_id, environ))
    tasks_text = _require_variable("SLURM_TASKS_PER_NODE", job_id, environ)
    tasks = _parse_numbers_per_host("SLURM_TASKS_PER_NODE", tasks_text)
    if tasks_text == environ.get("SLURM_STEP_TASKS_PER_NODE"):
        # In a step, such as the shell of `srun --pty`, the variable counts the tasks of the step.
        tasks = _query_tasks_per_host(job_id, len(names), environ) or tasks
    if len(names) != len(tasks):
        raise LaunchError(
            f"Slurm job {job_id} has {len(names)} hosts according to SLURM_JOB_NODELIST="
            f"{environ['SLURM_JOB_NODELIST']}, but {len(tasks)} according to SLURM_TASKS_PER_NODE="
            f"{environ['SLURM_TASKS_PER_NODE']}. Start from a shell that salloc or sbatch started"
        )
    cpus = environ.get("SLURM_CPUS_PER_TASK", "")
    hosts = tuple(Host(name, slots) for name, slots in zip(names, tasks, strict=True))
    return Allocation(job_id, hosts, int(cpus) if cpus.isdecimal() and int(cpus) else None)


def read_multi_host_allocation() -> Allocation | None:
    """Return the allocation if it has several hosts, otherwise None.

    Also return None if this process is one of several tasks that srun has started. In a step, the host of this process
    comes first.
    """
    if is_one_of_several_tasks() or os.environ.get("SLURM_JOB_NUM_NODES", "1") == "1":
        return None
    job = read_allocation()
    if job is not None and "SLURM_STEP_ID" in os.environ:
        this_host = os.environ.get("SLURMD_NODENAME")
        job = replace(job, hosts=tuple(sorted(job.hosts, key=lambda host: host.name != this_host)))
    return job


def allocated_hosts(launcher: str) -> tuple[Host, ...]:
    """Return the hosts of the allocation on which `launcher` starts ranks; empty outside an allocation.

    mpirun and srun always use the allocation, horovodrun and torchrun only if it has several hosts. Other launchers do
    not use it.
    """
    job = None
    if launcher in ("mpirun", "srun"):
        job = read_allocation()
    elif launcher in ("horovodrun", "torchrun"):
        job = read_multi_host_allocation()
    return () if job is None else job.hosts


def allocated_slots(launcher: str) -> int | None:
    """Return the number of tasks on `allocated_hosts(launcher)`, or None if there are no such hosts."""
    return sum(host.slots for host in allocated_hosts(launcher)) or None


def is_one_of_several_tasks() -> bool:
    """Return whether srun has started this command in several tasks.

    The result is False in the shell of `srun --pty`, which is the first task; the other tasks have no terminal and exit
    immediately.
    """
    if os.environ.get("SLURM_STEP_NUM_TASKS", "1") == "1" or "SLURM_STEP_ID" not in os.environ:
        return False
    # The variable alone is not sufficient: another srun that is started in such a shell inherits it.
    return "SLURM_PTY_PORT" not in os.environ or not _has_terminal()


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


def mpirun_variables(hosts: tuple[Host, ...], job_allocation: Allocation | None = None) -> dict[str, str]:
    """Return the variables that Open MPI's mpirun needs in an allocation to start ranks on `hosts`.

    If all ranks run on this host, mpirun must not read the allocation, which may have fewer tasks here. If `hosts` are
    the hosts of `job_allocation` and this process runs in a step, SLURM_TASKS_PER_NODE is reset to the job's value,
    because in a step it counts the step's tasks. SLURM_OVERLAP lets the new step share the cores that this step holds.
    """
    if job_allocation is not None and "SLURM_STEP_ID" in os.environ:
        return {
            "SLURM_TASKS_PER_NODE": ",".join(str(host.slots) for host in job_allocation.hosts),
            "SLURM_OVERLAP": "1",
        }
    if job_allocation is None and "SLURM_JOB_ID" in os.environ and hosts and all(map(is_this_host, hosts)):
        return {"OMPI_MCA_ras": "^slurm"}
    return {}


def _require_variable(name: str, job_id: str, environ: Mapping[str, str]) -> str:
    value = environ.get(name)
    if not value:
        raise LaunchError(
            f"SLURM_JOB_ID={job_id} indicates a Slurm allocation, but {name} is not set. "
            "Start from a shell that salloc or sbatch started, or clear the leftover variable: unset SLURM_JOB_ID"
        )
    return value


def _parse_numbers_per_host(name: str, text: str) -> list[int]:
    """Return the number for each host in the value `text` of the variable `name`. Raises LaunchError.

    The value "2(x3),1" contains the numbers 2, 2, 2, 1.
    """
    counts: list[int] = []
    for part in text.split(","):
        match = _COUNT_PER_HOST.fullmatch(part)
        if match is None:
            raise LaunchError(
                f'{name} must list counts per host, such as "2(x3),1", but is {text!r}. '
                "Start from a shell that salloc or sbatch started"
            )
        counts += [int(match["tasks"])] * int(match["hosts"] or 1)
    return counts


def _query_tasks_per_host(job_id: str, num_hosts: int, environ: Mapping[str, str]) -> list[int]:
    """Return the job's number of tasks per host, or an empty list if `scontrol show job` prints no number of tasks."""
    description = _run_scontrol(["show", "job", "--oneliner", job_id], f"describe job {job_id}")
    fields = {name: int(value) for name, value in _DESCRIPTION_FIELD.findall(description)}
    total = fields.get("NumTasks", 0)
    if not total:
        return []
    if per_host := fields.get("NtasksPerN:B:S:C", 0):
        limits = [per_host] * num_hosts
    else:
        cpus = environ.get("SLURM_JOB_CPUS_PER_NODE", "")
        per_task = fields.get("CPUs/Task", 1)
        limits = (
            [count // per_task for count in _parse_numbers_per_host("SLURM_JOB_CPUS_PER_NODE", cpus)] if cpus else []
        )
    if len(limits) != num_hosts or sum(limits) < total:
        limits = [total] * num_hosts
    tasks = [0] * num_hosts
    while total:  # evenly, within the limits
        for host in range(num_hosts):
            if total and tasks[host] < limits[host]:
                tasks[host] += 1
                total -= 1
    return tasks


def _expand_host_names(nodelist: str) -> list[str]:
    return _run_scontrol(["show", "hostnames", nodelist], f"list the hosts of {nodelist!r}").split()


def _run_scontrol(arguments: list[str], action: str) -> str:
    """Return the output of `scontrol` with these arguments. Raises LaunchError, whose message names the `action`."""
    program = shutil.which("scontrol")
    if program is None:
        raise LaunchError(
            f"scontrol, which is needed to {action}, is not on PATH. It is part of Slurm: run the command on a host "
            "that has Slurm's programs"
        )
    try:
        process = subprocess.run(
            [program, *arguments], capture_output=True, text=True, timeout=_SCONTROL_TIMEOUT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise LaunchError(f"scontrol did not {action} within {_SCONTROL_TIMEOUT_SECONDS} s. Try: sinfo") from None
    if process.returncode or not process.stdout.split():
        raise LaunchError(
            f"scontrol could not {action}: {process.stderr.strip() or 'it printed nothing'}. "
            f"Try: scontrol {' '.join(arguments)}"
        )
    return process.stdout
