"""Overhead per micro-batch of each Trainer feature, and the time that accumulation with one reduction per step saves.

Trainers that differ in one setting take turns on the same ranks, in a new order in every round. The table shows the
ratio of the micro-batch times with and without the feature in the same round. For example, 1.05 is five percent slower.
`gradient_accumulation_steps=4` is also compared with four micro-batches that each reduce gradients, as in a loop
without `no_sync`.

    python benchmarks/feature_costs.py            # starts its own ranks; writes benchmarks/results/feature_costs.*
"""

from __future__ import annotations

from pathlib import Path

import click
from features import ACCUMULATE, BASELINES, COMMUNICATING, take_turn
from tables import Results, columns, header_lines, options, ratio, rows, save_results
from turns import measure


def table(results: Results, baseline_by_feature: dict[str, str], ranks: int) -> list[str]:
    quoted = (
        "Time of a micro-batch with the feature, divided by that of the baseline without features, for the same model "
        "and in the same round; below 1, the feature reduces the time."
    )
    header = ["feature", *columns(results)]
    lines = header_lines("Cost of features", quoted, "python benchmarks/feature_costs.py", ranks, header)
    lines += rows(results, baseline_by_feature)
    if {"accumulate", COMMUNICATING} <= set(baseline_by_feature):
        lines += [
            "",
            f"Time of {ACCUMULATE} accumulated micro-batches with communication after each, divided by that with "
            "communication after the last:",
            "",
        ]
        for column, seconds in columns(results).items():
            lines.append(f"- {column}: {ratio(seconds[COMMUNICATING], seconds['accumulate'])}")
    return lines


@click.command()
@click.option("--feature", "features", type=click.Choice(list(BASELINES)), multiple=True)
@options(rounds=20)
def main(backends: list[str], models: list[str], features: list[str], rounds: int, ranks: int, output: Path) -> None:
    """Measure, print the table and save it."""
    wanted = {name for feature in features or BASELINES for name in (feature, BASELINES[feature])}
    baseline_by_feature = {feature: base for feature, base in BASELINES.items() if feature in wanted}
    results = {
        backend: measure(backend, models, list(baseline_by_feature), take_turn, rounds, ranks) for backend in backends
    }
    save_results(
        table(results, baseline_by_feature, ranks),
        "feature_costs",
        output,
        ranks=ranks,
        seconds_per_micro_batch=results,
    )


if __name__ == "__main__":
    main()
