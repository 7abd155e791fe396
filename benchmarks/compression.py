"""What compressing gradients does to the time of a step, on either backend.

Loops that differ in `compression` only take turns on the same ranks, in a new order every round; so does DDP with the
hook of torch, which adds up in half precision whatever the transport makes of it. Quoted is the time of a step with
compression / without, of the same round: below 1, it is faster. Ranks on one host send through its memory, so this is
what compression costs; what it saves grows with the slowness of the network.

    python benchmarks/compression.py            # starts its own ranks; writes benchmarks/results/compression.*
"""

from __future__ import annotations

import json
import os
import platform
import random
import statistics
from collections.abc import Sequence
from pathlib import Path

import click
import torch
from compressed_loops import HOOKS, WAYS, take_turn
from feature_costs import RESULTS, Seconds, ratio
from loops import BATCH, MODELS, settle
from rich.progress import track

from unitrain.testing import RankGroup


def measure(backend: str, models: Sequence[str], ways: Sequence[str], rounds: int, ranks: int) -> dict[str, Seconds]:
    """Return, for each model, the seconds per step of each way, round by round."""
    results: dict[str, Seconds] = {}
    shuffled = random.Random(0)
    with RankGroup(backend, ranks) as group:
        group.run(settle)
        for model in models:
            seconds: Seconds = {way: [] for way in ways}
            for number in track(range(rounds + 1), f"{backend}, {model}"):  # the first round warms up
                for way in shuffled.sample(list(ways), len(ways)):
                    taken = max(group.run(take_turn, way, model, number, timeout_seconds=300))
                    if number:
                        seconds[way].append(taken)
            results[model] = seconds
    return results


def table(results: dict[str, dict[str, Seconds]], ranks: int) -> str:
    columns = [(backend, model) for backend, models in results.items() for model in models]
    lines = [
        "# What compressing gradients does to a step",
        "",
        f"{ranks} ranks on one host, a core and a thread each, no GPU; batches of {BATCH} per rank, SGD with momentum; "
        f"torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} processors. "
        "Time of a step with compression / without, in the same round: below 1, it is faster. "
        "Medians; in brackets the middle half of all rounds. Made by `python benchmarks/compression.py`.",
        "",
        f"| compression | {' | '.join(f'{backend}, {model}' for backend, model in columns)} |",
        "|---|" + "---|" * len(columns),
    ]
    for way in next(iter(next(iter(results.values())).values())):
        seconds = [results[backend][model] for backend, model in columns]
        if way == "none":
            shown = [f"{statistics.median(one[way]) * 1000:.2f} ms" for one in seconds]
        else:
            shown = [ratio(one[way], one["none"]) for one in seconds]
        lines.append(f"| {way} | {' | '.join(shown)} |")
    return "\n".join(lines) + "\n"


@click.command()
@click.option("--backend", "backends", type=click.Choice(["ddp", "horovod"]), multiple=True, default=["ddp", "horovod"])
@click.option("--model", "models", type=click.Choice(list(MODELS)), multiple=True, default=["25M"], show_default=True)
@click.option("--way", "ways", type=click.Choice([*WAYS, *HOOKS]), multiple=True)
@click.option("--rounds", type=click.IntRange(min=2), default=20, show_default=True)
@click.option("--ranks", type=click.IntRange(min=1), default=2, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), default=RESULTS, show_default=True)
def main(backends: list[str], models: list[str], ways: list[str], rounds: int, ranks: int, output: Path) -> None:
    """Measure, print the table and keep it."""
    chosen = list(dict.fromkeys(["none", *(ways or [*WAYS, *HOOKS])]))
    results = {backend: measure(backend, models, chosen, rounds, ranks) for backend in backends}
    text = table(results, ranks)
    click.echo(text)
    output.mkdir(parents=True, exist_ok=True)
    (output / "compression.md").write_text(text)
    (output / "compression.json").write_text(json.dumps({"ranks": ranks, "seconds_per_step": results}))


if __name__ == "__main__":
    main()
