"""Overlap of gradient reduction with the backward pass: allreduce time per bucket, and the saved time.

Two variants of the backward pass take turns: one reduces buckets as soon as they are full, and the other one reduces
the same buckets after all gradients are computed. In addition to the table, the timeline of one step on every rank is
saved. It can be opened in https://ui.perfetto.dev or chrome://tracing.

    python benchmarks/overlap.py            # starts its own ranks; writes benchmarks/results/overlap.*
"""

from __future__ import annotations

import json
import os
import platform
import random
import statistics
from pathlib import Path
from typing import Any

import click
import torch
from loops import MODELS, pin_to_core
from overlapped_steps import OVERLAPPED, SEQUENTIAL, Step, take_turn
from rich.progress import track
from tables import BACKENDS, RESULTS, ratio, save_results

from unitrain.testing import RankGroup

_WARM_UP_STEPS = 3  # DDP rebuilds its buckets after the first step


def measure(backend: str, model: str, rounds: int, ranks: int) -> dict[str, list[list[Step]]]:
    """Return the steps of all ranks in each round, for overlapped and for sequential reduction."""
    shuffled = random.Random(0)
    steps: dict[str, list[list[Step]]] = {OVERLAPPED: [], SEQUENTIAL: []}
    with RankGroup(backend, ranks, spawn=True) as group:
        group.run(pin_to_core)
        for _ in range(_WARM_UP_STEPS):
            group.run(take_turn, OVERLAPPED, model)
        for round_number in track(range(rounds + 1), backend):  # the first round warms up
            for reduction in shuffled.sample(list(steps), len(steps)):
                turn_steps = group.run(take_turn, reduction, model)
                if round_number:
                    steps[reduction].append(turn_steps)
    return steps


def table(results: dict[str, dict[str, list[list[Step]]]], model: str, ranks: int) -> list[str]:
    """Return the table, with one line per backend."""
    lines = [
        "# Overlap of communication and backward",
        "",
        f"The {model} model, {ranks} ranks on one host, with one core and one thread each and without a GPU, so "
        f"communication and computation use the same cores; torch {torch.__version__}, Python "
        f"{platform.python_version()}, {os.cpu_count()} CPU cores. Communication hidden: the fraction of the "
        "communication that is complete when the rank has computed its last gradient. Sequential / overlapped: the "
        "time until all gradients are reduced, with reduction after the backward pass, divided by that with reduction "
        "of the same buckets during the backward pass, in the same round; above 1, overlapping is faster. "
        "Medians; in brackets the interquartile range of all rounds. Command: `python benchmarks/overlap.py`, which "
        "also writes a timeline of one step on each backend (`overlap_*.trace.json`, for https://ui.perfetto.dev).",
        "",
        "| backend | buckets | communication hidden | sequential / overlapped | overlapped, ms |",
        "|---|---|---|---|---|",
    ]
    for backend, steps in results.items():
        low, middle, high = statistics.quantiles([step.hidden for ranks in steps[OVERLAPPED] for step in ranks], n=4)
        times = {reduction: [max(step.reduced for step in ranks) for ranks in steps[reduction]] for reduction in steps}
        lines.append(
            f"| {backend} | {len(steps[OVERLAPPED][0][0].buckets)} | **{middle:.0%}** [{low:.0%}, {high:.0%}] "
            f"| {ratio(times[SEQUENTIAL], times[OVERLAPPED])} | {statistics.median(times[OVERLAPPED]) * 1000:.1f} |"
        )
    return lines


def timeline(steps: list[Step]) -> dict[str, Any]:
    """Return one step of every rank as trace events in microseconds."""
    events = []
    for rank, step in enumerate(steps):
        spans = [("backward", "compute", 0.0, step.computed)]
        spans += [
            (f"allreduce, {size / 2**20:.1f} MiB", f"bucket {index}", begin, end)
            for index, (begin, end, size) in enumerate(step.buckets)
        ]
        events += [
            {"ph": "X", "name": name, "pid": f"rank {rank}", "tid": row, "ts": start * 1e6, "dur": (end - start) * 1e6}
            for name, row, start, end in spans
        ]
    return {"traceEvents": events}


@click.command()
@click.option("--output", type=click.Path(path_type=Path), default=RESULTS, show_default=True)
@click.option("--ranks", type=click.IntRange(min=2), default=2, show_default=True)
@click.option("--rounds", type=click.IntRange(min=2), default=30, show_default=True)
@click.option("--model", type=click.Choice(list(MODELS)), default="25M", show_default=True)
@click.option("--backend", "backends", type=click.Choice(BACKENDS), multiple=True, default=BACKENDS)
def main(backends: list[str], model: str, rounds: int, ranks: int, output: Path) -> None:
    """Measure, print the table, and save it with the timelines."""
    results = {backend: measure(backend, model, rounds, ranks) for backend in backends}
    seconds = {
        backend: {
            reduction: [max(step.reduced for step in ranks) for ranks in rounds] for reduction, rounds in steps.items()
        }
        for backend, steps in results.items()
    }
    save_results(table(results, model, ranks), "overlap", output, ranks=ranks, seconds_per_backward=seconds)
    for backend, steps in results.items():
        (output / f"overlap_{backend}.trace.json").write_text(json.dumps(timeline(steps[OVERLAPPED][-1]), indent=1))


if __name__ == "__main__":
    main()
