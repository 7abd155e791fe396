"""Step time with logical ranks, compared with ordinary reduction of the same micro-batches.

The Trainers take turns on the same ranks, in a new order in every round. With one logical rank per process, the
micro-batches are the same as without logical ranks. With two logical ranks per process, they are the same as with
gradient accumulation over two micro-batches.

    python benchmarks/logical_ranks.py            # starts its own ranks; writes benchmarks/results/logical_ranks.*
"""

from __future__ import annotations

from pathlib import Path

import click
from logical_rank_turns import BASELINES, take_turn
from tables import columns, header_lines, options, rows, save_results
from turns import measure


@click.command()
@options(rounds=20)
def main(backends: list[str], models: list[str], rounds: int, ranks: int, output: Path) -> None:
    """Measure, print the table and save it."""
    results = {backend: measure(backend, models, list(BASELINES), take_turn, rounds, ranks) for backend in backends}
    quoted = (
        "Time of a step with logical ranks, divided by that of the ordinary reduction with the same micro-batches, in "
        "the same round."
    )
    header = ["reduction", *columns(results)]
    lines = header_lines("Logical ranks", quoted, "python benchmarks/logical_ranks.py", ranks, header)
    lines += rows(results, BASELINES)
    save_results(lines, "logical_ranks", output, ranks=ranks, seconds_per_step=results)


if __name__ == "__main__":
    main()
