"""Learning-rate scaling: value of the factor, restored learning rates, and resumed runs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import TensorDataset

from unitrain.backends.local import LocalBackend
from unitrain.config import TrainConfig
from unitrain.errors import CheckpointError
from unitrain.optim.learning_rate import LearningRateFactor
from unitrain.trainer import Trainer

LOCAL = LocalBackend(torch.device("cpu"))


def test_learning_rate_factor_is_determined_by_the_policy() -> None:
    assert LearningRateFactor("linear", 256, 1024, 0).factor_at(0) == 4.0
    assert LearningRateFactor("sqrt", 256, 1024, 0).factor_at(0) == 2.0
    assert LearningRateFactor("linear", 1024, 256, 0).factor_at(0) == 0.25
    assert math.isclose(LearningRateFactor("sqrt", 100, 200, 0).factor_at(9), math.sqrt(2))


def test_warmup_grows_linearly_from_1_to_the_full_factor() -> None:
    factor = LearningRateFactor("linear", 256, 1024, 6)
    assert [factor.factor_at(step) for step in (0, 1, 2, 3, 4, 5, 6, 7, 100)] == [1, 1.5, 2, 2.5, 3, 3.5, 4, 4, 4]
    assert str(factor) == "learning rates x 4 (linear scaling from batch size 256 to 1024), reached after 6 steps"


def create_data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(24, 4, generator=generator), torch.randn(24, 2, generator=generator))


def build_model_and_scheduler(rate: float) -> tuple[nn.Module, torch.optim.Optimizer, StepLR]:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    return model, optimizer, StepLR(optimizer, 3, gamma=0.5)


def train(rate: float, **settings: Any) -> tuple[list[Tensor], torch.optim.Optimizer]:
    model, optimizer, scheduler = build_model_and_scheduler(rate)
    config = TrainConfig(**{"max_epochs": 2, "batch_size": 4, "progress": "off", **settings})
    Trainer(
        model, optimizer, nn.functional.mse_loss, backend=LOCAL, config=config, scheduler=scheduler
    ).fit(create_data())  # fmt: skip
    return [parameter.detach() for parameter in model.parameters()], optimizer


def test_scaling_equals_training_with_a_multiplied_rate_and_restores_the_rate() -> None:
    expected, _ = train(0.04)
    found, optimizer = train(0.02, lr_scaling="linear", reference_batch_size=2)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert optimizer.param_groups[0]["lr"] == 0.02 * 0.5**4


def test_resumed_run_is_not_scaled_twice(tmp_path: Path) -> None:
    scaling: dict[str, Any] = {"lr_scaling": "sqrt", "reference_batch_size": 1, "warmup_steps": 5}
    expected, _ = train(0.02, **scaling)
    for epochs in (1, 2):
        found, _ = train(0.02, **scaling, max_epochs=epochs, output_dir=tmp_path, resume=True)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_resume_with_another_policy_is_rejected(tmp_path: Path) -> None:
    train(0.02, max_epochs=1, output_dir=tmp_path)
    with pytest.raises(CheckpointError, match=r"has lr_scaling='none', but TrainConfig\.lr_scaling is 'linear': its"):
        train(0.02, lr_scaling="linear", reference_batch_size=2, output_dir=tmp_path, resume=True)


def test_scaling_is_displayed_at_the_start_and_recorded_in_the_history(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    train(0.02, lr_scaling="linear", reference_batch_size=2, progress="lines", output_dir=tmp_path, max_epochs=1)
    assert "learning rates x 2 (linear scaling from batch size 2 to 4)" in capfd.readouterr().err
    row = (tmp_path / "history.jsonl").read_text()
    assert f'"learning_rate": {0.02 * 0.25 * 2}' in row
