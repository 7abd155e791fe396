"""Saves the same state in the full and the sharded format, in turns on the same ranks."""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from unitrain import TrainConfig
from unitrain.backends.base import Backend
from unitrain.checkpoint.checkpointer import CheckpointContents, Checkpointer

FULL, SHARDED = FORMATS = ("full", "sharded")
WIDTH = 2048
# With Adam, parameters and optimizer state have 12 bytes per parameter.
LAYERS = {"0.1 GB": 2, "1 GB": 20}

_built: dict[str, tuple[nn.Module, torch.optim.Optimizer]] = {}


def build(backend: Backend, size: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model and its Adam optimizer with sharded state. `size` is the total size of parameters and state."""
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


def take_turn(backend: Backend, checkpoint_format: str, size: str, round_number: int) -> float:
    """Save one checkpoint, and return the seconds on this rank."""
    model, optimizer = build(backend, size)
    folder: Path = backend.broadcast_object(Path(tempfile.mkdtemp(prefix="unitrain-")) if backend.rank == 0 else None)
    settings: dict[str, Any] = {"checkpoint_format": checkpoint_format, "async_checkpoints": False}
    checkpointer = Checkpointer(TrainConfig(max_steps=1, shard="state", output_dir=folder, **settings), backend)
    contents = CheckpointContents(
        step=1, model=model, optimizer=optimizer, average=None, training={}, manifest={"step": 1}
    )
    backend.barrier()
    started = time.perf_counter()
    checkpointer.save(contents)
    seconds = time.perf_counter() - started
    backend.barrier()
    if backend.rank == 0:
        shutil.rmtree(folder)
    return seconds
