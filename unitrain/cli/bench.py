"""`unitrain bench`: how fast collectives and training are here, and what to expect of more ranks."""

from __future__ import annotations

from pathlib import Path

import click

from unitrain.cli.bench_collectives import collectives
from unitrain.cli.bench_options import told
from unitrain.cli.bench_predict import predict
from unitrain.cli.bench_train import train


@click.group()
def bench() -> None:
    """Measure collectives and training on every backend in turn, and predict more ranks."""


@bench.command()
@click.argument("before", type=click.Path(path_type=Path))
@click.argument("after", type=click.Path(path_type=Path))
def compare(before: Path, after: Path) -> None:
    """Compare two results: how much faster AFTER is than BEFORE, and whether that is more than noise.

    \b
      unitrain bench compare before.json after.json
    """
    with told():
        from unitrain.bench import comparison, results, tables

        differences, alone = comparison.compare(results.read(before), results.read(after))
    console = tables.console()
    console.print(tables.differences(differences))
    for what in alone:
        console.print(f"only in one: {what}", markup=False)


for command in (collectives, train, predict):
    bench.add_command(command)
