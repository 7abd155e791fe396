"""Training with a gradient accumulation schedule equals plain torch, also after a resume within an epoch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from groups import nightly
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from unitrain import Callback, TrainConfig, Trainer
from unitrain.accumulation import epochs_by_accumulation, scale_accumulation
from unitrain.backends.base import Backend
from unitrain.backends.local import LocalBackend
from unitrain.data.batch_size import InitialBatchSizes
from unitrain.data.order import epoch_order
from unitrain.data.sharding import open_training_data
from unitrain.data.training_data import ShardSettings
from unitrain.errors import ConfigError
from unitrain.testing import RankGroup

LOCAL = LocalBackend(torch.device("cpu"))
GROUPS = [("local", 1), ("ddp", 3), *nightly(("horovod", 2))]
SAMPLES, BATCH, EPOCHS = 70, 12, 4  # 70 = 5 micro-batches of 12 samples and one of 10
SCHEDULE = {1: 2, 3: 4}
STEPS_PER_EPOCH = (6, 3, 3, 2)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(data())


class StopAt(Callback):
    """Stops the run after a step, and records the learning rate and the number of samples of each step."""

    def __init__(self, step: int | None) -> None:
        self.step, self.samples, self.rates = step, list[int](), list[float]()

    def on_micro_batch_end(self, trainer: Trainer, batch: Any, micro_batch: Any, loss: Any) -> None:
        if micro_batch.ends_step:
            self.samples.append(micro_batch.step_samples)

    def on_step_end(self, trainer: Trainer) -> None:
        self.rates.append(float(trainer.optimizer.param_groups[0]["lr"]))
        if trainer.progress.step == self.step:
            trainer.stop("enough")


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(SAMPLES, 5, generator=generator), torch.randn(SAMPLES, 2, generator=generator))


def build_model_and_optimizer() -> tuple[nn.Module, SGD]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2))
    return model, SGD(model.parameters(), lr=0.1, momentum=0.9)


def one_cycle(optimizer: Any, total_steps: int) -> OneCycleLR:
    return OneCycleLR(optimizer, max_lr=0.3, total_steps=total_steps)


def train(
    backend: Backend, source: str = "map", stop_at: int | None = None, **settings: Any
) -> tuple[list[float], list[int], list[float]]:
    """Train, and return the parameters, the number of samples per step, and the learning rate after each step."""
    model, optimizer = build_model_and_optimizer()
    callback = StopAt(stop_at)
    chosen = {
        "max_epochs": EPOCHS, "batch_size": BATCH // backend.size, "gradient_accumulation_steps": SCHEDULE, **settings,
    }  # fmt: skip
    config = TrainConfig(progress="off", log_every_n_steps=1, **chosen)
    scheduler = None if source == "stream" or "lr_scaling" in settings else one_cycle
    trainer = Trainer(
        model, optimizer, nn.MSELoss(), backend=backend, config=config, scheduler=scheduler, callbacks=[callback]
    )
    loader = DataLoader(data(), BATCH // backend.size, shuffle=True)
    trainer.fit({"map": data(), "stream": Stream(), "loader": loader}[source])
    return nn.utils.parameters_to_vector(model.parameters()).tolist(), callback.samples, callback.rates


def train_in_plain_torch(source: str = "map", reference_batch_size: int = 0) -> Tensor:
    """Train with plain torch on the batches of the Trainer. If `reference_batch_size` is given, scale the learning
    rate by the global batch size divided by `reference_batch_size`."""
    model, optimizer = build_model_and_optimizer()
    inputs, targets = data().tensors
    steps = sum(STEPS_PER_EPOCH)
    scheduler = None if source == "stream" or reference_batch_size else one_cycle(optimizer, steps)
    for epoch in range(EPOCHS):
        order = epoch_order(SAMPLES, seed=0, epoch=epoch, shuffle=source != "stream")
        accumulated = {0: 1, 1: 2, 2: 2, 3: 4}[epoch]
        for chosen in order.split(BATCH * accumulated):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs[chosen]), targets[chosen]).backward()
            if reference_batch_size:
                optimizer.param_groups[0]["lr"] = 0.1 * BATCH * accumulated / reference_batch_size
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def run_all_cases(backend: Backend, folder: str) -> dict[str, Any]:
    """Return the results of uninterrupted runs and of runs that stop at different steps and resume."""
    results: dict[str, Any] = {source: train(backend, source) for source in ("map", "loader", "stream")}
    results["scaled"] = train(backend, lr_scaling="linear", reference_batch_size=24)
    for stop_at in (8, 12):  # within the second epoch, and at the end of the third
        parts = [
            train(backend, stop_at=stop, output_dir=f"{folder}/{stop_at}", resume=True) for stop in (stop_at, None)
        ]
        results[f"resumed at {stop_at}"] = (parts[1][0], parts[0][1] + parts[1][1], parts[0][2] + parts[1][2])
    return results


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: f"{group[0]}-{group[1]}")
def test_training_with_a_schedule_equals_plain_torch(group: tuple[str, int], tmp_path: Path) -> None:
    if group[0] == "local":
        ranks = [run_all_cases(LOCAL, str(tmp_path))]
    else:
        with RankGroup(*group) as started:
            ranks = started.run(run_all_cases, str(tmp_path))
    sizes = [12, 12, 12, 12, 12, 10, *[24, 24, 22] * 2, 48, 22]
    for results in ranks:
        for source in ("map", "loader", "stream"):
            assert results[source][1] == sizes
            torch.testing.assert_close(
                torch.tensor(results[source][0]), train_in_plain_torch(source), atol=1e-6, rtol=0
            )
        torch.testing.assert_close(
            torch.tensor(results["scaled"][0]), train_in_plain_torch(reference_batch_size=24), atol=1e-6, rtol=0
        )
        for stop_at in (8, 12):
            parameters, *others = results[f"resumed at {stop_at}"]
            assert others == list(results["map"][1:])
            torch.testing.assert_close(torch.tensor(parameters), train_in_plain_torch(), atol=1e-6, rtol=0)
            if group[0] == "local":  # with several ranks, the summation order may differ in the first step of a process
                assert parameters == results["map"][0]


def test_total_steps_account_for_the_schedule_and_max_steps(tmp_path: Path) -> None:
    totals = []

    def build(optimizer: Any, total_steps: int) -> OneCycleLR:
        totals.append(total_steps)
        return one_cycle(optimizer, total_steps)

    for limit in (None, 2):
        model, optimizer = build_model_and_optimizer()
        config = TrainConfig(
            max_epochs=EPOCHS, batch_size=BATCH, gradient_accumulation_steps=SCHEDULE, limit_train_steps=limit,
            progress="off",
        )  # fmt: skip
        trainer = Trainer(model, optimizer, nn.MSELoss(), backend=LOCAL, config=config, scheduler=build)
        trainer.fit(data())
        assert trainer.progress.step == totals[-1]
    assert totals == [sum(STEPS_PER_EPOCH), 8]


def test_elastic_job_keeps_the_global_batch_size_of_each_epoch() -> None:
    # The first attempt had 3 ranks with 8 samples each.
    settings = ShardSettings(
        batch_size=8,
        gradient_accumulation_steps={0: 2, 1: 4},
        is_elastic=True,
        initial_batch_sizes=InitialBatchSizes(8, 48),
    )
    shard = open_training_data(data(), LOCAL, settings)
    assert shard.global_batch_size == 48
    shard.begin_epoch(1)
    assert shard.global_batch_size == 96
    shard.begin_epoch(0)
    assert [part.step_samples for _, part in shard.micro_batches(0) if part.ends_step] == [48, 22]


def test_schedule_is_stored_sorted_and_starts_with_epoch_zero() -> None:
    config = TrainConfig(max_epochs=9, batch_size=2, gradient_accumulation_steps={6: 8, 3: 2})
    assert config.gradient_accumulation_steps == {0: 1, 3: 2, 6: 8}
    assert asdict(config)["gradient_accumulation_steps"] == {0: 1, 3: 2, 6: 8}
    assert list(epochs_by_accumulation(config.gradient_accumulation_steps, 2, 7)) == [
        range(2, 3),
        range(3, 6),
        range(6, 7),
    ]
    assert list(epochs_by_accumulation(None, 4, 4)) == []
    assert scale_accumulation({0: 2, 1: 4}, 3, 2) == {0: 3, 1: 6}
    assert scale_accumulation(None, 4, 2) == 2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "is an empty schedule. Use gradient_accumulation_steps={0: 1, 4: 4}"),
        ({-1: 2}, "An epoch in TrainConfig.gradient_accumulation_steps must be at least 0, got -1"),
        ({"4": 2}, "An epoch in TrainConfig.gradient_accumulation_steps must be a whole number, got '4'"),
        ({4: 0}, r"TrainConfig.gradient_accumulation_steps\[4\] must be at least 1, got 0"),
        ({4: True}, r"TrainConfig.gradient_accumulation_steps\[4\] must be a whole number, got True"),
        ([1, 2], r"TrainConfig.gradient_accumulation_steps must be a whole number, got \[1, 2\]"),
    ],
)
def test_invalid_schedule_is_rejected(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainConfig(max_epochs=1, batch_size=2, gradient_accumulation_steps=given)


def test_schedule_with_a_fixed_global_batch_size_is_rejected() -> None:
    with pytest.raises(
        ConfigError, match=r"changes the global batch size, but global_batch_size is 64. Set batch_size"
    ):
        TrainConfig(max_epochs=1, global_batch_size=64, gradient_accumulation_steps={0: 1, 2: 2})
