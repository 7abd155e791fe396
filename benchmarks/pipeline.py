"""Peak memory and step time of pipeline stages, compared with plain torch in one process.

The memory is the peak resident memory of a process, minus the resident memory before the model is built, measured in
new processes. Step times are measured on ranks that stay alive, on which the variants take turns in a new order in
every round. Each measurement replaces its part of benchmarks/results/pipeline.*.

    python benchmarks/pipeline.py                        # both measurements
    python benchmarks/pipeline.py --measure memory
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
from pipeline_loops import ONE_PROCESS, SAMPLES, VARIANTS, measure_peak_bytes, measure_step_seconds
from tables import RESULTS, ratio, save_results

from unitrain.testing import RankGroup

MEGABYTE = 10**6


def measure_memory() -> dict[str, dict[str, Any]]:
    """By model and variant, return the peak memory of each stage in bytes and the blocks per stage."""
    results: dict[str, dict[str, Any]] = {}
    for model in SAMPLES:
        results[model] = {}
        for name, variant in VARIANTS.items():
            with RankGroup("ddp" if variant.stages else "local", variant.stages or 1, spawn=True) as group:
                found = group.run(measure_peak_bytes, model, variant, timeout_seconds=400)
            results[model][name] = {"bytes": [peak for peak, _ in found], "blocks": found[0][1]}
            click.echo(f"{model}, {name}: {[round(peak / MEGABYTE) for peak, _ in found]} MB, {found[0][1]} blocks")
    return results


def measure_time(rounds: int) -> dict[str, dict[str, list[float]]]:
    """By model and variant, return the seconds of a step on the slowest rank in each round."""
    results: dict[str, dict[str, list[float]]] = {}
    shuffled = random.Random(0)
    with RankGroup("ddp", 2, spawn=True) as group:
        for model in SAMPLES:
            results[model] = {name: [] for name in VARIANTS}
            for _ in range(rounds):
                for name in shuffled.sample(list(VARIANTS), len(VARIANTS)):
                    seconds = max(group.run(measure_step_seconds, model, VARIANTS[name], timeout_seconds=400))
                    results[model][name].append(seconds)
    return results


def table(memory: dict[str, dict[str, Any]], seconds: dict[str, dict[str, list[float]]]) -> list[str]:
    lines = [
        "# Pipeline parallelism",
        "",
        f"2 stages on one host, one core and one thread each, without a GPU; AdamW; torch {torch.__version__}, Python "
        f"{platform.python_version()}, {os.cpu_count()} CPU cores. Peak memory of each stage, and of the larger stage "
        "relative to plain torch in one process on the same batch. Time of a step relative to one process in the same "
        "round: the median, and in brackets the interquartile range. Command: `python benchmarks/pipeline.py`.",
    ]
    for model, by_variant in memory.items():
        lines += ["", f"## {model}, {SAMPLES[model]} samples per batch", ""]
        lines += [
            "| | memory of each stage, MB | larger stage / one process | blocks | time / one process |",
            "|---" * 5 + "|",
        ]
        whole = max(by_variant[ONE_PROCESS]["bytes"])
        for name, found in by_variant.items():
            peaks = ", ".join(f"{peak / MEGABYTE:.0f}" for peak in found["bytes"])
            blocks = " + ".join(map(str, found["blocks"]))
            times = seconds.get(model, {})
            if not times:
                shown = "not measured"
            elif name == ONE_PROCESS:
                shown = f"{statistics.median(times[name]):.3f} s"
            else:
                shown = ratio(times[name], times[ONE_PROCESS])
            lines.append(f"| {name} | {peaks} | {max(found['bytes']) / whole:.0%} | {blocks} | {shown} |")
    return lines


@click.command()
@click.option("--measure", type=click.Choice(["memory", "time"]), multiple=True, default=["memory", "time"])
@click.option("--rounds", type=click.IntRange(min=2), default=7, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), default=RESULTS, show_default=True)
def main(measure: list[str], rounds: int, output: Path) -> None:
    """Measure, print the table and save it."""
    saved = output / "pipeline.json"
    figures = json.loads(saved.read_text()) if saved.exists() else {"memory": {}, "seconds": {}}
    if "memory" in measure:
        figures["memory"] = measure_memory()
    if "time" in measure:
        figures["seconds"] = measure_time(rounds)
    save_results(table(figures["memory"], figures["seconds"]), "pipeline", output, **figures)


if __name__ == "__main__":
    main()
