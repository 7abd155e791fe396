"""Latency of subgroup collectives and point-to-point messages on Horovod's process group, compared with bare Horovod
calls.

The calls of each comparison take turns on the same ranks in every round. The time of a message is half of a round trip
between ranks 0 and 1. A bare operation is a broadcast by `horovod.torch` in the process set of these ranks. An
allreduce is measured in the group of these ranks and in the default group of all ranks. In the default group, it is
measured three times: without other groups, after the group of ranks 0 and 1 has been created and used, and again
without other groups. The second time is compared with the mean of the first and the last time. The ratio of the first
and the last time shows the noise.

    python benchmarks/groups.py            # starts 4 ranks; writes benchmarks/results/groups.*
"""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path

import click
import torch
from group_calls import (
    MEMBERS,
    broadcast_with_horovod,
    create_group,
    destroy_group,
    reduce_in_default_group,
    reduce_in_group,
    send_message,
)
from rich.progress import track
from tables import RESULTS, ratio, save_results

from unitrain.testing import RankGroup

SIZES = {"4 bytes": 1, "4 KB": 2**10, "4 MB": 2**20}


def measure(rounds: int, ranks: int) -> dict[str, dict[str, list[float]]]:
    """Return the seconds of each measured call, by size, in each round."""
    results: dict[str, dict[str, list[float]]] = {name: {} for name in ("creation", *SIZES)}
    with RankGroup("horovod", ranks, spawn=True) as group:
        group.run(reduce_in_default_group, 1, timeout_seconds=300)  # starts the ranks
        for round_number in track(range(rounds + 1)):  # the first round warms up
            for name, count in SIZES.items():
                taken: dict[str, float] = {}
                measure_allreduce(group, count, "no group", taken)
                created = max(group.run(create_group)[: len(MEMBERS)])
                for call, function in (
                    ("bare operation", broadcast_with_horovod),
                    ("message", send_message),
                    ("allreduce in the group", reduce_in_group),
                ):
                    taken[call] = max(group.run(function, count))
                measure_allreduce(group, count, "idle group", taken)
                group.run(destroy_group)
                measure_allreduce(group, count, "no group again", taken)
                for what in ("allreduce", "CPU time of allreduce"):
                    taken[f"{what}, no group on average"] = statistics.mean(
                        (taken[f"{what}, no group"], taken[f"{what}, no group again"])
                    )
                if round_number:
                    results["creation"].setdefault("seconds", []).append(created)
                    for call, seconds in taken.items():
                        results[name].setdefault(call, []).append(seconds)
    return results


def measure_allreduce(group: RankGroup, count: int, situation: str, taken: dict[str, float]) -> None:
    """Measure an allreduce of all ranks, and store the seconds and the CPU seconds of all ranks in `taken`."""
    seconds, cpu_seconds = zip(*group.run(reduce_in_default_group, count), strict=True)
    taken[f"allreduce, {situation}"] = max(seconds)
    taken[f"CPU time of allreduce, {situation}"] = sum(cpu_seconds)


def table(results: dict[str, dict[str, list[float]]], ranks: int) -> list[str]:
    creation = [seconds * 1000 for seconds in results["creation"]["seconds"]]
    lines = [
        "# Groups and messages on Horovod's process group",
        "",
        f"{ranks} ranks on one host, over Gloo and without a GPU; torch {torch.__version__}, Python "
        f"{platform.python_version()}, {os.cpu_count()} CPU cores. Medians; in brackets the interquartile range of all "
        "rounds. Command: `python benchmarks/groups.py`.",
        "",
        f"Creating a group of 2 of {ranks} ranks takes {statistics.median(creation):.1f} ms (maximum "
        f"{max(creation):.1f} ms).",
        "",
        f"| | {' | '.join(SIZES)} |",
        "|---" * (len(SIZES) + 1) + "|",
    ]
    rows: Sequence[tuple[str, str, str]] = (
        ("message, divided by a bare operation", "message", "bare operation"),
        ("allreduce in the group, divided by a bare operation", "allreduce in the group", "bare operation"),
        (
            "allreduce of all ranks: with an idle group, divided by without a group",
            "allreduce, idle group",
            "allreduce, no group on average",
        ),
        (
            "CPU time of all ranks for this allreduce: with an idle group, divided by without a group",
            "CPU time of allreduce, idle group",
            "CPU time of allreduce, no group on average",
        ),
        (
            "allreduce without a group: second measurement, divided by the first",
            "allreduce, no group again",
            "allreduce, no group",
        ),
    )
    for title, call, base in rows:
        lines.append(f"| {title} | {' | '.join(ratio(results[size][call], results[size][base]) for size in SIZES)} |")
    for title in ("message", "bare operation", "allreduce, no group"):
        cells = [f"{statistics.median(results[size][title]) * 1000:.2f} ms" for size in SIZES]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return lines


@click.command()
@click.option("--output", type=click.Path(path_type=Path), default=RESULTS, show_default=True)
@click.option("--ranks", type=click.IntRange(min=2), default=4, show_default=True)
@click.option("--rounds", type=click.IntRange(min=2), default=20, show_default=True)
def main(rounds: int, ranks: int, output: Path) -> None:
    """Measure, print the table and save it."""
    results = measure(rounds, ranks)
    save_results(table(results, ranks), "groups", output, ranks=ranks, seconds=results)


if __name__ == "__main__":
    main()
