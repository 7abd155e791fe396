"""Training loops for pipeline.py: plain torch in one process, and pipeline stages."""

from __future__ import annotations

import importlib
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import unitrain
from unitrain.backends.base import Backend

SAMPLES = {"ResNet": 16, "MLP": 16384}


@dataclass(frozen=True)
class TrainingVariant:
    """A benchmarked variant; `stages` is 0 for plain torch in one process."""

    stages: int = 0
    micro_batches: int = 1
    schedule: str = "1f1b"
    checkpointed: bool = False
    balance: str = "memory"


ONE_PROCESS = "one process"
VARIANTS = {
    ONE_PROCESS: TrainingVariant(),
    "one process, 4 micro-batches": TrainingVariant(micro_batches=4),
    "one process, checkpointing": TrainingVariant(checkpointed=True),
    "2 stages, 1F1B": TrainingVariant(2, 4),
    "2 stages, 1F1B, checkpointing": TrainingVariant(2, 4, checkpointed=True),
    "2 stages, GPipe, checkpointing": TrainingVariant(2, 4, "gpipe", checkpointed=True),
    "2 stages, 1F1B, 8 micro-batches, checkpointing": TrainingVariant(2, 8, checkpointed=True),
    "2 stages, 1F1B, balanced by time": TrainingVariant(2, 4, balance="time"),
}


class ResidualBlock(nn.Module):
    """The basic block of a ResNet."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        layers = (nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels))
        more = (nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels))
        self.layers = nn.Sequential(*layers, nn.ReLU(), *more)

    def forward(self, inputs: Tensor) -> Tensor:
        return (inputs + self.layers(inputs)).relu()


class HiddenLayer(nn.Sequential):
    """A hidden layer of an MLP."""


def build(model: str) -> tuple[nn.Sequential, str, Tensor, Tensor]:
    """Return a model, the class name of its blocks, inputs and targets. Activations use most of the memory."""
    torch.manual_seed(0)
    samples = SAMPLES[model]
    targets = torch.randint(10, (samples,))
    if model == "ResNet":
        blocks: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1), *(ResidualBlock(16) for _ in range(8))]
        head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
        return nn.Sequential(*blocks, *head), "ResidualBlock", torch.randn(samples, 3, 96, 96), targets
    layers = [HiddenLayer(nn.Linear(128, 128), nn.LayerNorm(128), nn.Tanh()) for _ in range(16)]
    return nn.Sequential(*layers, nn.Linear(128, 10)), "HiddenLayer", torch.randn(samples, 128), targets


def prepare(backend: Backend, model_name: str, variant: TrainingVariant) -> tuple[Callable[[], Any], list[int]]:
    """Return a function that runs one training step, and the number of blocks per stage."""
    model, block, inputs, targets = build(model_name)
    if variant.checkpointed:
        unitrain.checkpoint_activations(model, block)
    loss_fn = nn.CrossEntropyLoss()
    if not variant.stages:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

        def step_of_one_process() -> None:
            parts = zip(inputs.chunk(variant.micro_batches), targets.chunk(variant.micro_batches), strict=True)
            for values, labels in parts:
                (loss_fn(model(values), labels) * (len(labels) / len(targets))).backward()
            optimizer.step()
            optimizer.zero_grad()

        return step_of_one_process, [len(model)]
    pipeline = unitrain.Pipeline(
        model, backend, loss_fn, stages=variant.stages, micro_batches=variant.micro_batches, schedule=variant.schedule,
        balance=variant.balance, example_inputs=inputs,
    )  # fmt: skip
    stage_optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1e-3)

    def step() -> None:
        pipeline.forward_backward(inputs, targets)
        stage_optimizer.step()
        stage_optimizer.zero_grad()

    return step, pipeline.blocks_per_stage


def resident_bytes(key: str) -> int:
    """Return the current ("VmRSS") or peak ("VmHWM") resident memory of this process in bytes."""
    found = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def measure_peak_bytes(backend: Backend, model: str, variant: TrainingVariant) -> tuple[int, list[int]]:
    """Return the peak resident memory during two training steps, minus the resident memory before the model is built,
    and the number of blocks per stage."""
    if variant.stages:
        importlib.import_module("torch.distributed.pipelining")  # so that its memory is not counted
    nn.Conv2d(3, 16, 3)(torch.randn(2, 3, 8, 8)).sum().backward()
    backend.barrier()
    before = resident_bytes("VmRSS")
    step, blocks = prepare(backend, model, variant)
    Path("/proc/self/clear_refs").write_text("5")  # reset VmHWM, which includes the measurement of the blocks
    for _ in range(2):
        step()
    return resident_bytes("VmHWM") - before, blocks


_steps: dict[tuple[str, TrainingVariant], Callable[[], Any]] = {}


def measure_step_seconds(backend: Backend, model: str, variant: TrainingVariant) -> float:
    """Return the seconds of one training step. If `variant` uses one process, rank 0 trains and the other rank
    waits."""
    if (model, variant) not in _steps:
        _steps[model, variant], _ = prepare(backend, model, variant)
        if variant.stages or backend.rank == 0:
            _steps[model, variant]()
    backend.barrier()
    started = time.perf_counter()
    if variant.stages or backend.rank == 0:
        _steps[model, variant]()
    backend.barrier()
    return time.perf_counter() - started
