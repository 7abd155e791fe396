"""Trainers that differ in one feature, for ranks that take turns."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from loops import BATCH, CLASSES, FEATURES, MODELS, network
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import unitrain
from unitrain.backends.base import Backend
from unitrain.data.order import Cursor

ACCUMULATE = 4
PLAIN, COMMUNICATING = "nothing", "accumulate, communicating every time"


def summed(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    """Return the loss as a sum over so many tokens."""
    return cross_entropy(output, target, reduction="sum"), len(target)


# What differs from a plain Trainer: settings of TrainConfig, and arguments of the Trainer.
FEATURES_ON: dict[str, tuple[dict[str, Any], Callable[[], dict[str, Any]]]] = {
    PLAIN: ({}, dict),
    "clip_norm": ({"clip_norm": 1.0}, dict),
    "lr_scaling with warm-up": (
        {"lr_scaling": "linear", "reference_batch_size": BATCH, "warmup_steps": 10**6},
        dict,
    ),
    "weights by tokens": ({}, lambda: {"loss_fn": summed}),
    "bf16": ({"precision": "bf16"}, dict),
    "fp16": ({"precision": "fp16"}, dict),
    "GradientWatch": ({}, lambda: {"callbacks": [unitrain.GradientWatch()]}),
    "accumulate": ({"accumulate": ACCUMULATE}, dict),
}
Turn = Callable[[int], None]

_prepared: dict[tuple[str, str], Turn] = {}


def take_turn(backend: Backend, feature: str, model: str, number: int) -> float:
    """Train one epoch and return seconds per micro-batch, from barrier to barrier. All ranks call it."""
    if (feature, model) not in _prepared:
        _prepared[feature, model] = _prepare(backend, feature, model)
    backend.barrier()
    started = time.perf_counter()
    _prepared[feature, model](number)
    backend.barrier()
    return (time.perf_counter() - started) / _micro_steps(model)


def _micro_steps(model: str) -> int:
    steps = MODELS[model][1] // 2
    return steps - steps % ACCUMULATE


def _prepare(backend: Backend, feature: str, name: str) -> Turn:
    torch.manual_seed(1)
    samples = _micro_steps(name) * BATCH * backend.size
    data = TensorDataset(torch.randn(samples, FEATURES), torch.randint(0, CLASSES, (samples,)))
    model = network(MODELS[name][0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    if feature == COMMUNICATING:
        return _communicating(backend, model, optimizer, data)
    settings, arguments = FEATURES_ON[feature]
    config = unitrain.TrainConfig(epochs=1, batch_size=BATCH, progress="off", **settings)
    loss_fn, others = cross_entropy, arguments()
    trainer = unitrain.Trainer(
        model, optimizer, others.pop("loss_fn", loss_fn), backend=backend, config=config, **others
    )

    def turn(number: int) -> None:
        trainer.run.cursor = Cursor()
        trainer.fit(data)

    return turn


def _communicating(backend: Backend, model: nn.Module, optimizer: torch.optim.Optimizer, data: TensorDataset) -> Turn:
    model = backend.distributed_model(model)
    optimizer = backend.distributed_optimizer(optimizer, model)
    inputs, targets = data.tensors

    def turn(number: int) -> None:
        order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(number))
        for micro_step, chosen in enumerate(order[backend.rank :: backend.size].split(BATCH), 1):
            (cross_entropy(model(inputs[chosen]), targets[chosen]) / ACCUMULATE).backward()
            if micro_step % ACCUMULATE == 0:
                optimizer.step()
                optimizer.zero_grad()

    return turn
