"""What a run is, in plain numbers and words, for those who read its record."""

from __future__ import annotations

import platform
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from unitrain.backends.base import Backend
from unitrain.config import TrainConfig
from unitrain.data.training_data import TrainingData

_PACKAGES = ("unitrain", "horovod", "numpy")


def describe_parts(model: nn.Module, optimizer: Optimizer, scheduler: Any) -> dict[str, Any]:
    """Return what is trained, and by what: names of classes, and the number of parameters."""
    return {
        "model": type(model).__name__,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "optimizer": type(optimizer).__name__,
        "scheduler": None if scheduler is None else type(scheduler).__name__,
    }


def describe_start(config: TrainConfig, backend: Backend, share: TrainingData) -> dict[str, Any]:
    """Return when and where a run starts, on what share of the data, with which settings and versions."""
    cuda = backend.device.type == "cuda"
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "backend": backend.name,
        "transport": backend.transport,
        "size": backend.size,
        "num_nodes": backend.num_nodes,
        "device": torch.cuda.get_device_name(backend.device) if cuda else backend.device.type,
        "samples_per_epoch": share.samples_in_epoch(),
        "steps_per_epoch": share.steps_in_epoch(),
        "batch_size": share.batch_size,
        "global_batch_size": share.global_batch_size,
        "versions": {"python": platform.python_version(), "torch": torch.__version__, **_versions()},
        "config": {name: value for name, value in asdict(config).items() if value is not None},
    }


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # a checkout that was not installed, or no Horovod here
            continue
    return found
