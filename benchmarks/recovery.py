"""Time from SIGKILL of ranks to the next completed step, and the number of repeated steps.

A job runs `recovered_training.py`. On one host, the job has two ranks: rank 1 is killed and, after the job has
recovered, rank 0 is killed. On two hosts (two sets of namespaces on this machine, tests/support/hosts.py; requires
root), the job has one rank on the first host and two ranks on the second host: a rank of the second host, rank 0, and
all ranks of the second host are killed in this order. The measured time ends when all ranks have completed a step. The
restart methods take turns in random order:

    torchrun            torchrun --max-restarts, which restarts the ranks (ddp only)
    horovod elastic     horovodrun --min-np with Horovod's elastic API (horovod on two hosts only). Horovod excludes the
                        host of a killed rank, and the ranks of the other host continue. A job has one kill
    restart             unitrain launch --max-restarts
    standby             the same with --standby
    standby and memory  also with TrainConfig.memory_checkpoint_every_steps=1
"""

from __future__ import annotations

import os
import random
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import click
import torch
from rich.progress import track
from slow_network import Host, hosts
from tables import BACKENDS, RESULTS, save_results

from unitrain.bootstrap import environment
from unitrain.processes import kill_processes

TIMEOUT_SECONDS = 300.0
# Minimum delay of a kill after all ranks have completed more than `steps` steps and any standby ranks are ready; also
# the delay after each recovery.
SETTLE_SECONDS = 2.0
HERE = Path(__file__).parent
SCRIPT, ELASTIC_SCRIPT = HERE / "recovered_training.py", HERE / "horovod_elastic_training.py"
READY = "unitrain: the standby ranks are ready"
PORT = 29600

# The number of ranks on each host, and the kills in order, by the number of hosts.
RANKS = {1: (2,), 2: (1, 2)}
A_RANK, RANK_0, A_HOST = "a rank", "rank 0", "a host's ranks"  # on two hosts, the ranks of the second host
KILLS = {1: (A_RANK, RANK_0), 2: (A_RANK, RANK_0, A_HOST)}


@dataclass(frozen=True)
class RestartMethod:
    """A launcher with options that restarts a job."""

    options: tuple[str, ...] = ()
    in_memory: int = 0
    backends: tuple[str, ...] = BACKENDS
    program: str = "unitrain"
    num_hosts: tuple[int, ...] = (1, 2)
    waiting_ms: float = 0

    @property
    def has_standby(self) -> bool:
        return "--standby" in self.options

    @property
    def allows_several_kills(self) -> bool:
        """Whether a job continues on all hosts after a kill."""
        return self.program != "horovodrun"

    def commands(
        self, ranks_per_host: Sequence[int], backend: str, folder: Path, steps: int, max_restarts: int
    ) -> list[list[str]]:
        """Return the commands to start: one for the first host or, with torchrun, one for each host in order.
        `ranks_per_host` contains the number of ranks on each host."""
        num_hosts, restarts = len(ranks_per_host), ["--max-restarts", str(max_restarts)]
        size = sum(ranks_per_host)
        named = ",".join(f"h{number}:{count}" for number, count in enumerate(ranks_per_host, 1))
        script = [str(SCRIPT), str(folder), str(steps), str(self.in_memory), str(self.waiting_ms)]
        if self.program == "horovodrun":
            start = [str(Path(sys.executable).parent / "horovodrun"), "--gloo", "-np", str(size), "--min-np", "1"]
            script = [sys.executable, str(ELASTIC_SCRIPT), str(folder)]
            return [[*start, "-H", named, "--network-interfaces", "eth0", "--disable-cache", *script]]
        if self.program == "unitrain":
            placed = ["-np", str(size)] if num_hosts == 1 else ["-H", named]
            start = [sys.executable, "-m", "unitrain", "launch", "--backend", backend, *placed, *restarts]
            return [[*start, *self.options, *script]]
        torchrun = [sys.executable, "-m", "torch.distributed.run", *restarts]
        if num_hosts == 1:
            return [[*torchrun, "--standalone", "--nproc-per-node", str(ranks_per_host[0]), *script]]
        joined = ["--nnodes", str(num_hosts), "--rdzv-backend", "c10d", "--rdzv-endpoint", f"h1:{PORT}"]
        return [
            [*torchrun, *joined, "--nproc-per-node", str(count), "--local-addr", f"h{number}", *script]
            for number, count in enumerate(ranks_per_host, 1)
        ]


RESTART_METHODS = {
    "torchrun": RestartMethod(backends=("ddp",), program="torchrun"),
    "horovod elastic": RestartMethod(backends=("horovod",), program="horovodrun", num_hosts=(2,)),
    "restart": RestartMethod(),
    "standby": RestartMethod(("--standby",)),
    "standby and memory": RestartMethod(("--standby",), in_memory=1),
}
Row = tuple[int, str, str]  # number of hosts, backend, restart method


class Recovery(NamedTuple):
    """The killed ranks (a value in KILLS), the time until the next step, and the number of completed steps that were
    repeated."""

    kill: str
    seconds: float
    lost_steps: int


class Step(NamedTuple):
    """A completed step of a rank, with the host, the process and its attempt. Horovod's elastic driver may place rank 0
    on any host."""

    step: int
    host: str
    pid: int
    attempt: int
    time: float
    size: int

    @property
    def process(self) -> tuple[str, int, int]:
        return self.host, self.pid, self.attempt


def completed_steps(folder: Path, rank: int) -> list[Step]:
    """Return the completed steps of a rank. An incomplete line that is being written is ignored."""
    file = folder / f"steps-{rank}.txt"
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    return [
        Step(int(step), host, int(pid), int(attempt), float(at), int(size))
        for step, host, pid, attempt, at, size in map(str.split, lines)
    ]


class Job:
    """A job on `hosts`, or on this machine if `hosts` is empty. The processes are killed at the end."""

    def __init__(
        self,
        method: RestartMethod,
        backend: str,
        hosts: Sequence[Host],
        folder: Path,
        steps: int,
        *,
        ranks_per_host: Sequence[int] | None = None,
        max_restarts: int | None = None,
    ) -> None:
        num_hosts = len(hosts) or 1
        ranks_per_host = ranks_per_host or RANKS[num_hosts]
        max_restarts = len(KILLS[num_hosts]) if max_restarts is None else max_restarts
        self.folder, self._hosts, self.size = folder, hosts, sum(ranks_per_host)
        self._log = folder / "output.txt"
        name, value = "UNITRAIN_BENCHMARK", secrets.token_hex(8)
        self._tag = f"{name}={value}".encode()
        variables = environment.without_launcher_variables() | {name: value, "OMP_NUM_THREADS": "1"}
        # Otherwise, ranks that torchrun restarts read the addresses of killed ranks (pytorch#135712).
        variables |= {"UNITRAIN_BACKEND": backend, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        self._processes: list[subprocess.Popen[bytes]] = []
        with self._log.open("wb") as output:
            for number, command in enumerate(method.commands(ranks_per_host, backend, folder, steps, max_restarts)):
                line = hosts[number].command(command) if hosts else command
                options = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
                self._processes.append(subprocess.Popen(line, env=variables, start_new_session=True, **options))  # type: ignore[call-overload]

    def output(self) -> str:
        return self._log.read_text(errors="replace")

    def end(self) -> None:
        for process in self._processes:
            kill_processes(process, self._tag)
        for host in self._hosts:
            host.kill_all()

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition()` is true. Raise RuntimeError if the job exits first, or after a timeout."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not condition():
            code = self._processes[0].poll()
            if code is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the job does not continue; exit code: {code}")
            time.sleep(0.01)

    def kill(self, target: str) -> Recovery:
        """Kill the ranks `target`, a value in KILLS, and wait until the job has recovered."""
        before = [completed_steps(self.folder, rank) for rank in range(self.size)]
        processes = {step.process for steps in before for step in steps}
        pids = [
            self._pid(before[rank][-1]) for rank in self._select_ranks(target, [steps[-1].host for steps in before])
        ]
        killed_at = time.monotonic()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

        def new_steps() -> list[Step]:
            """Return the first new step of each rank if all ranks have completed a new step."""
            found = [
                [step for step in completed_steps(self.folder, rank) if step.process not in processes]
                for rank in range(self.size)
            ]
            sizes = {steps[0].size for steps in found if steps}
            first = [steps[0] for steps in found if steps]
            return first if sizes == {len(first)} else []

        self.wait_until(lambda: bool(new_steps()))
        first = new_steps()
        done = min(
            max(step.step for step in completed_steps(self.folder, rank) if step.process in processes)
            for rank in range(self.size)
        )  # steps that all ranks had completed before the failure
        return Recovery(target, max(step.time for step in first) - killed_at, done + 1 - first[0].step)

    def _select_ranks(self, target: str, host_names: Sequence[str]) -> list[int]:
        """Return the ranks to kill, given the host name of each rank."""
        if target == RANK_0:
            return [0]
        on_last = [rank for rank, name in enumerate(host_names) if not self._hosts or name == self._hosts[-1].name]
        return on_last if target == A_HOST else on_last[-1:]

    def _pid(self, step: Step) -> int:
        """Return the process ID of a rank on this machine."""
        if not self._hosts:
            return step.pid
        (host,) = [host for host in self._hosts if host.name == step.host]
        for pid in host.find_processes():
            status = Path(f"/proc/{pid}/status").read_text()
            (ids,) = [line.split()[1:] for line in status.splitlines() if line.startswith("NSpid:")]
            if int(ids[-1]) == step.pid:
                return pid
        raise RuntimeError(f"process {step.pid} on {step.host} has exited")


def run_job(
    method: RestartMethod, backend: str, hosts: Sequence[Host], kills: Sequence[str], steps: int
) -> tuple[list[Recovery], float]:
    """Run a job and kill its ranks. Return the recoveries and the median time of a step."""
    with tempfile.TemporaryDirectory() as temporary:
        job = Job(method, backend, hosts, Path(temporary), steps)
        try:
            recoveries: list[Recovery] = []
            for kill in kills:
                num_ready = len(recoveries) + 1
                job.wait_until(lambda: all(len(completed_steps(job.folder, rank)) > steps for rank in range(job.size)))
                if method.has_standby:
                    job.wait_until(lambda num_ready=num_ready: job.output().count(READY) == num_ready)  # type: ignore[misc]
                time.sleep(SETTLE_SECONDS + random.random())
                recoveries.append(job.kill(kill))
                time.sleep(SETTLE_SECONDS)
            times = [step.time for step in completed_steps(job.folder, 0)]
            intervals = [later - earlier for earlier, later in pairwise(times)]
        except RuntimeError:
            click.echo(job.output(), err=True)
            raise
        finally:
            job.end()
    return recoveries, statistics.median(intervals)


def run_jobs(row: Row, steps: int) -> tuple[list[Recovery], float]:
    """Run one job, or one job per kill. Return the recoveries and the median time of a step."""
    num_hosts, backend, name = row
    method, kills = RESTART_METHODS[name], KILLS[num_hosts]
    found, seconds = list[Recovery](), list[float]()
    with started_hosts(num_hosts) as hosts:
        for group in [kills] if method.allows_several_kills else [(kill,) for kill in kills]:
            recoveries, step_seconds = run_job(method, backend, hosts, group, steps)
            found += recoveries
            seconds.append(step_seconds)
    return found, statistics.median(seconds)


@contextmanager
def started_hosts(num_hosts: int) -> Iterator[Sequence[Host]]:
    """Context manager that starts the hosts if there is more than one."""
    with ExitStack() as cleanup:
        if num_hosts == 1:
            yield ()
        else:
            folder = Path(cleanup.enter_context(tempfile.TemporaryDirectory()))
            yield cleanup.enter_context(hosts(num_hosts, folder))


def cell(values: list[float], unit: str, digits: int) -> str:
    """Return the median with the minimum and the maximum."""
    if not values:
        return ""
    return f"**{statistics.median(values):.{digits}f}**{unit} [{min(values):.{digits}f}, {max(values):.{digits}f}]"


def table(
    recoveries: dict[Row, list[Recovery]], step_seconds: dict[Row, list[float]], rounds: int, steps: int
) -> list[str]:
    """Return the lines of the table, with one row per number of hosts, backend and restart method."""
    lines = [
        "# Recovery from a killed rank",
        "",
        f"One thread per rank and no GPU; a model of 1 million parameters, AdamW; torch {torch.__version__}, "
        f"{os.cpu_count()} CPU cores. Two ranks on one host, or one rank on the first of two hosts and two on the "
        f"second; both hosts are on this machine. A checkpoint on disk every {steps} steps. The time from SIGKILL "
        "until all ranks have completed a step, and the number of completed steps that are repeated. In each job, one "
        "rank other than rank 0, rank 0 and, on two hosts, all ranks of the second host are killed in this order; "
        f"{rounds} jobs per row, which alternate in random order. Horovod's elastic driver continues without the host "
        "of the killed rank, on the processes that remain; on one host, it ends the job. Medians; in brackets the "
        f"minimum and the maximum. Command: `python benchmarks/recovery.py --rounds {rounds} --steps {steps}`.",
        "",
        "| hosts | backend | restart | a rank killed | rank 0 killed | a host's ranks killed | steps lost | step time "
        "|",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row, found in recoveries.items():
        num_hosts, backend, method = row
        by_kill = [cell([one.seconds for one in found if one.kill == kill], " s", 1) for kill in KILLS[2]]
        lost = cell([float(one.lost_steps) for one in found], "", 0)
        times = cell([1000 * seconds for seconds in step_seconds[row]], " ms", 1)
        lines.append(f"| {num_hosts} | {backend} | {method} | {' | '.join(by_kill)} | {lost} | {times} |")
    return lines


@click.command()
@click.option(
    "--hosts", "host_counts", type=click.Choice(["1", "2"]), multiple=True, default=["1", "2"], help="Number of hosts."
)
@click.option("--backend", "backends", type=click.Choice(BACKENDS), multiple=True, default=BACKENDS)
@click.option(
    "--method", "methods", type=click.Choice(list(RESTART_METHODS)), multiple=True, default=list(RESTART_METHODS)
)
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True)
@click.option(
    "--steps", type=click.IntRange(min=1), default=50, show_default=True, help="Steps per checkpoint on disk."
)
@click.option("--output", type=click.Path(path_type=Path), default=RESULTS, show_default=True)
def main(
    host_counts: tuple[str, ...],
    backends: tuple[str, ...],
    methods: tuple[str, ...],
    rounds: int,
    steps: int,
    output: Path,
) -> None:
    """Measure recoveries and write the table."""
    rows = [
        (num_hosts, backend, method)
        for num_hosts in map(int, host_counts)
        for backend in backends
        for method in methods
        if backend in RESTART_METHODS[method].backends and num_hosts in RESTART_METHODS[method].num_hosts
    ]
    recoveries: dict[Row, list[Recovery]] = {row: [] for row in rows}
    step_seconds: dict[Row, list[float]] = {row: [] for row in rows}
    shuffled = random.Random(0)
    for _ in track(range(rounds), "rounds"):
        for row in shuffled.sample(rows, len(rows)):
            found, seconds = run_jobs(row, steps)
            recoveries[row] += found
            step_seconds[row].append(seconds)
            click.echo(f"{row}: {found}, {1000 * seconds:.1f} ms per step", err=True)
    lines = table(recoveries, step_seconds, rounds, steps)
    figures = [
        {"hosts": row[0], "backend": row[1], "method": row[2], "recoveries": found, "step_seconds": step_seconds[row]}
        for row, found in recoveries.items()
    ]
    save_results(lines, "recovery", output, recoveries=figures)


if __name__ == "__main__":
    main()
