"""`unitrain bench`: benchmark collectives and training, compare results, and predict scaling."""

from __future__ import annotations

from pathlib import Path

import click

from unitrain.cli.bench_collectives import collectives
from unitrain.cli.bench_options import report_errors
from unitrain.cli.bench_predict import predict
from unitrain.cli.bench_train import train


@click.group()
def bench() -> None:
    """Benchmark collectives and training on every backend, and predict scaling."""


@bench.command()
@click.argument("before", type=click.Path(path_type=Path))
@click.argument("after", type=click.Path(path_type=Path))
def compare(before: Path, after: Path) -> None:
    """Compare two results: report the speedup of AFTER over BEFORE, and whether it is statistically significant.

    \b
      unitrain bench compare before.json after.json
    """
    with report_errors():
        from unitrain.bench import comparison, results, tables

        differences, unmatched = comparison.compare(results.read(before), results.read(after))
    console = tables.create_console()
    console.print(tables.differences_table(differences))
    for name in unmatched:
        console.print(f"only in one result: {name}", markup=False)


for command in (collectives, train, predict):
    bench.add_command(command)
