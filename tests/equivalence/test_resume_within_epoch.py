"""A run that is interrupted within an epoch and resumed has the results of the complete epoch."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from groups import GROUPS_ON_HOROVOD
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from unitrain import Callback, EarlyStopping, TrainConfig, Trainer
from unitrain.backends.base import Backend
from unitrain.testing import RankGroup

EPOCHS, STEPS = 4, 6  # an epoch has STEPS steps
SAMPLES, GLOBAL_BATCH = 70, 12


class Kill(BaseException):
    """Simulates that the process is killed where this exception is raised."""


class KillAt(Callback):
    """Simulates a kill after a step, and counts completed epochs."""

    def __init__(self, step: int) -> None:
        self.step, self.epochs = step, 0

    def on_micro_batch_end(self, trainer: Trainer, batch: Any, micro_batch: Any, loss: Any) -> None:
        if trainer.progress.step == self.step:
            trainer.checkpointer.wait()  # so that the previous checkpoint is complete
            raise Kill

    def on_epoch_end(self, trainer: Trainer, results: dict[str, float]) -> None:
        if trainer.progress.step == self.step:
            trainer.checkpointer.wait()
            raise Kill
        self.epochs += trainer.progress.sample == 0


class Stream(IterableDataset[tuple[Tensor, ...]]):
    def __init__(self, data: TensorDataset) -> None:
        self.data = data

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        return iter([self.data[index] for index in range(len(self.data))])


def train(
    backend: Backend, folder: str, *, resume: bool = False, kill_at: int = -1, stream: bool = False, **settings: Any
) -> tuple[dict[str, float], float, int, list[float]]:
    """Train, and return the results, the learning rate, the number of completed epochs, and the parameters."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5)
    generator = torch.Generator().manual_seed(6)
    # The labels of the second half contradict the labels of the first half, so the loss over a part of an epoch differs
    # from the loss over the complete epoch.
    inputs = torch.randn(SAMPLES, 6, generator=generator).double()
    labels = torch.where(torch.arange(SAMPLES) < SAMPLES // 2, inputs[:, 0] > 0, inputs[:, 0] < 0).long()
    data: Dataset[Any] = TensorDataset(inputs, labels)
    weighted = settings.pop("tokens", False)

    def loss_fn(output: Tensor, target: Tensor) -> Any:
        losses = nn.functional.cross_entropy(output, target, reduction="none")
        return (losses.sum(), (target + 1).sum()) if weighted else losses.mean()

    config = TrainConfig(
        **{"max_epochs": EPOCHS, "checkpoint_every_epochs": 2, **settings}, batch_size=GLOBAL_BATCH // backend.size,
        shuffle=False, output_dir=folder, resume=resume, progress="off", scheduler_interval="epoch",
        monitor="train_loss", checkpoint_every_steps=2, keep_last=1, keep_best="train_loss",
    )  # fmt: skip
    killing = KillAt(kill_at)
    trainer = Trainer(
        model, optimizer, loss_fn, backend=backend, config=config, callbacks=[killing],
        scheduler=ReduceLROnPlateau(optimizer, patience=0, threshold=0.05, factor=0.5),
    )  # fmt: skip
    results: dict[str, float] = {}
    with contextlib.suppress(Kill):
        results = trainer.fit(Stream(data) if stream else data)  # type: ignore[arg-type]
    parameters = nn.utils.parameters_to_vector(model.parameters()).tolist()
    return results, float(optimizer.param_groups[0]["lr"]), killing.epochs, parameters


def history_rows(folder: Path) -> list[tuple[int, int, float]]:
    found = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    return [(row["epoch"], row["step"], row["train_loss"]) for row in found]


def kept_checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("step-*"))


INTERRUPTIONS = {
    "in the middle": {"kill_at": STEPS + 4},
    "after the checkpoint at the last step of an epoch": {"kill_at": STEPS},
    "in the step after an epoch without a checkpoint": {"kill_at": STEPS + 1},
    # The loss over the part of the epoch after the interruption is larger than the loss of the previous epoch.
    "in the last epoch": {"kill_at": 3 * STEPS + 4, "checkpoint_every_epochs": 1},
    "tokens": {"kill_at": STEPS + 4, "tokens": True},
    "a limited epoch": {"kill_at": 4, "limit_train_steps": 4},
    "a stream": {"kill_at": STEPS + 4, "stream": True},
    "a stream at the end of an epoch": {"kill_at": STEPS, "stream": True},
}


@pytest.fixture(scope="module", params=GROUPS_ON_HOROVOD, ids=lambda group: f"{group[0]}-{group[1]}")
def ranks(request: pytest.FixtureRequest) -> Iterator[RankGroup]:
    with RankGroup(*request.param) as group:
        yield group


@pytest.fixture(scope="module")
def alone() -> Iterator[RankGroup]:
    with RankGroup("local", 1) as group:
        yield group


def train_uninterrupted_and_killed(backend: Backend, uninterrupted: str, part: str, case: dict[str, Any]) -> list[Any]:
    more = {name: value for name, value in case.items() if name != "kill_at"}
    return [train(backend, uninterrupted, **more), train(backend, part, **case)]


def resume(backend: Backend, folder: str, case: dict[str, Any]) -> Any:
    return train(backend, folder, resume=True, **{name: value for name, value in case.items() if name != "kill_at"})


@pytest.mark.parametrize("case", INTERRUPTIONS.values(), ids=INTERRUPTIONS.keys())
def test_results_after_an_interruption_cover_complete_epochs(
    ranks: RankGroup, alone: RankGroup, case: dict[str, Any], tmp_path: Path
) -> None:
    uninterrupted, part = tmp_path / "whole", tmp_path / "part"
    expected, killed = ranks.run(train_uninterrupted_and_killed, str(uninterrupted), str(part), case)[0]
    assert killed[0] == {}
    other = tmp_path / "other"
    shutil.copytree(part, other)
    found = ranks.run(resume, str(part), case)[0]
    # The summation order of three ranks depends on the positions of gradients in a buffer. DDP rebuilds its buckets
    # after the first step of every run, and Horovod fuses tensors that happen to be ready.
    tolerance = 1e-9 if ranks.size > 2 else 0.0
    assert found[0] == pytest.approx(expected[0], rel=tolerance, abs=0)
    assert found[1] == expected[1]
    assert found[3] == pytest.approx(expected[3], rel=tolerance, abs=0)
    # Each epoch after the checkpoint ends once and is recorded once. A checkpoint is written every two steps.
    assert found[2] == EPOCHS - (case["kill_at"] - 1) // 2 * 2 // STEPS
    for one, other_one in zip(history_rows(part), history_rows(uninterrupted), strict=True):
        assert one == pytest.approx(other_one, rel=tolerance, abs=0)
    assert kept_checkpoints(part) == kept_checkpoints(uninterrupted)
    steps = case.get("limit_train_steps", STEPS)
    assert [row[:2] for row in history_rows(uninterrupted)] == [
        (epoch, epoch * steps) for epoch in range(1, EPOCHS + 1)
    ]
    assert expected[1] < 0.3 or steps < STEPS  # the scheduler must have reduced the rate
    if case.get("stream") and ranks.size > 1:
        return
    (moved,) = alone.run(resume, str(other), case)
    assert moved[0] == pytest.approx(expected[0], rel=1e-9)
    assert moved[1] == expected[1]
    assert moved[3] == pytest.approx(expected[3], rel=1e-6)


def train_until_stopped_early(backend: Backend, folder: str | None, stops: list[int]) -> int:
    """Train a run whose result never improves, and interrupt and resume it at the steps `stops`. Return the step at
    which EarlyStopping ends it."""
    steps = 0
    for stop in [*stops, None]:
        model = nn.Linear(6, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        config = TrainConfig(
            max_epochs=9,
            batch_size=4,
            output_dir=folder,
            resume=folder is not None,
            progress="off",
            log_every_n_steps=1,
        )

        class Stops(Callback):
            def on_step_end(self, trainer: Trainer, stop: int | None = stop) -> None:
                if trainer.progress.step == stop:
                    trainer.stop("requested by the test")

        trainer = Trainer(
            model, optimizer, nn.CrossEntropyLoss(), backend=backend, config=config,
            metrics={"constant": lambda output, target: 1.0},
            callbacks=[EarlyStopping("val_constant", patience=2), Stops()],
        )  # fmt: skip
        data = TensorDataset(torch.ones(20, 6), torch.zeros(20, dtype=torch.int64))
        trainer.fit(data, data)
        steps = trainer.progress.step
    return steps


def test_early_stopping_does_not_count_an_interruption_as_an_epoch(alone: RankGroup, tmp_path: Path) -> None:
    assert alone.run(train_until_stopped_early, None, []) == [15]
    assert alone.run(train_until_stopped_early, str(tmp_path), [7, 8, 9]) == [15]
