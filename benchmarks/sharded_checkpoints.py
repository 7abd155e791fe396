"""Time to save a checkpoint in the sharded format, compared with gathering the state on rank 0.

The optimizer state is sharded in both cases. The formats take turns on the same ranks, in a new order in every round.
The time is that of the slowest rank, from the call until the checkpoint is complete on disk.

    python benchmarks/sharded_checkpoints.py    # starts its own ranks; writes benchmarks/results/sharded_checkpoints.*
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import torch
from tables import BACKENDS, RESULTS, ratio, save_results
from torch import nn
from turns import measure

from unitrain import TrainConfig
from unitrain.backends.base import Backend
from unitrain.checkpoint.checkpointer import Checkpointer

FULL, SHARDED = WAYS = ("full", "sharded")
WIDTH = 2048
# Adam has 12 bytes of parameters and state per parameter.
LAYERS = {"0.1 GB": 2, "1 GB": 20}

_built: dict[str, tuple[nn.Module, torch.optim.Optimizer]] = {}


def build(backend: Backend, size: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model with `size` of parameters and Adam state, which is sharded."""
    if size not in _built:
        model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS[size])])
        optimizer = torch.optim.Adam(model.parameters())
        backend.distributed_optimizer(optimizer, model, shard="state")
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
        _built.clear()
        _built[size] = model, optimizer
    return _built[size]


def take_turn(backend: Backend, way: str, size: str, number: int) -> float:
    """Save one checkpoint, and return the seconds it took on this rank."""
    model, optimizer = build(backend, size)
    folder: Path = backend.broadcast_object(Path(tempfile.mkdtemp(prefix="unitrain-")) if backend.rank == 0 else None)
    settings: dict[str, Any] = {"checkpoint_format": way, "async_checkpoints": False}
    checkpointer = Checkpointer(TrainConfig(max_steps=1, shard="state", output_dir=folder, **settings), backend)
    backend.barrier()
    started = time.perf_counter()
    checkpointer.save(1, model, optimizer, None, {}, {"step": 1})
    seconds = time.perf_counter() - started
    backend.barrier()
    if backend.rank == 0:
        shutil.rmtree(folder)
    return seconds


@click.command()
@click.option("--backend", "backends", type=click.Choice(BACKENDS), multiple=True, default=BACKENDS)
@click.option("--size", "sizes", type=click.Choice(list(LAYERS)), multiple=True, default=("1 GB",), show_default=True)
@click.option("--ranks", type=click.IntRange(min=1), default=2, show_default=True)
@click.option("--rounds", type=click.IntRange(min=2), default=5, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), default=RESULTS, show_default=True)
def main(backends: list[str], sizes: list[str], ranks: int, rounds: int, output: Path) -> None:
    """Measure, print the table and save it."""
    results = {backend: measure(backend, sizes, WAYS, take_turn, rounds, ranks) for backend in backends}
    lines = [
        "# Saving a sharded checkpoint",
        "",
        f'{ranks} ranks on one host with {os.cpu_count()} CPU cores; Adam with `shard="state"`; torch '
        f"{torch.__version__}. Seconds until the checkpoint is complete on disk, and the time of the sharded format / "
        "time of the full format in the same round. Medians; in brackets the interquartile range. Command: "
        "`python benchmarks/sharded_checkpoints.py`.",
        "",
        "| backend, size | full | sharded | ratio |",
        "|---|---|---|---|",
    ]
    for backend, by_size in results.items():
        for size, seconds in by_size.items():
            medians = " | ".join(f"{statistics.median(seconds[way]):.2f} s" for way in WAYS)
            lines.append(f"| {backend}, {size} | {medians} | {ratio(seconds[SHARDED], seconds[FULL])} |")
    save_results(lines, "sharded_checkpoints", output, ranks=ranks, seconds=results)


if __name__ == "__main__":
    main()
