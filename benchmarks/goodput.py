"""Goodput of a job on two hosts, in which one rank is killed per minute.

A job runs `recovered_training.py` with one rank on each of two hosts, first without faults. The hosts are two sets of
namespaces on this machine (tests/support/hosts.py; requires root). Then the job is repeated, and every minute, one rank
is killed: rank 1 and rank 0 alternately. The goodput is the number of distinct steps per second that all ranks have
completed, relative to the job without faults. Repeated steps count once. The restart methods:

    torchrun   torchrun --max-restarts, with a checkpoint per epoch (ddp only)
    restart    unitrain launch --max-restarts, with a checkpoint per epoch
    standby    unitrain launch --max-restarts --standby, with a checkpoint in memory every few steps

Each rank fully uses one core of this machine. On a machine with accelerators, the cores are idle during a part of each
step. Standby ranks can start and checkpoints can be written during this time. To simulate this, `--waiting-ms` makes
each step wait for a number of milliseconds.

    python benchmarks/goodput.py
    python benchmarks/goodput.py --waiting-ms 100 --in-memory 5

Each command writes benchmarks/results/goodput.md and .json, and keeps the results of earlier commands.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

import click
import torch
from recovered_training import BATCH, SAMPLES
from recovery import A_RANK, RANK_0, Job, Recovery, RestartMethod, completed_steps, started_hosts
from slow_network import Host
from tables import BACKENDS, RESULTS, save_results

RANKS = (1, 1)
STEPS_PER_EPOCH = SAMPLES // (BATCH * sum(RANKS))
FAULT_SECONDS = 60.0


class Goodput(NamedTuple):
    """Distinct steps per second that all ranks have completed, without and with faults, and the recoveries."""

    undisturbed: float
    disturbed: float
    recoveries: list[Recovery]

    @property
    def ratio(self) -> float:
        return self.disturbed / self.undisturbed


def restart_methods(in_memory: int, waiting_ms: float) -> dict[str, RestartMethod]:
    """Return the restart methods by name. With "standby", every `in_memory`-th step is saved in memory."""
    return {
        "torchrun": RestartMethod(backends=("ddp",), program="torchrun", waiting_ms=waiting_ms),
        "restart": RestartMethod(waiting_ms=waiting_ms),
        "standby": RestartMethod(("--standby",), in_memory=in_memory, waiting_ms=waiting_ms),
    }


def steps_per_second(job: Job, began: float) -> float:
    """Return the number of distinct steps per second that all ranks have completed since the monotonic time
    `began`."""
    numbers = [
        {step.step for step in completed_steps(job.folder, rank) if step.time > began} for rank in range(job.size)
    ]
    return min(map(len, numbers)) / (time.monotonic() - began)


def run(
    method: RestartMethod, backend: str, hosts: list[Host], seconds: float, *, has_faults: bool
) -> tuple[float, list[Recovery]]:
    """Train for `seconds` after the first steps. Return the steps per second, and the recoveries from all faults."""
    recoveries: list[Recovery] = []
    with tempfile.TemporaryDirectory() as temporary:
        max_restarts = int(seconds / FAULT_SECONDS) + 1
        job = Job(method, backend, hosts, Path(temporary), 0, ranks_per_host=RANKS, max_restarts=max_restarts)
        try:
            job.wait_until(lambda: all(len(completed_steps(job.folder, rank)) > 20 for rank in range(job.size)))
            began = time.monotonic()
            kills = cycle([A_RANK, RANK_0])
            fault_time = began + FAULT_SECONDS / 2
            while has_faults and fault_time < began + seconds:
                time.sleep(max(0.0, fault_time - time.monotonic()))
                recoveries.append(job.kill(next(kills)))
                fault_time += FAULT_SECONDS
            time.sleep(max(0.0, began + seconds - time.monotonic()))
            return steps_per_second(job, began), recoveries
        except RuntimeError:
            click.echo(job.output(), err=True)
            raise
        finally:
            job.end()


def row(first_cells: str, goodputs: list[Goodput]) -> str:
    """Return a line of the table that begins with `first_cells`, see `row_name`."""
    recoveries = [recovery for goodput in goodputs for recovery in goodput.recoveries]
    times = [recovery.seconds for recovery in recoveries]
    lost = [recovery.lost_steps for recovery in recoveries]
    ratios = [100 * goodput.ratio for goodput in goodputs]
    undisturbed = statistics.median(goodput.undisturbed for goodput in goodputs)
    disturbed = statistics.median(goodput.disturbed for goodput in goodputs)
    spread = "" if len(ratios) == 1 else f" [{min(ratios):.1f}, {max(ratios):.1f}]"
    return (
        f"| {first_cells} | {undisturbed:.1f} | {disturbed:.1f} | **{statistics.median(ratios):.1f} %**{spread} | "
        f"{len(recoveries)} | {statistics.median(times):.1f} s [{min(times):.1f}, {max(times):.1f}] | "
        f"{statistics.median(lost):.0f} [{min(lost)}, {max(lost)}] |"
    )


def row_name(backend: str, method: str, waiting_ms: float, in_memory: int) -> str:
    """Return the first cells of a line of the table."""
    interval = f"{in_memory} steps" if method == "standby" else "-"
    return f"{backend} | {method} | {waiting_ms:g} ms | {interval}"


def load_rows(output: Path) -> dict[str, list[Goodput]]:
    """Return the saved results, keyed by row name (see `row_name`)."""
    path = output / "goodput.json"
    saved = json.loads(path.read_text())["rows"] if path.exists() else {}
    return {
        name: [
            Goodput(plain, rate, [Recovery(*recovery) for recovery in recoveries])
            for plain, rate, recoveries in goodputs
        ]
        for name, goodputs in saved.items()
    }


@click.command()
@click.option("--backend", "backends", type=click.Choice(BACKENDS), multiple=True, default=BACKENDS)
@click.option(
    "--method",
    "method_names",
    type=click.Choice(list(restart_methods(1, 0))),
    multiple=True,
    default=list(restart_methods(1, 0)),
)
@click.option("--minutes", type=click.FloatRange(min=1), default=4.0, show_default=True, help="Minutes with faults.")
@click.option("--rounds", type=click.IntRange(min=1), default=1, show_default=True)
@click.option("--in-memory", type=click.IntRange(min=1), default=40, show_default=True, help="Steps per checkpoint.")
@click.option("--waiting-ms", "waits", multiple=True, default=[0.0], show_default=True, help="Idle time per step.")
@click.option("--output", type=click.Path(path_type=Path), default=RESULTS, show_default=True)
def main(
    backends: tuple[str, ...],
    method_names: tuple[str, ...],
    minutes: float,
    rounds: int,
    in_memory: int,
    waits: tuple[float, ...],
    output: Path,
) -> None:
    """Measure the goodput and write the table."""
    chosen = {
        (backend, name, waiting_ms): method
        for waiting_ms in waits
        for backend in backends
        for name, method in restart_methods(in_memory, waiting_ms).items()
        if name in method_names and backend in method.backends
    }
    found: dict[tuple[str, str, float], list[Goodput]] = {key: [] for key in chosen}
    rows = load_rows(output)  # fail before the slow measurements
    with started_hosts(len(RANKS)) as hosts:
        for _ in range(rounds):
            for (backend, name, waiting_ms), method in chosen.items():
                # The job without faults uses the same launcher, without standby ranks and checkpoints in memory.
                plain_method = RestartMethod(backends=method.backends, program=method.program, waiting_ms=waiting_ms)
                plain, _ = run(plain_method, backend, list(hosts), 60, has_faults=False)
                rate, recoveries = run(method, backend, list(hosts), 60 * minutes, has_faults=True)
                found[backend, name, waiting_ms].append(Goodput(plain, rate, recoveries))
                click.echo(f"{backend} {name} {waiting_ms}: {found[backend, name, waiting_ms][-1]}", err=True)
    for (backend, name, waiting_ms), goodputs in found.items():
        rows[row_name(backend, name, waiting_ms, in_memory)] = goodputs
    lines = [
        "# Goodput with one fault per minute",
        "",
        "One rank on each of two simulated hosts (sets of namespaces on this machine), with one thread and without a "
        f"GPU; a model of 1 million parameters, AdamW, {STEPS_PER_EPOCH} steps per epoch; torch {torch.__version__}, "
        f"{os.cpu_count()} CPU cores. For {minutes:g} minutes, every {FAULT_SECONDS:g} s, rank 1 or rank 0 is killed "
        "with SIGKILL. The goodput is the number of distinct steps per second, relative to a job of one minute without "
        "faults, standby ranks or checkpoints in memory. All methods write a checkpoint per epoch; standby also keeps "
        "a checkpoint in memory at the interval in the table. Recovery is the time from SIGKILL until all ranks have "
        "completed a step, with the minimum and the maximum. Waiting per step is the time that a rank waits in each "
        "forward pass without using the CPU, as for an accelerator. Command for a row: `python benchmarks/goodput.py "
        f"--minutes {minutes:g} --rounds {rounds} --backend BACKEND --method METHOD --waiting-ms WAITING "
        "--in-memory INTERVAL`.",
        "",
        "| backend | restart | waiting per step | checkpoint in memory | steps/s without faults | "
        "steps/s with faults | goodput | faults | recovery | steps lost per fault |",
        "|---|---|---|---|---|---|---|---|---|---|",
        *(row(name, goodputs) for name, goodputs in rows.items()),
        "",
        "Without waiting, each rank fully uses one core. On a machine with two cores, the standby ranks, which import "
        "torch after each restart, and the checkpoints in memory therefore take CPU time from training.",
    ]
    save_results(lines, "goodput", output, rows=rows)


if __name__ == "__main__":
    main()
