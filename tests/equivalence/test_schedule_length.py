"""Schedulers have the number of steps of the run, or the run raises an error on every rank before it trains."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from groups import GROUPS_ON_HOROVOD
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler, TensorDataset

from unitrain import Callback, CheckpointError, ConfigError, TrainConfig, Trainer
from unitrain.backends.base import Backend
from unitrain.backends.local import LocalBackend
from unitrain.testing import RankGroup

LOCAL = LocalBackend(torch.device("cpu"))
EPOCHS = 3


class Growing(Sampler[Any]):
    """Yields more samples, or batches, in each epoch. `__len__` returns the length of the first epoch."""

    epoch = 0

    def __init__(self, *, yields_batches: bool) -> None:
        self.yields_batches = yields_batches

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 7

    def __iter__(self) -> Iterator[Any]:
        keys = range(7 + 6 * self.epoch)
        return iter([[key] * (1 + key % 3) for key in keys] if self.yields_batches else keys)


class Shrinking(Growing):
    def __iter__(self) -> Iterator[Any]:
        return iter(list(super().__iter__())[::3])


class RandomNumber(Sampler[list[int]]):
    """Yields a random number of batches, drawn from the global generator."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[key] for key in range(random.randint(3, 15))])


class Observer(Callback):
    """Records the learning rate of each step, and stops `fit` after one of the steps."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.stop_at, self.rates = stop_at, list[float]()

    def on_before_optimizer_step(self, trainer: Trainer) -> None:
        self.rates.append(trainer.optimizer.param_groups[0]["lr"])

    def on_step_end(self, trainer: Trainer) -> None:
        if trainer.progress.step == self.stop_at:
            trainer.stop("for the test")


def one_cycle(optimizer: Any, total_steps: int) -> lr_scheduler.OneCycleLR:
    return lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=total_steps, cycle_momentum=False)


def make_data(kind: str, backend: Backend) -> Any:
    dataset = TensorDataset(torch.ones(64, 2), torch.zeros(64, 1))
    if kind == "samples":
        return DataLoader(dataset, batch_size=4 // backend.size, sampler=Growing(yields_batches=False))
    if kind == "random order":
        batches: Any = BatchSampler(RandomSampler(dataset, generator=torch.Generator()), 3, drop_last=False)
    else:
        kinds = {"batches": Growing, "fewer batches": Shrinking}
        batches = kinds[kind](yields_batches=True) if kind in kinds else RandomNumber()
    return DataLoader(dataset, batch_sampler=batches)


def train(
    backend: Backend, kind: str, stops: tuple[int | None, ...] = (None,), folder: str | None = None, **settings: Any
) -> tuple[list[float], int]:
    model = nn.Linear(2, 1)
    optimizer, observer = torch.optim.SGD(model.parameters(), lr=0.1), Observer()
    config = TrainConfig(
        **{"max_epochs": EPOCHS, **settings}, progress="off", log_every_n_steps=1, output_dir=folder,
        resume=folder is not None,
    )  # fmt: skip
    trainer = Trainer(
        model, optimizer, nn.MSELoss(), backend=backend, config=config, scheduler=one_cycle, callbacks=[observer]
    )
    for observer.stop_at in stops:
        trainer.fit(make_data(kind, backend))
    return observer.rates, trainer.progress.step


@pytest.fixture(scope="module", params=GROUPS_ON_HOROVOD, ids=lambda group: f"{group[0]}-{group[1]}")
def group(request: pytest.FixtureRequest) -> Iterator[RankGroup]:
    with RankGroup(*request.param) as ranks:
        yield ranks


@pytest.mark.parametrize("kind", ["samples", "batches", "fewer batches", "random number", "random order"])
def test_schedule_ends_at_the_last_step_if_the_length_of_epochs_changes(
    group: RankGroup, kind: str, tmp_path: Path
) -> None:
    uninterrupted, steps = group.run(train, kind)[0]
    assert len(uninterrupted) == steps
    assert uninterrupted == pytest.approx(rates_of_one_cycle(steps), abs=1e-12)
    # Interrupted within epochs, in the same process and in a new one.
    stops = (2, steps - 1)
    assert group.run(train, kind, (*stops, None))[0][0] == uninterrupted
    first, _ = group.run(train, kind, stops, str(tmp_path))[0]
    assert first + group.run(train, kind, (None,), str(tmp_path))[0][0] == uninterrupted


def rates_of_one_cycle(steps: int) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    scheduler, rates = one_cycle(optimizer, steps), []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("limits", [{"limit_train_steps": 2}, {"gradient_accumulation_steps": {0: 1, 2: 2}}])
def test_limited_and_accumulated_steps_of_epochs_of_different_lengths_are_counted(limits: dict[str, Any]) -> None:
    rates, steps = train(LOCAL, "batches", **limits)
    assert steps == (6 if "limit_train_steps" in limits else 7 + 13 + 10)
    assert rates == pytest.approx(rates_of_one_cycle(steps), abs=1e-12)


def test_epochs_within_max_steps_are_counted() -> None:
    rates, _ = train(LOCAL, "batches", max_epochs=None, max_steps=30, scheduler_interval="epoch")  # 7 + 13 + 10 steps
    assert [rates[0], rates[7], rates[20]] == pytest.approx(rates_of_one_cycle(3), abs=1e-12)


# In one process.


def linear_data(samples: int) -> TensorDataset:
    return TensorDataset(torch.ones(samples, 2), torch.zeros(samples, 1))


def fit_scheduled(
    build: Callable[[Any], Any], *data: Any, stop_at: int | None = None, **settings: Any
) -> tuple[list[float], Trainer]:
    model = nn.Linear(2, 1)
    optimizer, observer = torch.optim.SGD(model.parameters(), lr=0.1), Observer(stop_at)
    config = TrainConfig(**{"max_epochs": 2, "batch_size": 4, **settings}, progress="off", log_every_n_steps=1)
    trainer = Trainer(
        model, optimizer, nn.MSELoss(), backend=LOCAL, config=config, scheduler=build(optimizer), callbacks=[observer]
    )
    for part in data:
        trainer.fit(part)
    return observer.rates, trainer


def planned(optimizer: Any) -> Any:
    return one_cycle


@pytest.mark.parametrize("is_new_process", [False, True])
def test_planned_schedule_rejects_data_of_another_length_in_this_and_in_a_new_process(
    is_new_process: bool, tmp_path: Path
) -> None:
    message = r"^The run's schedule was planned for 4 steps, but this run has 8, which changes its learning rates\. Con"
    output: dict[str, Any] = {"output_dir": tmp_path, "resume": "auto"} if is_new_process else {}
    if is_new_process:
        fit_scheduled(planned, linear_data(8), stop_at=2, **output)
    first = [] if is_new_process else [linear_data(8)]
    with pytest.raises(CheckpointError, match=message):
        fit_scheduled(planned, *first, linear_data(24), stop_at=2, **output)


def test_planned_schedule_may_continue_with_other_data_of_the_same_length() -> None:
    rates, trainer = fit_scheduled(planned, linear_data(8), linear_data(7), stop_at=2)
    assert (trainer.progress.step, len(rates)) == (4, 4)
    trainer.fit(linear_data(100))  # complete, so it trains no step


def sequential(optimizer: Any, steps: int) -> Any:
    parts = [lr_scheduler.LinearLR(optimizer, 0.5, total_iters=2), lr_scheduler.CosineAnnealingLR(optimizer, steps - 2)]
    return lr_scheduler.SequentialLR(optimizer, parts, [2])


def decay(step: int, *, total: int) -> float:
    return max(0.0, 1 - step / total)


OBJECTS: dict[str, tuple[Callable[[Any, int], Any], str]] = {
    "cosine": (lr_scheduler.CosineAnnealingLR, "T_max=4, but .* T_max=8,"),
    "linear": (lambda o, n: lr_scheduler.LinearLR(o, 1.0, 0.1, total_iters=n), "total_iters=4, but .* total_iters=8,"),
    "one cycle": (one_cycle, "total_steps=4, but .* total_steps=8,"),
    "milestones": (lambda o, n: lr_scheduler.MultiStepLR(o, [1, n]), r"milestones='{1: 1, 4: 1}', but"),
    "sequential": (sequential, r"_schedulers\[1\]\.T_max=2, but .*T_max=6,"),
    "chained": (
        lambda o, n: lr_scheduler.ChainedScheduler([lr_scheduler.PolynomialLR(o, n)]), r"\[0\]\.total_iters=4, but"
    ),
    "closure": (lambda o, n: lr_scheduler.LambdaLR(o, lambda step: max(0.0, 1 - step / n)), r"lr_lambdas\[0\]\.n=4, b"),
    "partial": (
        lambda o, n: lr_scheduler.LambdaLR(o, functools.partial(decay, total=n)), r"lr_lambdas\[0\]\.total=4, but"
    ),
    "lambda in a sequence": (
        lambda o, n: lr_scheduler.SequentialLR(
            o, [lr_scheduler.LambdaLR(o, lambda step: max(0.0, 1 - step / n)), lr_scheduler.ConstantLR(o)], [3]
        ),
        r"_schedulers\[0\]\.lr_lambdas\[0\]\.n=4, but",
    ),
    "plateau": (lambda o, n: lr_scheduler.ReduceLROnPlateau(o, patience=n), "patience=4, but .* patience=8"),
}  # fmt: skip


@pytest.mark.parametrize("name", OBJECTS)
def test_scheduler_object_built_for_another_number_of_steps_is_rejected(name: str, tmp_path: Path) -> None:
    build, message = OBJECTS[name]
    settings: dict[str, Any] = {"output_dir": tmp_path, "resume": "auto"}
    settings["scheduler_interval"] = "epoch" if name == "plateau" else "step"
    for steps in (2, 3):  # the same number of steps may continue
        fit_scheduled(lambda optimizer: build(optimizer, 4), linear_data(8), stop_at=steps, **settings)
    with pytest.raises(CheckpointError, match=message):
        fit_scheduled(lambda optimizer: build(optimizer, 8), linear_data(8), **settings)


def test_planned_scheduler_built_with_other_settings_is_rejected(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"output_dir": tmp_path, "resume": "auto"}

    def build(optimizer: Any, gamma: float) -> Any:
        return lambda optimizer, total_steps: lr_scheduler.StepLR(optimizer, total_steps, gamma)

    for _ in range(2):
        fit_scheduled(functools.partial(build, gamma=0.1), linear_data(8), stop_at=2, **settings)
    with pytest.raises(CheckpointError, match=r"StepLR was built with gamma=0\.1, but .* gamma=0\.5"):
        fit_scheduled(functools.partial(build, gamma=0.5), linear_data(8), **settings)


def test_one_cycle_object_that_ends_before_the_run_is_rejected_before_training() -> None:
    fit_scheduled(lambda optimizer: one_cycle(optimizer, 4), linear_data(8))
    fit_scheduled(lambda optimizer: one_cycle(optimizer, 9), linear_data(8))
    with pytest.raises(ConfigError, match=r"^OneCycleLR was built for 3 steps, of which 0 are completed, but this run"):
        fit_scheduled(lambda optimizer: one_cycle(optimizer, 3), linear_data(8))
    with pytest.raises(
        ConfigError, match=r"built for 8 steps, of which 4 are completed, but this run has 6 more steps"
    ):
        fit_scheduled(
            lambda optimizer: one_cycle(optimizer, 8), linear_data(16), linear_data(24), stop_at=4, max_epochs=2
        )


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(linear_data(16))


def test_end_of_one_cycle_on_a_stream_names_the_scheduler() -> None:
    with pytest.raises(ConfigError, match=r"^The scheduler OneCycleLR failed in its step 4: .* scheduler=lambda opt"):
        fit_scheduled(lambda optimizer: one_cycle(optimizer, 3), Stream())
