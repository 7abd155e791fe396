"""Overhead of failure detection and of asynchronous checkpoints.

Two ranks measure the time of the flight recorder, the failure monitor and the check for signals in a step of 5 ms.
Reductions with and without monitoring take turns. Then a model of 100 MB is saved in the background, while training
waits only for a copy in memory. The time until `save` returns is compared with the time of a plain copy of the same
state, also in turns.

    python benchmarks/watch_cost.py            # starts its own ranks; writes benchmarks/results/watch_cost.*
"""

from __future__ import annotations

import os
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import click
import torch
from loops import pin_to_core
from rich.progress import track
from tables import BACKENDS, RESULTS, Seconds, ratio, save_results
from torch import nn
from watched_steps import MEASURED, STEP_SECONDS, measure_microseconds

import unitrain
from unitrain.checkpoint.writer import CheckpointWriter, Retention
from unitrain.testing import RankGroup

_MODEL_BYTES = 100_000_000


def measure(backend: str, rounds: int, ranks: int) -> dict[str, list[float]]:
    """Return the microseconds per step of each of MEASURED in each round, as the mean over ranks."""
    with RankGroup(backend, ranks, spawn=True) as group:
        group.run(pin_to_core)
        costs_by_round = [
            group.run(measure_microseconds, timeout_seconds=300) for _ in track(range(rounds + 1), backend)
        ]
    # The first round warms up.
    return {part: [statistics.fmean(rank[part] for rank in ranks) for ranks in costs_by_round[1:]] for part in MEASURED}


def measure_save(rounds: int) -> Seconds:
    """Return the seconds until `save` returns, and the seconds of a plain copy of the same state, in each round."""
    model = nn.Linear(_MODEL_BYTES // 4 // 5000, 5000, bias=False)
    seconds: Seconds = {"save": [], "copy": []}
    shuffled = random.Random(0)
    with unitrain.init("local") as backend, tempfile.TemporaryDirectory() as folder:
        writer = CheckpointWriter(Path(folder), backend, Retention(1, None, None, "min"), asynchronous=True)
        actions: dict[str, Callable[[int], object]] = {
            "save": lambda step: writer.save(step, model, {}, {"step": step}),
            "copy": lambda step: {name: value.clone() for name, value in model.state_dict().items()},
        }
        for round_number in track(range(rounds + 1), "checkpoints"):
            for name in shuffled.sample(list(actions), len(actions)):
                started = time.perf_counter()
                kept = actions[name](round_number)
                seconds[name].append(time.perf_counter() - started)
                del kept
                writer.wait()
    return {name: rounds[1:] for name, rounds in seconds.items()}


def table(costs: dict[str, dict[str, list[float]]], saved: Seconds, ranks: int) -> list[str]:
    lines = [
        "# Cost of failure detection and asynchronous checkpoints",
        "",
        f"{ranks} ranks on one host, with one core and one thread each and without a GPU; torch {torch.__version__}, "
        f"Python {platform.python_version()}, {os.cpu_count()} CPU cores. Microseconds per step of "
        f"{STEP_SECONDS * 1000:g} ms, as the mean over ranks. Medians; in brackets the interquartile range of all "
        "rounds. Command: `python benchmarks/watch_cost.py`.",
        "",
        f"| | {' | '.join(MEASURED)} | fraction of the step |",
        "|---" * (len(MEASURED) + 2) + "|",
    ]
    for backend, parts in costs.items():
        total = sum(statistics.median(parts[part]) for part in MEASURED)
        lines.append(
            f"| {backend} | {' | '.join(_spread(parts[part]) for part in MEASURED)} "
            f"| **{total / STEP_SECONDS / 1e6:.2%}** |"
        )
    size = f"{_MODEL_BYTES // 1_000_000} MB"
    milliseconds = {name: f"{statistics.median(rounds) * 1000:.1f} ms" for name, rounds in saved.items()}
    return [
        *lines,
        "",
        f"Time until `save` of {size} returns, divided by the time of a plain copy of the same state: "
        f"{ratio(saved['save'], saved['copy'])} ({milliseconds['save']} and {milliseconds['copy']}).",
    ]


def _spread(values: list[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.2f} [{low:.2f}, {high:.2f}]"


@click.command()
@click.option("--output", type=click.Path(path_type=Path), default=RESULTS, show_default=True)
@click.option("--ranks", type=click.IntRange(min=2), default=2, show_default=True)
@click.option("--rounds", type=click.IntRange(min=2), default=30, show_default=True)
@click.option("--backend", "backends", type=click.Choice(BACKENDS), multiple=True, default=BACKENDS)
def main(backends: list[str], rounds: int, ranks: int, output: Path) -> None:
    """Measure, print the table and save it."""
    costs = {backend: measure(backend, rounds, ranks) for backend in backends}
    saved = measure_save(rounds)
    save_results(table(costs, saved, ranks), "watch_cost", output, ranks=ranks, microseconds=costs, save_seconds=saved)


if __name__ == "__main__":
    main()
