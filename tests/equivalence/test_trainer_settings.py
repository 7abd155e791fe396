"""Settings of the Trainer for validation, limits, schedules and checkpoints, compared with plain torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR, ReduceLROnPlateau
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import unitrain
from unitrain.backends.base import Backend
from unitrain.backends.local import LocalBackend
from unitrain.data.order import epoch_order
from unitrain.data.sharding import open_training_data
from unitrain.data.training_data import ShardSettings
from unitrain.errors import CheckpointError, ConfigError
from unitrain.loggers.logger import Logger
from unitrain.planned_steps import remaining_steps
from unitrain.progress.training_progress import TrainingProgress
from unitrain.testing import RankGroup

LOCAL = LocalBackend(torch.device("cpu"))
SAMPLES, BATCH = 48, 8  # 6 steps per epoch


def data(count: int = SAMPLES, seed: int = 1) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(count, 5, generator=generator), torch.randn(count, 2, generator=generator))


def build_model_and_optimizer() -> tuple[nn.Module, SGD]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2))
    return model, SGD(model.parameters(), lr=0.1, momentum=0.9)


def make_trainer(backend: Backend = LOCAL, scheduler: Any = None, **settings: Any) -> unitrain.Trainer:
    """Return a Trainer with the same global batch on any number of ranks."""
    model, optimizer = build_model_and_optimizer()
    chosen: dict[str, Any] = {"max_epochs": 2, "progress": "off", "global_batch_size": BATCH, **settings}
    if chosen.get("max_steps") is not None:
        chosen["max_epochs"] = None
    keywords = {name: chosen.pop(name) for name in ("metrics", "callbacks", "loggers") if name in chosen}
    config = unitrain.TrainConfig(**chosen)
    return unitrain.Trainer(
        model, optimizer, nn.MSELoss(), backend=backend, config=config, scheduler=scheduler, **keywords
    )


def train_in_plain_torch(
    steps: int, build: Callable[[SGD], LRScheduler] | None = None
) -> tuple[nn.Module, list[float]]:
    """Train with plain torch for `steps` steps in the sample order of the Trainer. Return the model and the learning
    rates."""
    model, optimizer = build_model_and_optimizer()
    scheduler = None if build is None else build(optimizer)
    inputs, targets = data().tensors
    rates = []
    for step in range(steps):
        epoch, at = divmod(step, SAMPLES // BATCH)
        chosen = epoch_order(SAMPLES, seed=0, epoch=epoch, shuffle=True)[at * BATCH : (at + 1) * BATCH]
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs[chosen]), targets[chosen]).backward()
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return model, rates


def compute_loss(model: nn.Module, dataset: TensorDataset) -> float:
    with torch.no_grad():
        return nn.functional.mse_loss(model(dataset.tensors[0]), dataset.tensors[1]).item()


def weights(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach()


class Rates(unitrain.Callback):
    """Records the learning rate of every step."""

    def __init__(self) -> None:
        self.rates: list[float] = []

    def on_before_optimizer_step(self, trainer: unitrain.Trainer) -> None:
        self.rates.append(float(trainer.optimizer.param_groups[0]["lr"]))


class RecordingLogger(Logger):
    """Stores the logged values."""

    def __init__(self) -> None:
        self.values: list[tuple[int, dict[str, float]]] = []

    def log(self, values: Any, step: int) -> None:
        self.values.append((step, dict(values)))


def one_cycle(optimizer: Any, total_steps: int) -> OneCycleLR:
    return OneCycleLR(optimizer, max_lr=0.5, total_steps=total_steps)


def record_learning_rates(backend: Backend, folder: str) -> list[list[float]]:
    """Return the learning rates of an uninterrupted run, and of both parts of an interrupted run."""
    found = []
    for name, upto in (("whole", None), ("parts", 4), ("parts", None)):
        rates = Rates()
        made = make_trainer(
            backend,
            one_cycle,
            max_epochs=2,
            output_dir=f"{folder}/{name}-{backend.name}-{backend.size}",
            resume=True,
            checkpoint_every_steps=2,
            callbacks=[rates, *([StopsAt(upto)] if upto else [])],
        )
        assert made.scheduler is None
        made.fit(data())
        assert isinstance(made.scheduler, OneCycleLR)
        found.append(rates.rates)
    return found


class StopsAt(unitrain.Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, trainer: unitrain.Trainer) -> None:
        if trainer.progress.step == self.step:
            trainer.stop("enough")


@pytest.mark.parametrize("backend", ["local", "ddp", "horovod"])
def test_schedule_is_built_from_the_number_of_steps_and_resumed(backend: str, tmp_path: Path) -> None:
    _, expected = train_in_plain_torch(12, lambda optimizer: one_cycle(optimizer, 12))
    if backend == "local":
        results = [record_learning_rates(LOCAL, str(tmp_path))]
    else:
        with RankGroup(backend, 2) as ranks:
            results = ranks.run(record_learning_rates, str(tmp_path))
    for uninterrupted, first, second in results:
        assert uninterrupted == pytest.approx(expected)
        assert 4 <= len(first) < 12
        assert first + second == pytest.approx(expected)


def test_epoch_schedule_is_built_from_the_number_of_epochs() -> None:
    totals = []

    def build(optimizer: Any, total_steps: int) -> LambdaLR:
        totals.append(total_steps)
        return LambdaLR(optimizer, lambda epoch: 1 - epoch / total_steps)

    rates = Rates()
    make_trainer(LOCAL, build, max_epochs=4, scheduler_interval="epoch", callbacks=[rates]).fit(data())
    assert totals == [4]
    assert rates.rates == pytest.approx([0.1 * (1 - step // 6 / 4) for step in range(24)])
    make_trainer(LOCAL, build, max_steps=7).fit(data())
    make_trainer(LOCAL, build, max_epochs=3, limit_train_steps=2).fit(data())
    assert totals == [4, 7, 6]
    totals.clear()
    # An epoch has 6 steps, 2 with limit_train_steps=2, or 3 from the second epoch with `schedule`. An incomplete last
    # epoch counts.
    make_trainer(LOCAL, build, max_steps=13, scheduler_interval="epoch").fit(data())
    make_trainer(LOCAL, build, max_steps=12, scheduler_interval="epoch").fit(data())
    make_trainer(LOCAL, build, max_steps=5, limit_train_steps=2, scheduler_interval="epoch").fit(data())
    schedule = {0: 1, 1: 2}
    accumulated = {"gradient_accumulation_steps": schedule, "batch_size": 8, "global_batch_size": None}
    make_trainer(LOCAL, build, max_steps=13, scheduler_interval="epoch", **accumulated).fit(data())
    assert totals == [3, 2, 3, 4]


class FailsAfterEpoch(unitrain.Callback):
    """Raises KeyboardInterrupt at the end of an epoch, before the checkpoint is saved."""

    def on_epoch_end(self, trainer: unitrain.Trainer, results: dict[str, float]) -> None:
        trainer.checkpointer.wait()
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("max_steps", "settings"),
    [
        (13, {"checkpoint_every_steps": 6}),
        (6, {"checkpoint_every_steps": 6}),
        (3, {"checkpoint_every_steps": 1, "limit_train_steps": 1}),
        (13, {"checkpoint_every_steps": 6, "gradient_accumulation_steps": {0: 1, 1: 2}}),
    ],
)
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_epoch_schedule_is_resumed_at_the_end_of_an_epoch_and_of_the_run(
    max_steps: int, settings: dict[str, Any], tmp_path: Path
) -> None:
    totals = []

    def build(optimizer: Any, total_steps: int) -> LambdaLR:
        totals.append(total_steps)
        return LambdaLR(optimizer, lambda epoch: 1 - epoch / total_steps)

    def train(folder: str, callback: unitrain.Callback) -> unitrain.Trainer:
        made = make_trainer(
            LOCAL, build, max_steps=max_steps, scheduler_interval="epoch", resume=True, output_dir=tmp_path / folder,
            callbacks=[callback], batch_size=BATCH, global_batch_size=None, **settings,
        )  # fmt: skip
        made.fit(data())
        return made

    expected = train("uninterrupted", Rates()).progress
    with pytest.raises(KeyboardInterrupt):
        train("resumed", FailsAfterEpoch())
    assert train("resumed", Rates()).progress.step == max_steps
    train("resumed", Rates())  # complete
    assert totals == [expected.epoch + (expected.step_in_epoch > 0)] * 4


def test_remaining_steps_are_correct_if_the_current_epoch_exceeds_a_reduced_limit() -> None:
    config = unitrain.TrainConfig(max_epochs=3, limit_train_steps=2, batch_size=BATCH)
    settings = ShardSettings.from_config(config, is_elastic=False, initial_batch_sizes=None)
    training_data = open_training_data(data(), LOCAL, settings)
    progress = TrainingProgress(step=4, sample=4 * BATCH, position=4 * BATCH, step_in_epoch=4)
    assert remaining_steps(config, progress, training_data) == 4


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(data())


def test_unusable_schedules_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown for data without a length. Use TrainConfig\(max_steps=10_000\)"):
        make_trainer(LOCAL, one_cycle, max_epochs=1, global_batch_size=None, batch_size=BATCH).fit(Stream())
    with pytest.raises(ConfigError, match="The scheduler function returned int, not a scheduler of its optimizer"):
        make_trainer(LOCAL, lambda optimizer, total_steps: total_steps).fit(data())
    make_trainer(LOCAL, one_cycle, max_epochs=1, output_dir=tmp_path / "a").fit(data())
    planned = (
        r"planned for 6 steps, but this run has 12, which .* rates\. It was planned for max_epochs=1\. Resume with"
    )
    with pytest.raises(CheckpointError, match=planned):
        make_trainer(LOCAL, one_cycle, max_epochs=2, output_dir=tmp_path / "a", resume=True).fit(data())
    make_trainer(LOCAL, None, max_epochs=1, output_dir=tmp_path / "b").fit(data())
    with pytest.raises(CheckpointError, match="has no scheduler and this run has one"):
        make_trainer(LOCAL, one_cycle, max_epochs=2, output_dir=tmp_path / "b", resume=True)


def test_validation_within_an_epoch_is_logged_and_does_not_change_training() -> None:
    kept = RecordingLogger()
    validation = data(10, seed=2)
    made = make_trainer(validate_every_steps=2, loggers=[kept], max_epochs=1)
    results = made.fit(data(), validation)
    logged = {step: values["val_loss"] for step, values in kept.values if "val_loss" in values}
    assert sorted(logged) == [2, 4, 6]
    for step, value in logged.items():
        assert value == pytest.approx(compute_loss(train_in_plain_torch(step)[0], validation), rel=1e-5)
    assert results["val_loss"] == logged[6]
    assert torch.equal(weights(made.model), weights(make_trainer(max_epochs=1, callbacks=[]).model)) is False
    undisturbed = make_trainer(max_epochs=1)
    undisturbed.fit(data(), validation)
    assert torch.equal(weights(made.model), weights(undisturbed.model))


def test_several_validation_sets_have_separate_results() -> None:
    clean, noisy = data(10, seed=2), data(7, seed=3)
    made = make_trainer(max_epochs=1, metrics={"error": lambda output, target: (output - target).abs().mean(1)})
    results = made.fit(data(), {"clean": clean, "noisy": noisy})
    assert list(results) == ["train_loss", "val_clean_loss", "val_clean_error", "val_noisy_loss", "val_noisy_error"]
    assert made.result_names == tuple(results)
    for name, on in (("clean", clean), ("noisy", noisy)):
        assert results[f"val_{name}_loss"] == pytest.approx(compute_loss(made.model, on), rel=1e-5)
    stopping = make_trainer(max_epochs=9, callbacks=[unitrain.EarlyStopping("val_noisy_loss", patience=1, mode="max")])
    stopping.fit(data(), {"clean": clean, "noisy": noisy})
    assert stopping.progress.epoch < 9
    for names in ({}, {1: clean}):
        with pytest.raises(ConfigError, match="val_data takes a dataset, or a mapping from names"):
            make_trainer(max_epochs=1).fit(data(), names)  # type: ignore[arg-type]
    colliding = make_trainer(max_epochs=1, metrics={"b_loss": lambda output, target: (output - target).abs().mean(1)})
    message = r"named 'val_a_b_loss': 'b_loss' of val_data\['a'\], and 'loss' of val_data\['a_b'\]\. Rename"
    with pytest.raises(ConfigError, match=message):
        colliding.fit(data(), {"a": clean, "a_b": noisy})
    assert colliding.progress.step == 0
    model, optimizer = build_model_and_optimizer()
    plateau = unitrain.Trainer(
        model,
        optimizer,
        nn.MSELoss(),
        backend=LOCAL,
        config=unitrain.TrainConfig(max_epochs=1, batch_size=8, scheduler_interval="epoch", progress="off"),
        scheduler=ReduceLROnPlateau(optimizer),
    )
    with pytest.raises(ConfigError, match=r"Select one: TrainConfig\(monitor='val_clean_loss'\)"):
        plateau.fit(data(), {"clean": clean, "noisy": noisy})


def train_with_limits(backend: Backend, folder: str) -> tuple[list[tuple[int, int]], list[float], list[float]]:
    """Train epochs of four steps with and without an interruption. Return (epoch, step) at the end of each epoch, and
    the weights of both runs."""
    found = []
    places: list[tuple[int, int]] = []

    class EpochEnds(unitrain.Callback):
        def on_epoch_end(self, trainer: unitrain.Trainer, results: dict[str, float]) -> None:
            places.append((trainer.progress.epoch, trainer.progress.step))

    settings = {"max_epochs": 3, "limit_train_steps": 4, "resume": True}
    for name, upto in (("whole", None), ("parts", 6), ("parts", None)):
        output = f"{folder}/{name}-{backend.name}"
        stops = [StopsAt(upto)] if upto else [EpochEnds()] if name == "whole" else []
        made = make_trainer(backend, output_dir=output, checkpoint_every_steps=1, callbacks=stops, **settings)
        made.fit(data())
        found.append(weights(backend.unwrap(made.model)).tolist())
    return places, found[0], found[2]


def test_limit_train_steps_ends_epochs(tmp_path: Path) -> None:
    with RankGroup("ddp", 2) as ranks:
        results = [train_with_limits(LOCAL, str(tmp_path)), *ranks.run(train_with_limits, str(tmp_path))]
    for places, uninterrupted, parts in results:
        assert places == [(1, 4), (2, 8), (3, 12)]
        assert parts == uninterrupted


@pytest.mark.parametrize("accumulation", [None, 2])
def test_evaluation_before_training_divides_the_global_batch(accumulation: int | None) -> None:
    made = make_trainer(gradient_accumulation_steps=accumulation)
    validation = data(7, seed=2)
    assert made.evaluate(validation)["loss"] == pytest.approx(compute_loss(made.model, validation), rel=1e-5)


def test_limit_val_batches_limits_validation_but_not_evaluate() -> None:
    counted: list[int] = []

    def count(output: Tensor, target: Tensor) -> Tensor:
        counted.append(len(output))
        return torch.zeros(len(output))

    made = make_trainer(max_epochs=1, limit_val_batches=2, eval_batch_size=4, metrics={"count": count})
    validation = data(20, seed=2)
    results = made.fit(data(), validation)
    assert counted == [4, 4]
    first = TensorDataset(*(tensor[:8] for tensor in validation.tensors))
    assert results["val_loss"] == pytest.approx(compute_loss(made.model, first), rel=1e-5)
    counted.clear()
    made.evaluate(validation)
    assert counted == [4] * 5, "evaluate must use all batches"
    counted.clear()
    made.evaluate(DataLoader(validation, batch_size=10))
    assert counted == [10, 10], "the batch size of a DataLoader must be used"


def test_dry_run_trains_one_step_and_does_not_write_files(tmp_path: Path) -> None:
    kept = RecordingLogger()
    settings = {"output_dir": tmp_path / "run", "checkpoint_every_steps": 1, "keep_best": "val_loss", "loggers": [kept]}
    made = make_trainer(LOCAL, one_cycle, dry_run=True, max_epochs=5, **settings)
    results = made.fit(data(), data(20, seed=2))
    assert made.progress.step == 1
    assert list(results) == ["train_loss", "val_loss"]
    assert not list(tmp_path.iterdir())
    assert kept.values == []


def test_checkpoints_are_written_at_an_interval_of_minutes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("unitrain.checkpoint.checkpointer.time.monotonic", lambda: now[0])

    class AdvanceClock(unitrain.Callback):
        def on_step_end(self, trainer: unitrain.Trainer) -> None:
            now[0] += 60.0

    settings = {"checkpoint_every_minutes": 3.0, "log_every_n_steps": 1, "keep_last": None, "max_epochs": 2}
    make_trainer(output_dir=tmp_path, callbacks=[AdvanceClock()], async_checkpoints=False, **settings).fit(data())
    written = sorted(int(path.name.rpartition("-")[2]) for path in tmp_path.glob("step-*"))
    # At the sync points of steps 3 and 9, checkpoints are due by time, and are saved after the next step. After steps
    # 6 and 12, an epoch ends.
    assert written == [4, 6, 10, 12]


def test_three_checkpoints_are_kept_by_default(tmp_path: Path) -> None:
    make_trainer(output_dir=tmp_path, max_epochs=5).fit(data())
    assert len(list(tmp_path.glob("step-*"))) == 3
    make_trainer(output_dir=tmp_path / "all", max_epochs=5, keep_last=None).fit(data())
    assert len(list((tmp_path / "all").glob("step-*"))) == 5


def train_and_load_best(backend: Backend, folder: str, ema_decay: float | None) -> tuple[list[float], dict[str, float]]:
    """Train with a learning rate that degrades the model after the second epoch, and load the best weights. Return the
    losses of the epochs, and the evaluation of the loaded weights."""
    validation = data(12, seed=1)

    def degrade(epoch: int) -> float:
        return 1.0 if epoch < 2 else -3.0

    model, optimizer = build_model_and_optimizer()
    config = unitrain.TrainConfig(
        max_epochs=5,
        global_batch_size=BATCH,
        scheduler_interval="epoch",
        progress="off",
        output_dir=f"{folder}/{backend.name}-{ema_decay}",
        keep_last=1,
        keep_best="val_loss",
        ema_decay=ema_decay,
    )
    losses: list[float] = []

    class Losses(unitrain.Callback):
        def on_epoch_end(self, trainer: unitrain.Trainer, results: dict[str, float]) -> None:
            losses.append(results["val_loss"])

    made = unitrain.Trainer(
        model,
        optimizer,
        nn.MSELoss(),
        backend=backend,
        config=config,
        scheduler=LambdaLR(optimizer, degrade),
        callbacks=[Losses()],
    )
    made.fit(data(), validation)
    made.load_weights("best")
    return losses, made.evaluate(validation)


def test_load_weights_can_load_the_best_checkpoint(tmp_path: Path) -> None:
    with RankGroup("ddp", 2) as ranks:
        for decay in (None, 0.5):
            results = [
                train_and_load_best(LOCAL, str(tmp_path), decay),
                *ranks.run(train_and_load_best, str(tmp_path), decay),
            ]
            for losses, found in results:
                assert min(losses) < losses[-1] / 1.5, losses
                assert found["loss"] == pytest.approx(min(losses), rel=1e-6)
    made = make_trainer(max_epochs=1)
    made.fit(data())
    with pytest.raises(ConfigError, match="The best checkpoint is unknown, because the run does not keep it"):
        made.load_weights("best")
    with pytest.raises(CheckpointError, match="There is no checkpoint in"):
        made.load_weights(tmp_path / "nothing")


def test_corrupt_best_checkpoint_is_reported(tmp_path: Path) -> None:
    made = make_trainer(max_epochs=1, output_dir=tmp_path, keep_best="val_loss")
    made.fit(data(), data())
    (weights,) = tmp_path.glob("step-*/model.safetensors")
    weights.write_bytes(weights.read_bytes() + b"\0")
    message = (
        r"No checkpoint in .* with a result 'val_loss' is valid \(checked: 1\); in the best one, model.safetensors has"
    )
    with pytest.raises(CheckpointError, match=message):
        made.load_weights("best")


def test_invalid_settings_are_rejected() -> None:
    for name, value, message_text in (
        ("validate_every_steps", 0, "must be at least 1, got 0"),
        ("limit_train_steps", 1.5, "must be a whole number, got 1.5"),
        ("limit_val_batches", -1, "must be at least 1, got -1"),
        ("checkpoint_every_minutes", 0, "must be a number above 0, got 0"),
        ("dry_run", "yes", "must be True or False, got 'yes'"),
    ):
        with pytest.raises(ConfigError, match=f"TrainConfig.{name} {message_text}"):
            unitrain.TrainConfig(max_epochs=1, **{name: value})  # type: ignore[arg-type]
