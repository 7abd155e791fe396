"""Time and memory of training with sharded parameters, compared with replicated parameters and torch's `fully_shard`.

Loops with Adam take turns on the same ranks, in a new order in every round. The blocks are the linear layers of the
model. The first table shows the step time relative to replicated parameters in the same round. The second table shows
the memory of weights, gradients and optimizer state in bytes per parameter, on the rank with the highest value.

    python benchmarks/sharded_parameters.py       # starts its own ranks; writes benchmarks/results/sharded_parameters.*
"""

from __future__ import annotations

from pathlib import Path

import click
from sharded_parameter_loops import REPLICATED, WAYS, persistent_bytes, take_turn
from tables import Results, columns, header_lines, options, rows, save_results
from turns import measure

from unitrain.testing import RankGroup

SIZES = (2, 3, 4)


def count_bytes(backend: str, model: str) -> dict[str, dict[int, tuple[float, float]]]:
    """Return, by way and number of ranks, the bytes per parameter on the rank with the most, and by the formula."""
    found: dict[str, dict[int, tuple[float, float]]] = {way: {} for way in WAYS}
    for size in SIZES:
        with RankGroup(backend, size) as group:
            for way in WAYS:
                found[way][size] = max(group.run(persistent_bytes, way, model, timeout_seconds=200))
    return found


def table(results: Results, memory: dict[str, dict[int, tuple[float, float]]], ranks: int) -> list[str]:
    quoted = "Time of a step / time with replicated parameters in the same round; below 1, it is faster."
    header = ["parameters", *columns(results)]
    lines = header_lines("Sharded parameters", quoted, "python benchmarks/sharded_parameters.py", ranks, header, "Adam")
    lines += rows(results, dict.fromkeys(WAYS, REPLICATED))
    lines += ["", "Bytes per parameter on the rank with the most (formula: 16, or 16 / ranks):", ""]
    lines += [f"| parameters | {' | '.join(f'{size} ranks' for size in SIZES)} |", "|---" * (1 + len(SIZES)) + "|"]
    for way, by_size in memory.items():
        shown = [f"{measured:.3f} ({measured / formula - 1:+.2%})" for measured, formula in by_size.values()]
        lines.append(f"| {way} | {' | '.join(shown)} |")
    return lines


@click.command()
@options(rounds=12, models=("25M",))
def main(backends: list[str], models: list[str], rounds: int, ranks: int, output: Path) -> None:
    """Measure, print the tables and save them."""
    results = {backend: measure(backend, models, WAYS, take_turn, rounds, ranks) for backend in backends}
    memory = count_bytes(backends[0], models[-1])
    save_results(
        table(results, memory, ranks), "sharded_parameters", output, ranks=ranks, seconds_per_step=results, bytes=memory
    )


if __name__ == "__main__":
    main()
