"""Optimizers with a train and an eval mode, and optimizers that compute their own learning rates, in the Trainer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

from unitrain import Callback, ConfigError, TrainConfig, Trainer
from unitrain.backends.base import Backend
from unitrain.backends.local import LocalBackend
from unitrain.testing import RankGroup

LOCAL = LocalBackend(torch.device("cpu"))


class ScheduleFreeSGD(torch.optim.Optimizer):
    """SGD that evaluates the average x of its iterates z, and computes gradients between them. The model has the
    weights y = 0.1 z + 0.9 x in train mode, and x in eval mode."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "steps": 0, "is_training": False})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            assert group["is_training"], "step was called in eval mode"
            group["steps"] += 1
            for parameter in group["params"]:
                z = self.state[parameter].setdefault("z", parameter.detach().clone())
                x = parameter.lerp(z, 1 - 1 / 0.9)
                z.sub_(parameter.grad, alpha=group["lr"])
                parameter.copy_(x.lerp_(z, 1 / group["steps"]).lerp_(z, 0.1))

    @torch.no_grad()
    def _set_mode(self, *, is_training: bool) -> None:
        for group in self.param_groups:
            if group["is_training"] != is_training:
                group["is_training"] = is_training
                for parameter in group["params"]:
                    if "z" in self.state[parameter]:
                        parameter.lerp_(self.state[parameter]["z"], 0.1 if is_training else 1 - 1 / 0.9)

    def train(self) -> None:
        self._set_mode(is_training=True)

    def eval(self) -> None:
        self._set_mode(is_training=False)


class RelativeStepSGD(torch.optim.Optimizer):
    """SGD that computes its own learning rate, like Adafactor of transformers."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": None, "steps": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["steps"] += 1
            for parameter in group["params"]:
                parameter.sub_(parameter.grad, alpha=0.1 / group["steps"])


def samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(16, 4, generator=generator).double()
    return TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 1).double()


def train_in_plain_torch(model: nn.Module, optimizer: Any, epochs: int) -> None:
    inputs, targets = samples().tensors
    for _ in range(epochs):
        for rows in torch.arange(16).split(4):
            optimizer.zero_grad()
            mse_loss(model(inputs[rows]), targets[rows]).backward()
            optimizer.step()


class EvaluateInEveryStep(Callback):
    def on_step_end(self, trainer: Trainer) -> None:
        trainer.evaluate(samples())


def train(backend: Backend, folder: str, epochs: int, resume: bool) -> tuple[dict[str, float], float, Tensor, Tensor]:
    model = build_model()
    config = TrainConfig(
        max_epochs=epochs, global_batch_size=4, shuffle=False, progress="off", output_dir=folder, resume=resume,
        checkpoint_every_steps=3,
    )  # fmt: skip
    optimizer = ScheduleFreeSGD(model.parameters(), lr=0.1)
    trainer = Trainer(model, optimizer, mse_loss, backend=backend, config=config, callbacks=[EvaluateInEveryStep()])
    results = trainer.fit(samples(), samples())
    weight = model.weight.detach().clone()  # type: ignore[operator]
    return results, trainer.evaluate(samples())["loss"], trainer.predict(samples()), weight


@pytest.mark.parametrize(("backend", "size"), [("local", 1), ("ddp", 2), ("horovod", 2)])
def test_evaluation_and_checkpoints_use_the_weights_of_the_eval_mode(backend: str, size: int, tmp_path: Path) -> None:
    model = build_model()
    optimizer = ScheduleFreeSGD(model.parameters(), lr=0.1)
    optimizer.train()
    train_in_plain_torch(model, optimizer, 3)
    training_loss = mse_loss(model(samples().tensors[0]), samples().tensors[1]).item()
    optimizer.eval()
    outputs = model(samples().tensors[0])
    expected_loss = mse_loss(outputs, samples().tensors[1]).item()
    assert abs(training_loss - expected_loss) > 1e-3
    with RankGroup(backend, size) as group:
        runs = [group.run(train, str(tmp_path), 2, False), group.run(train, str(tmp_path), 3, True)]
    for results, loss, predictions, weight in runs[1]:
        assert results["val_loss"] == pytest.approx(expected_loss, rel=1e-9)
        assert loss == pytest.approx(expected_loss, rel=1e-9)
        torch.testing.assert_close(predictions, outputs.detach())
        torch.testing.assert_close(weight, model.weight.detach())  # type: ignore[operator]
    saved = load_file(max(tmp_path.glob("step-*")) / "model.safetensors")
    torch.testing.assert_close(saved["weight"], model.weight.detach())  # type: ignore[operator]


def test_optimizer_without_a_learning_rate_trains(tmp_path: Path) -> None:
    model, twin = build_model(), build_model()
    settings: dict[str, Any] = {"global_batch_size": 4, "shuffle": False, "progress": "off"}
    config = TrainConfig(max_epochs=2, output_dir=tmp_path, log_every_n_steps=1, **settings)
    optimizer = RelativeStepSGD(model.parameters())
    Trainer(model, optimizer, mse_loss, backend=LOCAL, config=config, loggers=["csv"]).fit(samples())
    train_in_plain_torch(twin, RelativeStepSGD(twin.parameters()), 2)
    torch.testing.assert_close([*model.parameters()], [*twin.parameters()])
    rows = [json.loads(line) for line in (tmp_path / "history.jsonl").read_text().splitlines()]
    assert len(rows) == 2
    assert not any("learning_rate" in row for row in rows)
    config = TrainConfig(max_epochs=1, lr_scaling="linear", reference_batch_size=2, **settings)
    with pytest.raises(
        ConfigError, match=r"^lr in parameter group 0 of the Trainer's RelativeStepSGD is None, so Trai"
    ):
        Trainer(model, RelativeStepSGD(model.parameters()), mse_loss, backend=LOCAL, config=config)
