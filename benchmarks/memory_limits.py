"""The largest batch and the largest model under a memory limit per rank, for each setting that saves memory.

Two ranks train a transformer with Adam in float32 for two steps. The limit applies to the peak resident memory of a
rank, minus the resident memory before the model is built. A search finds the largest batch for a fixed model, and the
largest number of blocks for a small batch, whose peak is below the limit. A row takes about a minute and is saved when
it is complete. Rows of earlier runs with the same limit, backend and ranks are kept.

    python benchmarks/memory_limits.py            # starts its own ranks; writes benchmarks/results/memory_limits.*
    python benchmarks/memory_limits.py --shard state --checkpoint-activations none      # one row
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, get_args

import click
import torch
from limited_training import LENGTH, TextClassifier, measure_peak_bytes
from tables import RESULTS, save_results

from unitrain.backends.base import ShardingMode
from unitrain.testing import RankGroup

MB = 2**20
BLOCKS, BATCH = 8, 4  # fixed number of blocks and fixed batch size
_SHARDS: tuple[str, ...] = get_args(ShardingMode)
_ACTIVATIONS = ("none", "blocks")


def find_largest(peak: Callable[[int], int], limit: int, first_size: int, step: int) -> int:
    """Return the largest multiple of `step` whose peak is at most `limit`, or 0. The peak grows about linearly.

    The search starts with the sizes `first_size` and 2 * `first_size`. It continues with linear interpolation, or with
    extrapolation to at most twice the largest size so far, and ends when a size fits and the next size does not.
    """
    known: dict[int, int] = {}

    def fits(size: int) -> bool:
        if size not in known:
            known[size] = peak(size)
        return known[size] <= limit

    fits(first_size)
    fits(2 * first_size)
    low, high = 0, 0  # the largest size that fits, and the smallest size that does not fit
    while True:
        low = max((size for size, used in known.items() if used <= limit), default=0)
        high = min((size for size, used in known.items() if used > limit), default=0)
        if high and high - low <= step:
            return low
        one, other = sorted(known, key=lambda size: abs(known[size] - limit))[:2]
        slope = max((known[one] - known[other]) / (one - other), 1.0)
        guess = int((one + (limit - known[one]) / slope) // step * step)
        # For small sizes, the peak may not depend on the size, so extrapolation is limited.
        fits(min(max(guess, low + step), high - step if high else 2 * max(known)))


def measure(backend: str, shard: str, is_checkpointed: bool, ranks: int, limit: int) -> dict[str, Any]:
    """Return a row with the largest batch, the largest number of blocks and the number of parameters of this model."""

    def peak(blocks: int, batch: int) -> int:
        with RankGroup(backend, ranks) as group:
            peaks: list[int] = group.run(measure_peak_bytes, shard, is_checkpointed, blocks, batch, timeout_seconds=200)
        click.echo(f"{shard}, {is_checkpointed=}, {blocks=}, {batch=}: {max(peaks) / MB:.0f} MB", err=True)
        return max(peaks)

    batch = find_largest(lambda batch: peak(BLOCKS, batch), limit, 32, 4)
    blocks = find_largest(lambda blocks: peak(blocks, BATCH), limit, 16, 1)
    parameters = sum(parameter.numel() for parameter in TextClassifier(blocks).parameters())
    row = {"shard": shard, "checkpoint_activations": is_checkpointed, "batch": batch, "blocks": blocks}
    return {**row, "parameters": parameters}


def table(rows: list[dict[str, Any]], backend: str, ranks: int, limit: int) -> list[str]:
    """Return the table in Markdown."""
    rows = sorted(rows, key=lambda row: (_SHARDS.index(row["shard"]), row["checkpoint_activations"]))
    base = rows[0]
    small = sum(parameter.numel() for parameter in TextClassifier(BLOCKS).parameters())
    lines = [
        "# The largest batch and the largest model under a memory limit",
        "",
        f"{ranks} ranks of {backend} on one host without a GPU, a limit of {limit // MB} MB per rank for everything "
        f"except Python and the libraries, Adam in float32, {LENGTH} tokens per sample; torch {torch.__version__}, "
        f"Python {platform.python_version()}, {os.cpu_count()} CPU cores. Batch: samples per rank, for a model with "
        f"{small / 1e6:.2f} million parameters. Model: parameters in millions, for {BATCH} samples per rank. "
        "In brackets: relative to the first row. Command: `python benchmarks/memory_limits.py`.",
        "",
        "| shard | checkpoint_activations | largest batch | largest model |",
        "|---|---|---|---|",
    ]
    for row in rows:
        batch, parameters = row["batch"], row["parameters"]
        lines.append(
            f'| "{row["shard"]}" | {"blocks" if row["checkpoint_activations"] else "none"} | '
            f"{batch} ({batch / base['batch']:.2f}) | {parameters / 1e6:.1f} ({parameters / base['parameters']:.2f}) |"
        )
    return lines


@click.command()
@click.option("--output", type=click.Path(path_type=Path), default=RESULTS, show_default=True)
@click.option("--ranks", type=click.IntRange(min=1), default=2, show_default=True)
@click.option("--limit", "limit_mb", type=click.IntRange(min=1), default=200, show_default=True, metavar="MB")
@click.option("--shard", "shards", type=click.Choice(_SHARDS), multiple=True, default=_SHARDS, show_default=True)
@click.option("--checkpoint-activations", "checkpointed", type=click.Choice(_ACTIVATIONS), multiple=True,
              default=_ACTIVATIONS, show_default=True)  # fmt: skip
@click.option("--backend", type=click.Choice(["ddp", "horovod"]), default="ddp", show_default=True)
def main(output: Path, ranks: int, limit_mb: int, shards: list[str], checkpointed: list[str], backend: str) -> None:
    """Measure, print the table and save it."""
    limit = limit_mb * MB
    settings = {"backend": backend, "ranks": ranks, "limit_bytes": limit}
    saved = output / "memory_limits.json"
    earlier = json.loads(saved.read_text()) if saved.exists() else {}
    rows = earlier["rows"] if settings.items() <= earlier.items() else []
    for shard, is_checkpointed in product(shards, [name == "blocks" for name in checkpointed]):
        rows = [row for row in rows if (row["shard"], row["checkpoint_activations"]) != (shard, is_checkpointed)]
        rows.append(measure(backend, shard, is_checkpointed, ranks, limit))
        save_results(table(rows, backend, ranks, limit), "memory_limits", output, **settings, rows=rows)


if __name__ == "__main__":
    main()
