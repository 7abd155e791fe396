"""Trainers that differ in one feature, run in turns on the same ranks."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from loops import BATCH, CLASSES, FEATURES, MODELS, network
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import unitrain
from unitrain.backends.base import Backend

ACCUMULATE = 4
PLAIN, NORMALIZED, IMAGES = "baseline", "baseline with BatchNorm", "baseline with convolutions"
PLAIN_ALLREDUCES = "BatchNorm, plus plain allreduces as large as those of sync_batch_norm"
COMMUNICATING = "accumulate, communication after each micro-batch"
SIDE = 8  # images have as many pixels as other inputs have features


def sum_loss(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    """Return the loss as a sum, and the number of tokens."""
    return cross_entropy(output, target, reduction="sum"), len(target)


def build_normalized(hidden: list[int]) -> nn.Sequential:
    """Return the network with a BatchNorm after each hidden layer."""
    layers: list[nn.Module] = []
    for width, layer in zip([*hidden, CLASSES], network(hidden)[::2], strict=True):
        layers += [layer, nn.BatchNorm1d(width), nn.ReLU()]
    return nn.Sequential(*layers[:-2])


class _AllreduceInBothPasses(torch.autograd.Function):
    """The identity function, with one allreduce in the forward pass and one in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.width = x.shape[1]
        _plain_allreduce(torch.zeros(2 * ctx.width + 3, dtype=torch.float64))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        _plain_allreduce(torch.zeros(2 * ctx.width, dtype=torch.float64))
        return gradient


def _plain_allreduce(tensor: Tensor) -> None:
    """Reduce `tensor` with torch.distributed. Poll without sleeping, which is faster for small tensors."""
    work = dist.all_reduce(tensor, async_op=True)
    while type(work) is dist.Work and not work.is_completed():
        os.sched_yield()
    work.wait()


class BatchNormWithAllreduces(nn.BatchNorm1d):
    """BatchNorm of local samples that reduces tensors of the same size as synchronized statistics and discards them."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(_AllreduceInBothPasses.apply(input))


def build_with_allreduces(hidden: list[int]) -> nn.Sequential:
    """Return the network with BatchNorm over local samples and the communication of a synchronized BatchNorm."""
    model = build_normalized(hidden)
    for module in model:
        if isinstance(module, nn.BatchNorm1d):
            module.__class__ = BatchNormWithAllreduces
    return model


def build_convolutional(hidden: list[int]) -> nn.Sequential:
    """Return a convolutional network whose step time is similar to that of `network(hidden)`."""
    channels = [1, *(width // 16 for width in hidden)]
    layers: list[nn.Module] = [nn.Unflatten(1, (1, SIDE, SIDE))]
    for before, after in itertools.pairwise(channels):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels[-1], CLASSES))


@dataclass(frozen=True, kw_only=True)
class Feature:
    """Differences from a plain Trainer: settings of TrainConfig, arguments of the Trainer, and the network. `baseline`
    is the name of the baseline Trainer, which differs only in the measured feature."""

    settings: dict[str, Any] = field(default_factory=dict)
    arguments: Callable[[], dict[str, Any]] = dict
    network: Callable[[list[int]], nn.Module] = network
    baseline: str = PLAIN


TRAINER_FEATURES = {
    PLAIN: Feature(),
    "max_grad_norm": Feature(settings={"max_grad_norm": 1.0}),
    "lr_scaling with warmup": Feature(
        settings={"lr_scaling": "linear", "reference_batch_size": BATCH, "warmup_steps": 10**6}
    ),
    "loss weighted by tokens": Feature(arguments=lambda: {"loss_fn": sum_loss}),
    "bf16": Feature(settings={"precision": "bf16"}),
    "fp16": Feature(settings={"precision": "fp16"}),
    "ema_decay": Feature(settings={"ema_decay": 0.999}),
    "compile": Feature(settings={"compile": True}),
    "compression fp16": Feature(settings={"compression": "fp16"}),
    "compression PowerSGD": Feature(settings={"compression": unitrain.PowerSGD(start_step=0)}),
    "GradientWatch": Feature(arguments=lambda: {"callbacks": [unitrain.GradientWatch()]}),
    NORMALIZED: Feature(network=build_normalized, baseline=NORMALIZED),
    "sync_batch_norm": Feature(settings={"sync_batch_norm": True}, network=build_normalized, baseline=NORMALIZED),
    PLAIN_ALLREDUCES: Feature(network=build_with_allreduces, baseline=NORMALIZED),
    IMAGES: Feature(network=build_convolutional, baseline=IMAGES),
    "channels_last": Feature(settings={"channels_last": True}, network=build_convolutional, baseline=IMAGES),
    "accumulate": Feature(settings={"gradient_accumulation_steps": ACCUMULATE}),
}
# The measured features and their baselines.
BASELINES = {**{name: feature.baseline for name, feature in TRAINER_FEATURES.items()}, COMMUNICATING: PLAIN}
Turn = Callable[[int], None]

_prepared: dict[tuple[str, str], Turn] = {}


def take_turn(backend: Backend, feature_name: str, model: str, seed: int) -> float:
    """Train one epoch and return the seconds per micro-batch, measured between barriers. All ranks must call this
    function."""
    if (feature_name, model) not in _prepared:
        _prepared[feature_name, model] = _prepare(backend, feature_name, model)
    backend.barrier()
    started = time.perf_counter()
    _prepared[feature_name, model](seed)
    backend.barrier()
    return (time.perf_counter() - started) / _num_micro_batches(model)


def _num_micro_batches(model: str) -> int:
    steps = MODELS[model][1] // 2
    return steps - steps % ACCUMULATE


def _prepare(backend: Backend, feature_name: str, model_name: str) -> Turn:
    torch.manual_seed(1)
    samples = _num_micro_batches(model_name) * BATCH * backend.size
    data = TensorDataset(torch.randn(samples, FEATURES), torch.randint(0, CLASSES, (samples,)))
    feature = TRAINER_FEATURES.get(feature_name, TRAINER_FEATURES[PLAIN])
    model = feature.network(MODELS[model_name][0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    if feature_name == COMMUNICATING:
        return _prepare_communicating_loop(backend, model, optimizer, data)
    config = unitrain.TrainConfig(max_epochs=1, batch_size=BATCH, progress="off", **feature.settings)
    arguments = {"loss_fn": cross_entropy, **feature.arguments()}
    trainer = unitrain.Trainer(model, optimizer, backend=backend, config=config, **arguments)

    def turn(seed: int) -> None:
        trainer.progress.reset()
        trainer.fit(data)

    return turn


def _prepare_communicating_loop(
    backend: Backend, model: nn.Module, optimizer: torch.optim.Optimizer, data: TensorDataset
) -> Turn:
    model = backend.distributed_model(model)
    optimizer = backend.distributed_optimizer(optimizer, model)
    inputs, targets = data.tensors

    def turn(seed: int) -> None:
        order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(seed))
        for micro_step, chosen in enumerate(order[backend.rank :: backend.size].split(BATCH), 1):
            (cross_entropy(model(inputs[chosen]), targets[chosen]) / ACCUMULATE).backward()
            if micro_step % ACCUMULATE == 0:
                optimizer.step()
                optimizer.zero_grad()

    return turn
