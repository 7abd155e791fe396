"""Trainers with and without logical ranks, run in turns on the same ranks."""

from __future__ import annotations

import time

import torch
from loops import BATCH, CLASSES, FEATURES, MODELS, network, sgd
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import unitrain
from unitrain.backends.base import Backend

ORDINARY, LOGICAL = "ordinary reduction", "a logical rank per process"
ACCUMULATED, TWO = "ordinary reduction, 2 accumulated micro-batches", "2 logical ranks per process"
BASELINES = {ORDINARY: ORDINARY, LOGICAL: ORDINARY, ACCUMULATED: ACCUMULATED, TWO: ACCUMULATED}

_prepared: dict[tuple[str, str], tuple[unitrain.Trainer, TensorDataset]] = {}


def take_turn(backend: Backend, reduction: str, model: str, round_number: int) -> float:
    """Train one epoch and return the seconds per step, measured between barriers. All ranks must call this function."""
    steps = MODELS[model][1]
    if (reduction, model) not in _prepared:
        _prepared[reduction, model] = _prepare(backend, reduction, model)
    trainer, data = _prepared[reduction, model]
    trainer.progress.reset()
    backend.barrier()
    started = time.perf_counter()
    trainer.fit(data)
    backend.barrier()
    return (time.perf_counter() - started) / steps


def _prepare(backend: Backend, reduction: str, model_name: str) -> tuple[unitrain.Trainer, TensorDataset]:
    torch.manual_seed(1)
    factor = 2 if reduction in (ACCUMULATED, TWO) else 1
    settings = {
        ORDINARY: {},
        ACCUMULATED: {"gradient_accumulation_steps": 2},
        LOGICAL: {"logical_ranks": backend.size},
        TWO: {"logical_ranks": 2 * backend.size},
    }[reduction]
    samples = MODELS[model_name][1] * BATCH * backend.size * factor
    data = TensorDataset(torch.randn(samples, FEATURES), torch.randint(0, CLASSES, (samples,)))
    config = unitrain.TrainConfig(max_epochs=1, batch_size=BATCH, progress="off", **settings)
    model = network(MODELS[model_name][0])
    return unitrain.Trainer(model, sgd(model), cross_entropy, backend=backend, config=config), data
