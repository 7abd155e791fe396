"""Time to save a checkpoint in the sharded format, compared with gathering the state on rank 0.

The optimizer state is sharded in both cases. The formats take turns on the same ranks, in a new order in every round.
The time is measured on the slowest rank, from the call until the checkpoint is complete on disk. Results of earlier
runs on other backends are kept.

    python benchmarks/sharded_checkpoints.py    # starts its own ranks; writes benchmarks/results/sharded_checkpoints.*
"""

from __future__ import annotations

import json
import os
import statistics
from pathlib import Path

import click
import torch
from checkpoint_turns import FORMATS, FULL, LAYERS, SHARDED, take_turn
from tables import BACKENDS, RESULTS, ratio, save_results
from turns import measure


@click.command()
@click.option("--backend", "backends", type=click.Choice(BACKENDS), multiple=True, default=BACKENDS)
@click.option("--size", "sizes", type=click.Choice(list(LAYERS)), multiple=True, default=("1 GB",), show_default=True)
@click.option("--ranks", type=click.IntRange(min=1), default=2, show_default=True)
@click.option("--rounds", type=click.IntRange(min=2), default=5, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), default=RESULTS, show_default=True)
def main(backends: list[str], sizes: list[str], ranks: int, rounds: int, output: Path) -> None:
    """Measure, print the table and save it."""
    saved = output / "sharded_checkpoints.json"
    earlier = json.loads(saved.read_text()) if saved.exists() else {}
    results = earlier["seconds"] if earlier.get("ranks") == ranks else {}
    results |= {backend: measure(backend, sizes, FORMATS, take_turn, rounds, ranks) for backend in backends}
    lines = [
        "# Saving a sharded checkpoint",
        "",
        f'{ranks} ranks on one host with {os.cpu_count()} CPU cores; Adam with `shard="state"`; torch '
        f"{torch.__version__}. Seconds until the checkpoint is complete on disk, and the time of the sharded format / "
        "time of the full format in the same round. Medians; in brackets the interquartile range. Command: "
        "`python benchmarks/sharded_checkpoints.py`.",
        "",
        "| backend, size | full | sharded | ratio |",
        "|---|---|---|---|",
    ]
    for backend, by_size in results.items():
        for size, seconds in by_size.items():
            medians = " | ".join(
                f"{statistics.median(seconds[checkpoint_format]):.2f} s" for checkpoint_format in FORMATS
            )
            lines.append(f"| {backend}, {size} | {medians} | {ratio(seconds[SHARDED], seconds[FULL])} |")
    save_results(lines, "sharded_checkpoints", output, ranks=ranks, seconds=results)


if __name__ == "__main__":
    main()
