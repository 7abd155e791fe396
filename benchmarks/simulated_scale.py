"""Start-up, failure propagation and idle costs of the control plane with many ranks, simulated on one host.

Rank 0 and one other rank are separate processes. The remaining ranks are threads in a few processes. Each thread has
the stores, connections, watchdog and liveness check of a real rank. The stores and sockets are real, but the ranks have
neither a model nor a process group. One rank is killed, and every other rank records the time at which it receives the
failure report. The simulated ranks do not terminate after the failure, so that they can report their times.

    python benchmarks/simulated_scale.py            # writes benchmarks/results/simulated_scale.*
"""

from __future__ import annotations

import multiprocessing
import os
import platform
import resource
import signal
import statistics
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
from tables import RESULTS, save_results

from unitrain.bootstrap import environment
from unitrain.bootstrap.authentication import new_key
from unitrain.bootstrap.environment import RankInfo
from unitrain.bootstrap.network import listen, local_address_for
from unitrain.bootstrap.rendezvous import Rendezvous, open_tcp_store, raise_descriptor_limit
from unitrain.monitoring.flight_recorder import FlightRecorder
from unitrain.monitoring.loop_counters import LoopCounters
from unitrain.monitoring.watchdog import Watchdog

SIZES = (64, 256, 1024)
PROCESSES = 4  # processes that run the threads of all ranks except the first and the last one
IDLE_SECONDS = 10.0
TIMEOUT_SECONDS = 120.0
SWITCH_SECONDS = 0.5
HOST = "127.0.0.1"
fork = multiprocessing.get_context("fork")  # forked processes share the imported modules


class SimulatedWatchdog(Watchdog):
    """A watchdog that records when it would terminate the process."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        self.informed = threading.Event()
        self.informed_time = 0.0
        self.rendezvous = rendezvous  # a rank keeps its connection to the store
        super().__init__(rendezvous, FlightRecorder(), LoopCounters())

    def _terminate_process(self) -> None:
        self.informed_time = time.monotonic()
        self.informed.set()


@dataclass(frozen=True)
class Simulation:
    """Parameters of a simulation, shared by all processes."""

    size: int
    port: int
    start: Event
    stop: Event


def connect(simulation: Simulation, rank: int) -> SimulatedWatchdog:
    """Run the start-up of a rank: connect to the store, exchange positions and addresses, and start the watchdog."""
    rank_info = RankInfo("env", rank, simulation.size, rank)
    timeout = timedelta(seconds=TIMEOUT_SECONDS)
    store = open_tcp_store(HOST, simulation.port, rank_info, timeout, is_server=rank == 0)
    rendezvous = Rendezvous(rank_info, dist.PrefixStore("simulated", store), HOST, timeout)
    # Exchange the values of `node_positions` and `own_address` here. In Python 3.11, all objects of a class share the
    # lock of a cached_property, so accessing these properties would block the other threads of this process.
    rendezvous.allgather("positions", [platform.node(), None, rank])
    rendezvous.allgather("address", local_address_for(HOST))
    watchdog = SimulatedWatchdog(rendezvous)
    rendezvous.allgather("started", rank)
    return watchdog


def run_ranks(simulation: Simulation, ranks: Sequence[int], pipe: Connection) -> None:
    """Run `ranks` as threads of this process. Send the start-up costs, the idle costs and the failure times to
    `pipe`."""
    # Hide the failure report, and torch's messages about connections that are closed at the end.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    try:
        _run_ranks(simulation, ranks, pipe)
    except BaseException as error:
        pipe.send(error)
        raise
    simulation.stop.wait()  # rank 0 serves the store until all ranks have received the failure report
    os._exit(0)


def _run_ranks(simulation: Simulation, ranks: Sequence[int], pipe: Connection) -> None:
    raise_descriptor_limit(RankInfo("env", min(ranks), simulation.size, 0))
    threading.stack_size(512 * 1024)
    simulation.start.wait()
    started, used = time.monotonic(), time.process_time()
    with ThreadPoolExecutor(len(ranks)) as pool:
        watchdogs = list(pool.map(partial(connect, simulation), ranks))
    startup = time.monotonic() - started, time.process_time() - used
    pipe.send((*startup, len(list(Path("/proc/self/fd").iterdir()))))
    used = time.process_time()
    time.sleep(IDLE_SECONDS)
    pipe.send((time.process_time() - used) / IDLE_SECONDS)
    deadline = time.monotonic() + TIMEOUT_SECONDS
    for watchdog in watchdogs:
        watchdog.informed.wait(max(0.0, deadline - time.monotonic()))
    pipe.send([watchdog.informed_time for watchdog in watchdogs])


def simulate(size: int, processes: int) -> dict[str, float]:
    """Simulate a job with `size` ranks, and return the costs."""
    os.environ[environment.JOB_KEY_VARIABLE] = new_key()
    with listen(HOST, 0) as server:
        port = server.getsockname()[1]
    simulation = Simulation(size, port, fork.Event(), fork.Event())
    groups = [[0], *(list(range(1 + first, size - 1, processes)) for first in range(processes)), [size - 1]]
    pipes, children = [], []
    for ranks in filter(None, groups):
        mine, theirs = fork.Pipe()
        child = fork.Process(target=run_ranks, args=(simulation, ranks, theirs), daemon=True)
        child.start()
        pipes.append(mine)
        children.append(child)
    try:
        simulation.start.set()
        startups = [_receive(pipe) for pipe in pipes]
        idle_shares = [_receive(pipe) for pipe in pipes]
        killed = time.monotonic()
        os.kill(children[-1].pid or 0, signal.SIGKILL)
        times = [informed - killed for pipe in pipes[:-1] for informed in _receive(pipe)]
    finally:
        simulation.stop.set()
        for child in children:
            child.join(10)
            if child.is_alive():
                child.kill()
    if min(times) < 0:
        raise click.ClickException(f"{sum(seconds < 0 for seconds in times)} ranks did not learn of the failure.")
    return {
        "startup_seconds": max(seconds for seconds, _, _ in startups),
        "startup_cpu_seconds_of_rank_0": startups[0][1],
        "startup_cpu_seconds_per_other_rank": sum(used for _, used, _ in startups[1:]) / (size - 1),
        "descriptors_of_rank_0": startups[0][2],
        "idle_cpu_share_of_rank_0": idle_shares[0],
        "idle_cpu_share_per_other_rank": sum(idle_shares[1:]) / (size - 1),
        "failure_seconds_median": statistics.median(times),
        "failure_seconds_last": max(times),
    }


def _receive(pipe: Connection) -> Any:
    if not pipe.poll(2 * TIMEOUT_SECONDS):
        raise click.ClickException("A process of the simulation does not respond.")
    received = pipe.recv()
    if isinstance(received, BaseException):
        raise received
    return received


ROWS = {
    "start-up until all ranks are connected, wall time": ("startup_seconds", "{:.2f} s"),
    "start-up, CPU time of rank 0, which serves the store": ("startup_cpu_seconds_of_rank_0", "{:.2f} s"),
    "start-up, CPU time of another rank": ("startup_cpu_seconds_per_other_rank", "{:.4f} s"),
    "file descriptors of rank 0": ("descriptors_of_rank_0", "{:,.0f}"),
    "CPU use of rank 0 while no rank fails": ("idle_cpu_share_of_rank_0", "{:.1%}"),
    "CPU use of another rank while no rank fails": ("idle_cpu_share_per_other_rank", "{:.2%}"),
    "killed rank: until half of the ranks know": ("failure_seconds_median", "{:.2f} s"),
    "killed rank: until all ranks know": ("failure_seconds_last", "{:.2f} s"),
}


def table(results: Mapping[int, Sequence[Mapping[str, float]]], processes: int) -> list[str]:
    """Return the lines of the table."""
    sizes, rounds = list(results), len(next(iter(results.values())))
    lines = [
        "# The control plane with many ranks, simulated on one host",
        "",
        f"Rank 0 and the killed rank are processes; all other ranks are threads of {processes} processes. Stores and "
        f"connections are real. {os.cpu_count()} CPU cores execute the code of all ranks, so a rank on its own core "
        "starts and reacts faster. "
        f"torch {torch.__version__}, Python {platform.python_version()}. Medians of {rounds} runs. "
        "Command: `python benchmarks/simulated_scale.py`.",
        "",
        f"| | {' | '.join(f'{size:,} ranks' for size in sizes)} |",
        "|---" * (len(sizes) + 1) + "|",
    ]
    for title, (key, form) in ROWS.items():
        cells = [form.format(statistics.median(run[key] for run in results[size])) for size in sizes]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return lines


@click.command()
@click.option("--output", type=click.Path(path_type=Path), default=RESULTS, show_default=True)
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--processes", type=click.IntRange(min=1), default=PROCESSES, show_default=True)
@click.option("--size", "sizes", type=click.IntRange(min=4), multiple=True, default=SIZES)
def main(sizes: list[int], processes: int, rounds: int, output: Path) -> None:
    """Simulate jobs of several sizes, print the table and save it."""
    # torch looks up the host name of each connection. If many threads do so at once, some lookups are sent to the name
    # server. Without a name server, these lookups take 5 s by default, longer than the start-up.
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
    torch.set_num_threads(1)
    # Each thread that waits for Python's global lock wakes up after this time, by default 200 times per second, which
    # would take most of the CPU time with hundreds of threads per process. Ranks do not share this lock.
    sys.setswitchinterval(SWITCH_SECONDS)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    results: dict[int, list[dict[str, float]]] = {size: [] for size in sizes}
    for number in range(rounds):
        for size, runs in results.items():
            click.echo(f"round {number + 1} of {rounds}: {size} ranks", err=True)
            runs.append(simulate(size, processes))
    save_results(table(results, processes), "simulated_scale", output, **{str(size): results[size] for size in sizes})


if __name__ == "__main__":
    main()
