"""What each feature of the Trainer costs a step when it is on, and what accumulating without communication saves.

Trainers that differ in one setting take turns on the same ranks, in a new order every round. Quoted is the time of a
micro-batch with the feature / without it, of the same round: 1.05 is five per cent slower. `accumulate=4` is quoted too
against four micro-batches that communicate each, which is what a loop without `no_sync` does.

    python benchmarks/feature_costs.py            # starts its own ranks; writes benchmarks/results/feature_costs.*
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
from features import ACCUMULATE, COMMUNICATING, FEATURES_ON, PLAIN, take_turn
from loops import BATCH, MODELS, settle
from rich.progress import track

from unitrain.testing import RankGroup

RESULTS = Path(__file__).parent / "results"
Seconds = dict[str, list[float]]


def measure(
    backend: str, models: Sequence[str], features: Sequence[str], rounds: int, ranks: int
) -> dict[str, Seconds]:
    """Return, for each model, the seconds per micro-batch with each feature, round by round."""
    results: dict[str, Seconds] = {}
    shuffled = random.Random(0)
    with RankGroup(backend, ranks) as group:
        group.run(settle)
        for model in models:
            seconds: Seconds = {feature: [] for feature in features}
            for number in track(range(rounds + 1), f"{backend}, {model}"):  # the first round warms up
                for feature in shuffled.sample(list(features), len(features)):
                    taken = max(group.run(take_turn, feature, model, number, timeout_seconds=300))
                    if number:
                        seconds[feature].append(taken)
            results[model] = seconds
    return results


def ratio(ones: list[float], others: list[float]) -> str:
    """Return the median of the rounds' ratios, and their middle half."""
    low, middle, high = statistics.quantiles([one / other for one, other in zip(ones, others, strict=True)], n=4)
    return f"**{middle:.3f}** [{low:.3f}, {high:.3f}]"


def table(results: dict[str, dict[str, Seconds]], ranks: int) -> str:
    columns = [(backend, model) for backend, models in results.items() for model in models]
    lines = [
        "# What each feature costs",
        "",
        f"{ranks} ranks on one host, a core and a thread each, no GPU; batches of {BATCH} per rank, SGD with momentum; "
        f"torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} processors. "
        "Time of a micro-batch with the feature / without any, in the same round: below 1, it is faster. "
        "Medians; in brackets the middle half of all rounds. Made by `python benchmarks/feature_costs.py`.",
        "",
        f"| feature | {' | '.join(f'{backend}, {model}' for backend, model in columns)} |",
        "|---|" + "---|" * len(columns),
    ]
    features = next(iter(next(iter(results.values())).values()))
    for feature in features:
        seconds = [results[backend][model] for backend, model in columns]
        if feature == PLAIN:
            shown = [f"{statistics.median(one[PLAIN]) * 1000:.2f} ms" for one in seconds]
        else:
            shown = [ratio(one[feature], one[PLAIN]) for one in seconds]
        lines.append(f"| {feature} | {' | '.join(shown)} |")
    if {"accumulate", COMMUNICATING} <= set(features):
        gains = [ratio(results[b][m][COMMUNICATING], results[b][m]["accumulate"]) for b, m in columns]
        lines += ["", f"Accumulating {ACCUMULATE} micro-batches, communicating every time / only at the end:", ""]
        lines += [f"- {b}, {m}: {gain}" for (b, m), gain in zip(columns, gains, strict=True)]
    return "\n".join(lines) + "\n"


@click.command()
@click.option("--backend", "backends", type=click.Choice(["ddp", "horovod"]), multiple=True, default=["ddp", "horovod"])
@click.option("--model", "models", type=click.Choice(list(MODELS)), multiple=True, default=list(MODELS))
@click.option("--feature", "features", type=click.Choice([*FEATURES_ON, COMMUNICATING]), multiple=True)
@click.option("--rounds", type=click.IntRange(min=2), default=20, show_default=True)
@click.option("--ranks", type=click.IntRange(min=1), default=2, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), default=RESULTS, show_default=True)
def main(backends: list[str], models: list[str], features: list[str], rounds: int, ranks: int, output: Path) -> None:
    """Measure, print the table and keep it."""
    chosen = list(dict.fromkeys([PLAIN, *(features or [*FEATURES_ON, COMMUNICATING])]))
    results = {backend: measure(backend, models, chosen, rounds, ranks) for backend in backends}
    text = table(results, ranks)
    click.echo(text)
    output.mkdir(parents=True, exist_ok=True)
    (output / "feature_costs.md").write_text(text)
    (output / "feature_costs.json").write_text(json.dumps({"ranks": ranks, "seconds_per_micro_batch": results}))


if __name__ == "__main__":
    main()
