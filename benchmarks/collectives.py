"""Time of reducescatter and allgather through unitrain's interface, compared with an allreduce of the same tensor.

The output of the allgather has the same size as the input of the allreduce. For comparison, the same collectives are
called directly on torch.distributed's process group (Gloo or Horovod), without a consistency check. In each round, all
calls take turns in a random order on the same ranks. The table shows the time relative to the allreduce through
unitrain's interface in the same round.

    python benchmarks/collectives.py          # starts the ranks; writes benchmarks/results/collectives.*
"""

from __future__ import annotations

import os
import platform
import random
import signal
import statistics
from collections.abc import Sequence
from pathlib import Path

import click
import torch
from collective_calls import ALLREDUCE, COLLECTIVES, SIZES, take_turn
from tables import RESULTS, Seconds, ratio, save_results

from unitrain.bootstrap import environment
from unitrain.testing import RankGroup

TRANSPORTS = ("ddp, gloo", "horovod, gloo", "horovod, mpi")


def start_ranks(transport: str, ranks: int) -> RankGroup:
    """Start and return the ranks of a transport, for example "horovod, mpi"."""
    backend, controller = transport.split(", ")
    if controller == "gloo":
        return RankGroup(backend, ranks, spawn=True)
    environment.export_defaults({"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"})
    return RankGroup(backend, ranks, command=["mpirun", "--oversubscribe", "-np", str(ranks)])


def measure(group: RankGroup, sizes: Sequence[str], rounds: int) -> dict[str, Seconds]:
    """Return the seconds per call in each round, by size and collective."""
    shuffled = random.Random(0)
    results: dict[str, Seconds] = {}
    for size in sizes:
        seconds: Seconds = {collective: [] for collective in COLLECTIVES}
        for round_number in range(rounds + 1):  # the first round warms up
            for collective in shuffled.sample(list(COLLECTIVES), len(COLLECTIVES)):
                taken = max(group.run(take_turn, collective, size))
                if round_number:
                    seconds[collective].append(taken)
        results[size] = seconds
    return results


def table(results: dict[str, dict[str, Seconds]], sizes: Sequence[str]) -> list[str]:
    lines = [
        "# reducescatter and allgather, compared with an allreduce of the same tensor",
        "",
        f"float32, ranks on one host, with one thread each and without a GPU; torch {torch.__version__}, Python "
        f"{platform.python_version()}, {os.cpu_count()} CPU cores. Time of a call, divided by that of `allreduce` "
        "on the interface in the same round. Medians; in brackets the interquartile range of all rounds. Command: "
        "`python benchmarks/collectives.py`.",
        "",
        f"| | | {' | '.join(sizes)} |",
        "|---" * (len(sizes) + 2) + "|",
    ]
    for group, by_size in results.items():
        base = [f"{statistics.median(by_size[size][ALLREDUCE]) * 1000:.2f} ms" for size in sizes]
        lines.append(f"| {group} | {ALLREDUCE} | {' | '.join(base)} |")
        for collective in COLLECTIVES:
            if collective != ALLREDUCE:
                cells = [ratio(by_size[size][collective], by_size[size][ALLREDUCE]) for size in sizes]
                lines.append(f"| | {collective} | {' | '.join(cells)} |")
    return lines


@click.command()
@click.option("--output", type=click.Path(path_type=Path), default=RESULTS, show_default=True)
@click.option("--ranks", type=click.IntRange(min=2), multiple=True, default=(2, 3), show_default=True)
@click.option("--rounds", type=click.IntRange(min=2), default=7, show_default=True)
@click.option("--size", "sizes", type=click.Choice(list(SIZES)), multiple=True, default=list(SIZES))
@click.option("--transport", "transports", type=click.Choice(TRANSPORTS), multiple=True, default=TRANSPORTS)
def main(transports: Sequence[str], sizes: Sequence[str], rounds: int, ranks: Sequence[int], output: Path) -> None:
    """Measure, print the table and save it."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that SIGTERM also terminates the ranks
    results: dict[str, dict[str, Seconds]] = {}
    for size in ranks:
        for transport in transports:
            with start_ranks(transport, size) as group:
                results[f"{transport}, {size} ranks"] = measure(group, sizes, rounds)
    save_results(table(results, sizes), "collectives", output, seconds_per_call=results)


if __name__ == "__main__":
    main()
