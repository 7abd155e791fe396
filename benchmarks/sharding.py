"""Time and memory of Adam with sharded state, gradients or parameters, compared with replication,
ZeroRedundancyOptimizer and fully_shard.

Each loop takes turns with replicated training on the same ranks, in a new order in every round. shard="state" and
torch's ZeroRedundancyOptimizer, which save the same memory, also take turns with each other. The first table shows the
step time relative to replicated training in the same round. The second table shows the memory of weights, gradients and
optimizer state in bytes per parameter, on the rank with the highest value. Results of earlier runs for other
sharding methods (`--method`), backends and numbers of ranks are kept, so that each combination can be measured in a
separate run.

    python benchmarks/sharding.py                 # starts its own ranks; writes benchmarks/results/sharding.*
    python benchmarks/sharding.py --measure time --backend ddp --method parameters
    python benchmarks/sharding.py --measure memory --ranks 3
"""

from __future__ import annotations

import json
import os
import platform
import statistics
from pathlib import Path
from typing import Any

import click
import torch
from loops import BATCH, MODELS
from sharding_loops import FULLY_SHARD, METHODS, REPLICATED, ZERO, formula_bytes, measure_persistent_bytes, take_turn
from tables import BACKENDS, RESULTS, ratio, save_results
from turns import measure

from unitrain.testing import RankGroup

MEASURED = ("time", "memory")
SIZES = (2, 3, 4)
COMPARED = ("state", ZERO)  # measured in the same rounds if both are selected
NAMES = {
    REPLICATED: "replicated", "state": 'shard="state"', "gradients": 'shard="gradients"', ZERO: ZERO,
    "parameters": 'shard="parameters"', FULLY_SHARD: "torch's fully_shard",
}  # fmt: skip


def table(figures: dict[str, Any]) -> list[str]:
    """Return the lines of both tables. `figures` is the content of sharding.json."""
    lines = [
        "# Sharded optimizer state, gradients and parameters",
        "",
        f"2 ranks on one host, with one core and one thread each and without a GPU; a model with {figures['model']} "
        f"parameters, {BATCH} samples per rank, Adam in float32; torch {torch.__version__}, Python "
        f"{platform.python_version()}, {os.cpu_count()} CPU cores. Step time / step time of replicated training in the "
        "same round; below 1, sharded training is faster. Medians; in brackets the interquartile range of all rounds. "
        "Command: `python benchmarks/sharding.py`.",
        "",
        f"| | {' | '.join(f'{backend} | rounds' for backend in BACKENDS)} |",
        "|---" * (1 + 2 * len(BACKENDS)) + "|",
    ]
    seconds: dict[str, dict[str, dict[str, list[float]]]] = figures["seconds"]
    for method in METHODS[1:]:
        cells = []
        for backend in BACKENDS:
            found = seconds.get(backend, {}).get(method)
            cells += ["", ""] if found is None else [ratio(found["own"], found["replicated"]), str(len(found["own"]))]
        if any(cells):
            lines.append(f"| {NAMES[method]} | {' | '.join(cells)} |")
    compared = [
        f"{ratio(by_method['state']['own'], by_method[ZERO]['own'])} ({backend})"
        for backend, by_method in seconds.items()
        if {*COMPARED} <= by_method.keys() and by_method["state"]["replicated"] == by_method[ZERO]["replicated"]
    ]
    if compared:
        lines += ["", f'Time of shard="state" / {ZERO} in the same round: {", ".join(compared)}.']
    medians = [
        f"{statistics.median(found['replicated']) * 1000:.0f} ms ({backend}, with {NAMES[method]})"
        for backend, by_method in seconds.items()
        for method, found in by_method.items()
    ]
    lines += ["", f"Median time of replicated training: {', '.join(medians)}."] if medians else []
    lines += [
        "",
        "Bytes per parameter of weights, gradients and optimizer state on the rank with the highest value, and the "
        "difference from the formula (replicated: 16; state: 8 + 8 / ranks; gradients: 4 + 12 / ranks; parameters: "
        "16 / ranks):",
        "",
        f"| | {' | '.join(f'{size} ranks' for size in SIZES)} |",
        "|---" * (1 + len(SIZES)) + "|",
    ]
    for method in METHODS:
        by_size: dict[str, float] = figures["bytes"].get(method, {})
        cells = [
            f"{by_size[str(size)]:.3f} ({by_size[str(size)] / formula_bytes(method, size) - 1:+.2%})"
            if str(size) in by_size
            else ""
            for size in SIZES
        ]
        if any(cells):
            lines.append(f"| {NAMES[method]} | {' | '.join(cells)} |")
    return lines


@click.command()
@click.option("--measure", "measured", type=click.Choice(MEASURED), multiple=True, default=MEASURED, show_default=True)
@click.option(
    "--method", "methods", type=click.Choice(METHODS[1:]), multiple=True, default=METHODS[1:], show_default=True
)
@click.option("--backend", "backends", type=click.Choice(BACKENDS), multiple=True, default=BACKENDS)
@click.option("--ranks", "sizes", type=click.Choice(list(map(str, SIZES))), multiple=True, default=map(str, SIZES),
              help="Numbers of ranks with which memory is measured. Times are measured with 2 ranks.")  # fmt: skip
@click.option("--model", type=click.Choice(list(MODELS)), default="25M", show_default=True)
@click.option("--rounds", type=click.IntRange(min=2), default=12, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), default=RESULTS, show_default=True)
def main(
    measured: list[str],
    methods: list[str],
    backends: list[str],
    sizes: list[str],
    model: str,
    rounds: int,
    output: Path,
) -> None:
    """Measure, print the tables and save them."""
    saved = output / "sharding.json"
    figures: dict[str, Any] = json.loads(saved.read_text()) if saved.exists() else {}
    if figures.get("model") != model:
        figures = {"model": model, "seconds": {}, "bytes": {}}
    for backend in backends if "time" in measured else ():
        together = COMPARED if {*COMPARED} <= {*methods} else ()
        for turns in [together, *((method,) for method in methods if method not in together)]:
            found = measure(backend, [model], [REPLICATED, *turns], take_turn, rounds, 2)[model] if turns else {}
            for method in turns:
                figures["seconds"].setdefault(backend, {})[method] = {
                    "own": found[method],
                    "replicated": found[REPLICATED],
                }
            save_results(table(figures), "sharding", output, **figures)
    for size in sizes if "memory" in measured else ():
        with RankGroup("ddp", int(size)) as group:
            for method in (REPLICATED, *methods):
                most, _ = max(group.run(measure_persistent_bytes, method, model, timeout_seconds=200))
                figures["bytes"].setdefault(method, {})[size] = most
    save_results(table(figures), "sharding", output, **figures)


if __name__ == "__main__":
    main()
