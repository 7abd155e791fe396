"""Time from SIGKILL of a rank to the next completed step, and the number of steps that are repeated.

A job of two ranks on one host trains `recovered_training.py`. Rank 1 is killed, and after the job has recovered, rank 0
is killed. The time ends when all ranks have completed a step. The ways of restarting take turns in random order:

    torchrun            torchrun --max-restarts, which restarts the ranks (ddp only)
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
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import click
import torch
from rich.progress import track
from tables import BACKENDS, RESULTS, save_results

from unitrain.bootstrap import environment
from unitrain.processes import kill_processes

RANKS, MAX_RESTARTS = 2, 2
TIMEOUT_SECONDS = 300.0
# A job is killed this long after its ranks have completed a step, or after its standby ranks are ready.
SETTLE_SECONDS = 2.0
SCRIPT = Path(__file__).with_name("recovered_training.py")
READY = "unitrain: the standby ranks are ready"


@dataclass(frozen=True)
class Way:
    """A way of restarting a job."""

    options: tuple[str, ...]
    in_memory: int = 0
    backends: tuple[str, ...] = BACKENDS
    is_torchrun: bool = False

    @property
    def has_standby(self) -> bool:
        return "--standby" in self.options

    def command(self, backend: str, folder: Path, steps: int) -> list[str]:
        script = [str(SCRIPT), str(folder), str(steps), str(self.in_memory)]
        if self.is_torchrun:
            return [sys.executable, "-m", "torch.distributed.run", *self.options, *script]
        return [sys.executable, "-m", "unitrain", "launch", "--backend", backend, *self.options, *script]


RESTARTS = ("-np", str(RANKS), "--max-restarts", str(MAX_RESTARTS))
WAYS = {
    "torchrun": Way(
        ("--standalone", "--nproc-per-node", str(RANKS), "--max-restarts", str(MAX_RESTARTS)),
        backends=("ddp",),
        is_torchrun=True,
    ),
    "restart": Way(RESTARTS),
    "standby": Way((*RESTARTS, "--standby")),
    "standby and memory": Way((*RESTARTS, "--standby"), in_memory=1),
}


class Recovery(NamedTuple):
    """One kill: the killed rank, the time to the next step, and the number of completed steps that were repeated."""

    rank: int
    seconds: float
    lost_steps: int


class Step(NamedTuple):
    """A completed step of a rank."""

    step: int
    pid: int
    time: float


def completed(folder: Path, rank: int) -> list[Step]:
    """Return the completed steps of a rank, without a line that is being written."""
    file = folder / f"steps-{rank}.txt"
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    return [Step(int(step), int(pid), float(at)) for step, pid, at in map(str.split, lines)]


def wait_until(happens: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    """Wait until a condition holds. Raises RuntimeError if the job exits before, or after a timeout."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not happens():
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the job does not continue; exit code: {process.poll()}")
        time.sleep(0.01)


def kill_rank(folder: Path, rank: int, process: subprocess.Popen[bytes]) -> Recovery:
    """Kill a rank, and wait until the job has recovered."""
    before = [completed(folder, number) for number in range(RANKS)]
    pids = {step.pid for steps in before for step in steps}
    killed_at = time.monotonic()
    os.kill(before[rank][-1].pid, signal.SIGKILL)

    def new_steps() -> list[list[Step]]:
        return [[step for step in completed(folder, number) if step.pid not in pids] for number in range(RANKS)]

    wait_until(lambda: all(new_steps()), process)
    first = [steps[0] for steps in new_steps()]
    done = min(
        max(step.step for step in completed(folder, number) if step.pid in pids) for number in range(RANKS)
    )  # completed by all ranks when the job failed
    return Recovery(rank, max(step.time for step in first) - killed_at, done + 1 - first[0].step)


def run_job(way: Way, backend: str, steps: int) -> tuple[list[Recovery], float]:
    """Run a job and kill its ranks. Return the recoveries, and the median time of a step."""
    name, value = "UNITRAIN_BENCHMARK", secrets.token_hex(8)
    with tempfile.TemporaryDirectory() as temporary:
        folder, log = Path(temporary), Path(temporary) / "output.txt"
        variables = environment.without_launcher_variables() | {name: value, "OMP_NUM_THREADS": "1"}
        with log.open("wb") as output:
            process = subprocess.Popen(
                way.command(backend, folder, steps),
                env=variables | {"UNITRAIN_BACKEND": backend},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            recoveries: list[Recovery] = []
            for rank in (1, 0):
                number = len(recoveries) + 1
                wait_until(lambda: all(len(completed(folder, one)) > steps for one in range(RANKS)), process)
                if way.has_standby:
                    wait_until(lambda number=number: log.read_text().count(READY) == number, process)  # type: ignore[misc]
                time.sleep(SETTLE_SECONDS + random.random())
                recoveries.append(kill_rank(folder, rank, process))
                time.sleep(SETTLE_SECONDS)
            times = [step.time for step in completed(folder, 0)]
            intervals = [later - earlier for earlier, later in pairwise(times)]
        except RuntimeError:
            click.echo(log.read_text(), err=True)
            raise
        finally:
            kill_processes(process, f"{name}={value}".encode())
    return recoveries, statistics.median(intervals)


def cell(values: list[float], unit: str, digits: int) -> str:
    """Return the median with the minimum and the maximum."""
    return f"**{statistics.median(values):.{digits}f}**{unit} [{min(values):.{digits}f}, {max(values):.{digits}f}]"


def table(
    recoveries: dict[tuple[str, str], list[Recovery]],
    step_seconds: dict[tuple[str, str], list[float]],
    rounds: int,
    steps: int,
) -> list[str]:
    """Return the lines of the table, with one row per backend and way."""
    lines = [
        "# Recovery from a killed rank",
        "",
        f"{RANKS} ranks on one host, with one thread each and without a GPU; a model of 1 million parameters, AdamW; "
        f"torch {torch.__version__}, {os.cpu_count()} CPU cores. A checkpoint on disk every {steps} steps. The time "
        "from SIGKILL of a rank until all ranks have completed a step, and the number of completed steps that are "
        f"repeated. In each job, rank 1 and then rank 0 is killed; {rounds} jobs per row, which alternate in random "
        "order. Medians; in brackets the minimum and the maximum. Command: "
        f"`python benchmarks/recovery.py --rounds {rounds} --steps {steps}`.",
        "",
        "| backend | restart | rank 1 killed | rank 0 killed | steps lost | step time |",
        "|---|---|---|---|---|---|",
    ]
    for (backend, way), found in recoveries.items():
        by_rank = [cell([one.seconds for one in found if one.rank == rank], " s", 1) for rank in (1, 0)]
        lost = cell([float(one.lost_steps) for one in found], "", 0)
        times = cell([1000 * seconds for seconds in step_seconds[backend, way]], " ms", 1)
        lines.append(f"| {backend} | {way} | {by_rank[0]} | {by_rank[1]} | {lost} | {times} |")
    return lines


@click.command()
@click.option("--backend", "backends", type=click.Choice(BACKENDS), multiple=True, default=BACKENDS)
@click.option("--way", "ways", type=click.Choice(list(WAYS)), multiple=True, default=list(WAYS))
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True)
@click.option(
    "--steps", type=click.IntRange(min=1), default=50, show_default=True, help="Steps per checkpoint on disk."
)
@click.option("--output", type=click.Path(path_type=Path), default=RESULTS, show_default=True)
def main(backends: tuple[str, ...], ways: tuple[str, ...], rounds: int, steps: int, output: Path) -> None:
    """Measure recoveries and write the table."""
    pairs = [(backend, way) for backend in backends for way in ways if backend in WAYS[way].backends]
    recoveries: dict[tuple[str, str], list[Recovery]] = {pair: [] for pair in pairs}
    step_seconds: dict[tuple[str, str], list[float]] = {pair: [] for pair in pairs}
    shuffled = random.Random(0)
    for _ in track(range(rounds), "rounds"):
        for pair in shuffled.sample(pairs, len(pairs)):
            found, seconds = run_job(WAYS[pair[1]], pair[0], steps)
            recoveries[pair] += found
            step_seconds[pair].append(seconds)
            click.echo(f"{pair}: {found}, {1000 * seconds:.1f} ms per step", err=True)
    lines = table(recoveries, step_seconds, rounds, steps)
    figures = [
        {"backend": backend, "way": way, "recoveries": found, "step_seconds": step_seconds[backend, way]}
        for (backend, way), found in recoveries.items()
    ]
    save_results(lines, "recovery", output, recoveries=figures)


if __name__ == "__main__":
    main()
