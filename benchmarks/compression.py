"""Effect of gradient compression on the step time, on both backends.

Loops that differ only in `compression` take turns on the same ranks, in a new order in every round. Two of the loops
use DDP with torch's communication hooks, which reduce in half precision, in an order that depends on the transport. The
table shows the ratio of the step times with and without compression in the same round. Below 1, compression is faster.
Ranks on one host communicate through memory, so the benchmark measures the overhead of compression. Slower networks
increase the benefit of compression.

    python benchmarks/compression.py            # starts its own ranks; writes benchmarks/results/compression.*
"""

from __future__ import annotations

from pathlib import Path

import click
from compressed_loops import COMPRESSIONS, HOOKS, take_turn
from tables import columns, header_lines, options, rows, save_results
from turns import measure


@click.command()
@click.option("--compression", "compressions", type=click.Choice([*COMPRESSIONS, *HOOKS]), multiple=True)
@options(rounds=20, models=["25M"])
def main(
    backends: list[str], models: list[str], compressions: list[str], rounds: int, ranks: int, output: Path
) -> None:
    """Measure, print the table and save it."""
    baselines = dict.fromkeys(["none", *(compressions or [*COMPRESSIONS, *HOOKS])], "none")
    results = {backend: measure(backend, models, list(baselines), take_turn, rounds, ranks) for backend in backends}
    quoted = (
        "Time of a step with compression, divided by that without, in the same round; below 1, compression is faster."
    )
    header = ["compression", *columns(results)]
    lines = header_lines(
        "Time of a step with gradient compression", quoted, "python benchmarks/compression.py", ranks, header
    )
    save_results([*lines, *rows(results, baselines)], "compression", output, ranks=ranks, seconds_per_step=results)


if __name__ == "__main__":
    main()
