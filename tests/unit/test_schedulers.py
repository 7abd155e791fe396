"""Schedulers that step once per epoch, passed as objects or as functions that build them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import TensorDataset

from unitrain import ConfigError, TrainConfig, Trainer
from unitrain.backends.local import LocalBackend
from unitrain.data.sharding import TrainingShard
from unitrain.data.training_data import ShardSettings
from unitrain.planned_steps import remaining_steps, total_scheduler_steps
from unitrain.progress.training_progress import TrainingProgress

LOCAL = LocalBackend(torch.device("cpu"))


def build_plateau_scheduler(optimizer: torch.optim.Optimizer, total_steps: int = 4) -> ReduceLROnPlateau:
    return ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=10.0)


def train_and_return_rate(build_scheduler: Callable[..., Any], *, passes_function: bool, **settings: Any) -> float:
    """Train for four epochs, and return the final learning rate."""
    torch.manual_seed(0)
    model, data = torch.nn.Linear(3, 1), TensorDataset(torch.randn(16, 3), torch.randn(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = TrainConfig(max_epochs=4, batch_size=8, progress="off", **{"scheduler_interval": "epoch", **settings})
    chosen = build_scheduler if passes_function else build_scheduler(optimizer)
    trainer = Trainer(model, optimizer, torch.nn.functional.mse_loss, backend=LOCAL, config=config, scheduler=chosen)
    trainer.fit(data, data)
    learning_rate: float = optimizer.param_groups[0]["lr"]
    return learning_rate


def test_number_of_steps_is_exact_for_runs_of_the_maximum_length() -> None:
    progress = TrainingProgress()
    shard = TrainingShard(TensorDataset(torch.zeros(16)), LOCAL, ShardSettings(batch_size=8))  # 2 steps per epoch
    by_steps = TrainConfig(max_steps=2**63 - 1, batch_size=8, scheduler_interval="epoch")
    assert total_scheduler_steps(by_steps, progress, shard) == 2**62
    by_epochs = TrainConfig(max_epochs=2**63 - 1, batch_size=8)
    assert remaining_steps(by_epochs, progress, shard) == 2**64 - 2


@pytest.mark.parametrize("monitor", [None, "train_loss"])
def test_plateau_scheduler_may_be_built_by_a_function(monitor: str | None) -> None:
    found = train_and_return_rate(build_plateau_scheduler, passes_function=True, monitor=monitor)
    assert (
        found
        == train_and_return_rate(build_plateau_scheduler, passes_function=False, monitor=monitor)
        == pytest.approx(0.1 / 16)
    )


@pytest.mark.parametrize("passes_function", [True, False])
def test_plateau_scheduler_with_interval_step_raises(passes_function: bool) -> None:
    with pytest.raises(ConfigError, match="ReduceLROnPlateau needs the results of an epoch"):
        train_and_return_rate(build_plateau_scheduler, passes_function=passes_function, scheduler_interval="step")


@pytest.mark.parametrize("passes_function", [True, False])
def test_monitor_without_a_plateau_scheduler_raises(passes_function: bool) -> None:
    with pytest.raises(ConfigError, match="is used only by ReduceLROnPlateau"):
        train_and_return_rate(
            lambda optimizer, total_steps=4: StepLR(optimizer, 1), passes_function=passes_function, monitor="val_loss"
        )
