"""Time of an allreduce through unitrain's interface, compared with direct calls to torch.distributed (over Gloo) and to
Horovod.

A single allreduce must not modify its argument. torch.distributed reduces in place, so the benchmark lets it reduce a
copy, and the time includes the copying. Calls through the interface include the consistency check. Four concurrent
allreduces are issued like the buckets of a backward pass: in place, without a check, followed by one wait for all of
them. Each library, and unitrain on each library, runs on separate ranks. These groups of ranks take turns; during a
turn, all other ranks are suspended. The table shows the time relative to the faster library in the same round.

    python benchmarks/allreduce.py            # starts the ranks; writes benchmarks/results/allreduce.*
"""

from __future__ import annotations

import os
import platform
import random
import signal
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import click
import torch
from direct_calls import SIZES, take_turn
from rich.progress import track
from step_overhead import HOROVOD_DEFAULTS, SuspendedRanks
from tables import BACKENDS, RESULTS, Seconds, ratio, save_results

from unitrain.testing import RankGroup

DIRECT = {"ddp": "torch.distributed", "horovod": "horovod.torch"}


def measure(sizes: Sequence[str], rounds: int, ranks: int) -> dict[str, Seconds]:
    """Return the seconds per call in each round, by size and contestant: a library, or unitrain on a backend."""
    shuffled = random.Random(0)
    with ExitStack() as stack:
        contestants: dict[str, tuple[SuspendedRanks, str]] = {}
        for backend, direct_library in DIRECT.items():
            for name, library, variables in (
                (direct_library, direct_library, HOROVOD_DEFAULTS),
                (f"unitrain, {backend}", "unitrain", dict[str, str]()),
            ):
                group = stack.enter_context(RankGroup(backend, ranks, spawn=True, variables=variables))
                contestants[name] = SuspendedRanks(group), library
                stack.callback(contestants[name][0].resume)
        results: dict[str, Seconds] = {}
        for size in sizes:
            seconds: Seconds = {name: [] for name in contestants}
            for round_number in track(range(rounds + 1), size):  # the first round warms up
                for name in shuffled.sample(list(contestants), len(contestants)):
                    suspended_ranks, library = contestants[name]
                    taken = max(suspended_ranks.call(take_turn, library, size))
                    if round_number:
                        seconds[name].append(taken)
            seconds["fastest library"] = [
                min(pair) for pair in zip(*(seconds[library] for library in DIRECT.values()), strict=True)
            ]
            results[size] = seconds
    return results


def table(results: dict[str, Seconds], ranks: int) -> list[str]:
    lines = [
        "# Time of an allreduce, compared with direct calls to the libraries",
        "",
        f"float32, {ranks} ranks on one host, with one core and one thread each and without a GPU; "
        f"torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} CPU cores. Time of a call, "
        "divided by that of the faster library in the same round. Medians; in brackets the interquartile range of all "
        "rounds. Command: `python benchmarks/allreduce.py`.",
        "",
        f"| | {' | '.join(results)} |",
        "|---" * (len(results) + 1) + "|",
    ]
    for name in (*DIRECT.values(), *(f"unitrain, {backend}" for backend in BACKENDS)):
        cells = [ratio(seconds[name], seconds["fastest library"]) for seconds in results.values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    fastest = [f"{statistics.median(seconds['fastest library']) * 1000:.2f} ms" for seconds in results.values()]
    return [*lines, f"| the faster library | {' | '.join(fastest)} |"]


@click.command()
@click.option("--output", type=click.Path(path_type=Path), default=RESULTS, show_default=True)
@click.option("--ranks", type=click.IntRange(min=2), default=2, show_default=True)
@click.option("--rounds", type=click.IntRange(min=2), default=20, show_default=True)
@click.option("--size", "sizes", type=click.Choice(list(SIZES)), multiple=True, default=list(SIZES))
def main(sizes: list[str], rounds: int, ranks: int, output: Path) -> None:
    """Measure, print the table and save it."""
    # Handle SIGTERM like Ctrl-C: suspended ranks must be resumed before they can exit.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    results = measure(sizes, rounds, ranks)
    save_results(table(results, ranks), "allreduce", output, ranks=ranks, seconds_per_call=results)


if __name__ == "__main__":
    main()
