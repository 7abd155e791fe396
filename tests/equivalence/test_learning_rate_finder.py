"""find_learning_rate returns the curve of plain torch on every backend, and leaves the Trainer unchanged."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from groups import ci
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import unitrain
from unitrain import Callback, LearningRateCurve, TrainConfig, Trainer, find_learning_rate
from unitrain.backends.base import Backend
from unitrain.backends.local import LocalBackend
from unitrain.data.order import epoch_order
from unitrain.errors import CallbackError, ConfigError, DataError, NonFiniteLossError
from unitrain.learning_rate_finder import suggest_learning_rate
from unitrain.testing import RankGroup

LOCAL = LocalBackend(torch.device("cpu"))
GROUPS = [("local", 1), ("horovod", 2), *ci(("ddp", 3))]
SAMPLES, BATCH, STEPS = 60, 12, 40


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, 5, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, inputs @ torch.randn(5, 2, generator=generator, dtype=torch.float64))


def make_trainer(backend: Backend = LOCAL, layers: Any = (), **settings: Any) -> Trainer:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), *layers, nn.Tanh(), nn.Linear(4, 2)).double()
    groups = [{"params": model[0].parameters()}, {"params": model[-1].parameters(), "lr": 0.02}]
    optimizer = torch.optim.Adam([*groups, *([{"params": layers[0].parameters()}] if layers else [])], lr=0.01)
    chosen: dict[str, Any] = {"max_epochs": 2, "progress": "off", "global_batch_size": BATCH, **settings}
    callbacks, loss_fn = chosen.pop("callbacks", ()), chosen.pop("loss_fn", nn.functional.mse_loss)
    scheduler = StepLR(optimizer, 3)
    return Trainer(
        model, optimizer, loss_fn, backend=backend, config=TrainConfig(**chosen), scheduler=scheduler,
        callbacks=callbacks,
    )  # fmt: skip


def run_range_test_in_plain_torch() -> tuple[list[float], list[float]]:
    """Run the learning rate range test in plain torch, and return the losses and the smoothed losses."""
    trainer = make_trainer()
    model, optimizer = copy.deepcopy(trainer.model), None
    optimizer = torch.optim.Adam([{"params": model[0].parameters()}, {"params": model[-1].parameters()}])
    inputs, targets = data().tensors
    losses: list[float] = []
    smoothed: list[float] = []
    average = 0.0
    for step in range(STEPS):
        epoch, at = divmod(step, SAMPLES // BATCH)
        chosen = epoch_order(SAMPLES, seed=0, epoch=epoch, shuffle=True)[at * BATCH : (at + 1) * BATCH]
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs[chosen]), targets[chosen])
        loss.backward()
        for group, factor in zip(optimizer.param_groups, (1, 2), strict=True):
            group["lr"] = factor * 10 ** (-6 + 7 * step / (STEPS - 1))
        optimizer.step()
        losses.append(loss.item())
        average = 0.98 * average + 0.02 * losses[-1]
        smoothed.append(average / (1 - 0.98 ** (step + 1)))
        if smoothed[-1] > 4 * min(smoothed):
            break
    return losses, smoothed


def find_curves(backend: Backend) -> list[LearningRateCurve]:
    accumulation = {"batch_size": BATCH // backend.size // 2, "gradient_accumulation_steps": 2}
    trainers = [make_trainer(backend), make_trainer(backend, global_batch_size=None, **accumulation)]
    if backend.size > 1:
        trainers.append(make_trainer(backend, shard="state"))
    curves = []
    for trainer in trainers:
        before = copy_state(trainer)
        curves.append(find_learning_rate(trainer, data(), min_lr=1e-6, max_lr=10.0, steps=STEPS))
        assert_equal(copy_state(trainer), before)
    return curves


def copy_state(trainer: Trainer) -> dict[str, Any]:
    """Return a copy of all state that training modifies."""
    model = trainer.backend.unwrap(trainer.model)
    state = {
        "model": model.state_dict(), "modes": [module.training for module in model.modules()],
        "gradients": [parameter.grad for parameter in model.parameters()],
        "optimizer": dict(enumerate(trainer.optimizer.state.values())),
        "groups": [{k: v for k, v in group.items() if k != "params"} for group in trainer.optimizer.param_groups],
        "scheduler": trainer.scheduler.state_dict() if trainer.scheduler else None,
        "random": (torch.get_rng_state(), torch.tensor(np.random.get_state()[1].astype(np.int64)), random.getstate()),
        "progress": trainer.progress.state_dict(), "precision": trainer._precision.state_dict(),
    }  # fmt: skip
    return copy.deepcopy(state)


def assert_equal(found: Any, expected: Any) -> None:
    if isinstance(expected, Tensor):
        assert torch.equal(found, expected)
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for name in expected:
            assert_equal(found[name], expected[name])
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_equal(one, other)
    else:
        assert found == expected


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: f"{group[0]}-{group[1]}")
def test_curve_and_suggestion_equal_plain_torch(group: tuple[str, int]) -> None:
    losses, smoothed = run_range_test_in_plain_torch()
    if group[0] == "local":
        ranks = [find_curves(LOCAL)]
    else:
        with RankGroup(*group) as started:
            ranks = started.run(find_curves)
    slopes = np.gradient(np.asarray(smoothed[10:-1]))
    expected = 10 ** (-6 + 7 * (10 + int(slopes.argmin())) / (STEPS - 1))
    assert len(losses) > 13
    for curve in (curve for curves in ranks for curve in curves):
        assert curve.losses == pytest.approx(losses, rel=1e-9)
        assert curve.smoothed_losses == pytest.approx(smoothed, rel=1e-9)
        assert curve.suggestion == pytest.approx(expected)
    assert all(one == ranks[0] for one in ranks)


def test_training_is_bit_identical_after_a_range_test(tmp_path: Path) -> None:
    """The run has dropout, BatchNorm, a sampler with its own generator and an existing optimizer state. It continues
    after the learning rate range test."""

    def loader() -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(3)
        return DataLoader(data(), BATCH, sampler=RandomSampler(data(), generator=generator))

    results = []
    for is_tested in (False, True):
        trainer = make_trainer(layers=(nn.BatchNorm1d(4), nn.Dropout(0.3)), ema_decay=0.9, global_batch_size=None)
        train_data = loader()
        trainer.fit(train_data)
        if is_tested:
            before = copy_state(trainer)
            find_learning_rate(trainer, train_data, min_lr=1e-6, steps=20)
            assert_equal(copy_state(trainer), before)
        torch.manual_seed(5)
        trainer.config = TrainConfig(max_epochs=4, progress="off")
        trainer._run._config = trainer.config
        trainer.fit(train_data)
        assert trainer.averaged_model is not None
        results.append((copy_state(trainer), copy.deepcopy(trainer.averaged_model.state_dict())))
    assert_equal(results[1], results[0])


def test_buffer_that_the_model_assigns_is_restored() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.calls = nn.Parameter(torch.ones(4)), nn.Buffer(torch.zeros(()))

        def forward(self, inputs: Tensor) -> Tensor:
            self.calls = self.calls + 1
            return inputs * self.scale

    trainer = make_trainer(layers=(Counts(),))
    before = copy_state(trainer)
    find_learning_rate(trainer, data(), min_lr=1e-6, steps=20)
    assert_equal(copy_state(trainer), before)


def test_callbacks_and_scheduler_are_not_called() -> None:
    class Fails(Callback):
        def on_step_end(self, trainer: Any) -> None:
            raise AssertionError

    find_learning_rate(make_trainer(callbacks=[Fails()]), data(), min_lr=1e-6, steps=20)


def test_learning_rate_scaling_is_applied_without_warm_up() -> None:
    settings = {"lr_scaling": "linear", "reference_batch_size": BATCH // 2, "warmup_steps": 100}
    scaled = find_learning_rate(make_trainer(**settings), data(), min_lr=1e-6, max_lr=1.0, steps=20)
    doubled = find_learning_rate(make_trainer(), data(), min_lr=2e-6, max_lr=2.0, steps=20)
    assert scaled.losses == pytest.approx(doubled.losses)


def test_flat_loss_has_no_suggestion() -> None:
    assert suggest_learning_rate([10.0**n for n in range(20)], [1.0] * 20) is None
    curve = LearningRateCurve((0.1, 0.2), (1.0, 1.0), (1.0, 1.0), None)
    assert "No suggestion: the loss never decreased (tested 0.1 to 0.2)" in str(curve)


def test_result_is_printed_and_plotted(tmp_path: Path) -> None:
    curve = find_learning_rate(make_trainer(), data(), min_lr=1e-6, max_lr=10.0, steps=STEPS)
    text = str(curve)
    assert text.startswith(f"Suggested learning rate: {curve.suggestion:.3g} (tested 1e-06 to ")
    assert text.count("o") >= 1
    assert f"{max(curve.smoothed_losses):.4g}" in text
    curve.plot(tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"min_lr": 0}, r"find_learning_rate\(min_lr=...\) must be a number above 0, got 0"),
        ({"max_lr": float("inf")}, r"find_learning_rate\(max_lr=...\) must be a number above 0, got inf"),
        ({"min_lr": 2.0}, r"min_lr must be less than max_lr, got min_lr=2 and max_lr=1"),
        ({"steps": 12}, r"find_learning_rate\(steps=...\) must be at least 13, got 12. Use steps=100"),
        ({"divergence_factor": 1}, r"find_learning_rate\(divergence_factor=...\) must be above 1, got 1"),
        (
            {"min_lr": 5.0, "max_lr": 1e4, "steps": 20},
            r"needs 13 steps for a suggestion, but after \d+ steps the loss dive",
        ),
    ],
)
def test_invalid_arguments_and_early_divergence_are_rejected(given: dict[str, Any], message: str) -> None:
    trainer = make_trainer()
    before = copy_state(trainer)
    with pytest.raises(ConfigError, match=message):
        find_learning_rate(trainer, data(), **given)
    assert_equal(copy_state(trainer), before)


def test_invalid_data_is_reported_with_the_name_of_the_function() -> None:
    with pytest.raises(DataError, match=r"^find_learning_rate\(data\) must be a dataset or a DataLoader, got None"):
        find_learning_rate(make_trainer(), None)  # type: ignore[arg-type]


def test_non_finite_losses_are_reported() -> None:
    with pytest.raises(NonFiniteLossError, match="the loss of the first batch is not finite, before any update"):
        find_learning_rate(make_trainer(loss_fn=lambda output, target: (output - target).sum() * torch.inf), data())
    calls = [0]

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        calls[0] += 1
        return nn.functional.mse_loss(output, target) * (torch.nan if calls[0] == 5 else 1.0)

    with pytest.raises(
        NonFiniteLossError, match=r"but after 4 steps the loss became nan after a step with learning rate"
    ):
        find_learning_rate(make_trainer(loss_fn=loss_fn), data())


def test_unsupported_trainers_and_calls_during_fit_are_rejected() -> None:
    with pytest.raises(ConfigError, match=r"takes a unitrain.Trainer, got Linear"):
        find_learning_rate(nn.Linear(1, 1), data())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"does not support TrainConfig.local_sgd=2"):
        find_learning_rate(make_trainer(local_sgd=2), data())

    class Finds(Callback):
        def on_step_end(self, trainer: Any) -> None:
            find_learning_rate(trainer, data())

    with pytest.raises((ConfigError, CallbackError), match=r"was called by a callback during fit"):
        make_trainer(callbacks=[Finds()]).fit(data())


def test_public_names_are_exported() -> None:
    assert unitrain.find_learning_rate is find_learning_rate
