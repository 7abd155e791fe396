"""What compressing gradients does to the time of a step, on either backend.

Loops that differ in `compression` only take turns on the same ranks, in a new order every round; so does DDP with the
hook of torch, which adds up in half precision whatever the transport makes of it. Quoted is the time of a step with
compression / without, of the same round: below 1, it is faster. Ranks on one host send through its memory, so this is
what compression costs; what it saves grows with the slowness of the network.

    python benchmarks/compression.py            # starts its own ranks; writes benchmarks/results/compression.*
"""

from __future__ import annotations

from pathlib import Path

import click
from compressed_loops import HOOKS, WAYS, take_turn
from tables import columns, frame, keep, options, rows
from turns import measure


@click.command()
@click.option("--way", "ways", type=click.Choice([*WAYS, *HOOKS]), multiple=True)
@options(rounds=20, models=["25M"])
def main(backends: list[str], models: list[str], ways: list[str], rounds: int, ranks: int, output: Path) -> None:
    """Measure, print the table and keep it."""
    against = dict.fromkeys(["none", *(ways or [*WAYS, *HOOKS])], "none")
    results = {backend: measure(backend, models, list(against), take_turn, rounds, ranks) for backend in backends}
    quoted = "Time of a step with compression / without, in the same round: below 1, it is faster."
    header = ["compression", *columns(results)]
    lines = frame(
        "What compressing gradients does to a step", quoted, "python benchmarks/compression.py", ranks, header
    )
    keep([*lines, *rows(results, against)], "compression", output, ranks=ranks, seconds_per_step=results)


if __name__ == "__main__":
    main()
