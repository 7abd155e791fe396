"""Functions for the tables of benchmarks: options, headings, ratios per round, and output files."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import torch
from loops import BATCH, MEASURED, MODELS

RESULTS = Path(__file__).parent / "results"
BACKENDS = ("ddp", "horovod")
# Seconds by variant (such as a loop or a method) and round, and the same by backend and model.
Seconds = dict[str, list[float]]
Results = Mapping[str, Mapping[str, Seconds]]


def options(*, rounds: int, models: Sequence[str] = MEASURED) -> Callable[[Callable[..., None]], Any]:
    """Return a decorator that adds the options `backends`, `models`, `rounds`, `ranks` and `output` to a main
    function."""

    def decorate(main: Callable[..., None]) -> Any:
        for option in (
            click.option("--output", type=click.Path(path_type=Path), default=RESULTS, show_default=True),
            click.option("--ranks", type=click.IntRange(min=1), default=2, show_default=True),
            click.option("--rounds", type=click.IntRange(min=2), default=rounds, show_default=True),
            click.option("--model", "models", type=click.Choice(list(MODELS)), multiple=True, default=models),
            click.option("--backend", "backends", type=click.Choice(BACKENDS), multiple=True, default=BACKENDS),
        ):
            main = option(main)
        return main

    return decorate


def header_lines(
    title: str, quoted: str, command: str, ranks: int, header: Sequence[str], optimizer: str = "SGD with momentum"
) -> list[str]:
    """Return the lines above the rows. `quoted` explains the values, and `command` is the command that reproduces
    them."""
    return [
        f"# {title}",
        "",
        f"{ranks} ranks on one host, with one core and one thread each and without a GPU; {BATCH} samples per rank and "
        f"micro-batch, {optimizer}; torch {torch.__version__}, Python {platform.python_version()}, "
        f"{os.cpu_count()} CPU cores. {quoted} Medians; in brackets the interquartile range of all rounds. "
        f"Command: `{command}`.",
        "",
        f"| {' | '.join(header)} |",
        "|---" * len(header) + "|",
    ]


def ratio(ones: Sequence[float], others: Sequence[float]) -> str:
    """Return the median and the quartiles of the ratios per round."""
    low, middle, high = statistics.quantiles(
        [one / other for one, other in zip(ones, others, strict=True)], n=4, method="inclusive"
    )
    return f"**{middle:.3f}** [{low:.3f}, {high:.3f}]"


def columns(results: Results) -> dict[str, Seconds]:
    """Return the seconds by column name, with one column per backend and model."""
    return {f"{backend}, {model}": seconds for backend, models in results.items() for model, seconds in models.items()}


def rows(results: Results, baselines: Mapping[str, str]) -> list[str]:
    """Return a line for each variant in `baselines`, which maps variants to their baselines. The line contains ratios
    of times, or milliseconds if a variant is its own baseline."""
    lines = []
    for variant, baseline in baselines.items():
        shown = [
            f"{statistics.median(seconds[variant]) * 1000:.2f} ms"
            if variant == baseline
            else ratio(seconds[variant], seconds[baseline])
            for seconds in columns(results).values()
        ]
        lines.append(f"| {' | '.join([variant, *shown])} |")
    return lines


def save_results(lines: Sequence[str], name: str, output: Path, **figures: Any) -> None:
    """Print the table. Write the table to `name`.md, and the underlying `figures` to `name`.json."""
    text = "\n".join(lines) + "\n"
    click.echo(text)
    output.mkdir(parents=True, exist_ok=True)
    (output / f"{name}.md").write_text(text)
    (output / f"{name}.json").write_text(json.dumps(figures))
