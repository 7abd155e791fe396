"""The end of an epoch: an interruption neither loses nor repeats steps, samples, scheduler steps, results or rows."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from groups import GROUPS
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from unitrain import Callback, TrainConfig, Trainer
from unitrain.backends.base import Backend
from unitrain.backends.local import LocalBackend
from unitrain.checkpoint import files
from unitrain.errors import Preempted
from unitrain.progress import stopping
from unitrain.progress.preemption import CommitGuard
from unitrain.testing import RankGroup

EPOCHS, STEPS = 4, 3


class Interrupted(BaseException):
    """An interruption such as KeyboardInterrupt, which would end the ranks of a RankGroup."""


class Failure:
    """Raises an exception once, at a `place` in the second epoch, on every rank."""

    def __init__(self, place: str) -> None:
        self.place = place

    def at(self, place: str, epoch: int) -> None:
        if self.place == place and epoch == 2:
            self.place = ""
            raise Interrupted


class Recorder(Callback):
    def __init__(self, failure: Failure) -> None:
        self.failure, self.rates, self.epochs = failure, list[Any](), list[int]()

    def on_before_optimizer_step(self, trainer: Trainer) -> None:
        self.rates.append((trainer.progress.epoch, trainer.optimizer.param_groups[0]["lr"]))

    def on_step_end(self, trainer: Trainer) -> None:
        if trainer.progress.step == 2 * STEPS:
            self.failure.at("last step", 2)

    def on_epoch_end(self, trainer: Trainer, results: dict[str, float]) -> None:
        self.failure.at("on_epoch_end", trainer.progress.epoch)
        self.epochs.append(trainer.progress.epoch)

    def state_dict(self) -> dict[str, Any]:
        return {"rates": list(self.rates), "epochs": list(self.epochs)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rates, self.epochs = list(state["rates"]), list(state["epochs"])


def make_data(samples: int, size: int = 1) -> TensorDataset:
    generator = torch.Generator().manual_seed(samples)
    inputs = torch.randn(samples * size, 4, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, inputs[:, :2] ** 2)


def make_trainer(backend: Backend, folder: str, kind: str, failure: Failure, **settings: Any) -> tuple[Trainer, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 2)).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    recorder = Recorder(failure)
    evaluations = 0

    def error(output: Tensor, target: Tensor) -> Tensor:
        nonlocal evaluations
        evaluations += 1
        failure.at("validation", evaluations)
        return (output - target).abs().mean(1)

    scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    if kind == "plateau":
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0, factor=0.5)
    elif kind == "planned":
        scheduler = lambda optimizer, total: torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total)  # noqa: E731
    config = TrainConfig(
        **{"max_epochs": EPOCHS, "batch_size": 12 // backend.size, **settings}, eval_batch_size=100,
        output_dir=folder, scheduler_interval="epoch", progress="off", keep_last=None, check_weights=False,
        ema_decay=0.5,
    )  # fmt: skip
    trainer = Trainer(
        model, optimizer, nn.MSELoss(), backend=backend, config=config, scheduler=scheduler,
        metrics={"error": error}, callbacks=[recorder],
    )  # fmt: skip
    return trainer, recorder


def describe(trainer: Trainer, recorder: Recorder, results: dict[str, float], folder: str) -> list[Any]:
    rows = [json.loads(line) for line in (Path(folder) / "history.jsonl").read_text().splitlines()]
    assert trainer.averaged_model is not None
    return [
        nn.utils.parameters_to_vector(trainer.model.parameters()).tolist(),
        nn.utils.parameters_to_vector(trainer.averaged_model.parameters()).tolist(),
        recorder.rates,
        recorder.epochs,
        results,
        [{name: row[name] for name in ("epoch", "step", "train_loss", "val_loss", "epochs")} for row in rows],
        {
            path.name: files.read_manifest(path)["results"]
            for path in files.list_checkpoints(Path(folder))
            if files.step_of(path) % STEPS == 0
        },
    ]


def train(backend: Backend, folder: str, kind: str, place: str, route: str, settings: dict[str, Any]) -> list[Any]:
    """Train with an interruption, and complete the run with the same Trainer or with one that resumes."""
    failure = Failure(place)
    trainer, recorder = make_trainer(backend, folder, kind, failure, **settings)
    results: dict[str, float] = {}
    with contextlib.suppress(Interrupted):
        results = trainer.fit(make_data(12 * STEPS), make_data(20))
    if place:
        assert not results
        trainer.checkpointer.wait()
        backend.barrier()
        if route == "resume":
            trainer, recorder = make_trainer(backend, folder, kind, Failure(""), **settings, resume=True)
        results = trainer.fit(make_data(12 * STEPS), make_data(20))
    return describe(trainer, recorder, results, folder)


@pytest.fixture(scope="module", params=GROUPS, ids=lambda group: f"{group[0]}-{group[1]}")
def ranks(request: pytest.FixtureRequest) -> Iterator[RankGroup]:
    with RankGroup(*request.param) as group:
        yield group


def train_with_interruptions(backend: Backend, folder: str, kind: str, settings: dict[str, Any]) -> dict[str, Any]:
    found = {"": train(backend, f"{folder}/whole", kind, "", "", settings)}
    for place in ("last step", "validation", "on_epoch_end"):
        for route in ("fit", "resume"):
            case = f"{place}, {route}"
            found[case] = train(backend, f"{folder}/{place}-{route}", kind, place, route, settings)
    return found


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("planned", {"checkpoint_every_epochs": 3, "checkpoint_every_steps": 1, "async_checkpoints": False}),
        ("plateau", {"checkpoint_format": "sharded", "checkpoint_every_steps": STEPS}),
        ("step", {"max_epochs": None, "max_steps": 2 * STEPS}),
    ],
)
def test_interrupted_end_of_an_epoch_is_completed_once(
    ranks: RankGroup, tmp_path: Path, kind: str, settings: dict[str, Any]
) -> None:
    found = ranks.run(train_with_interruptions, str(tmp_path), kind, settings)[0]
    expected = found.pop("")
    assert len({rate for _, rate in expected[2]}) > 1
    for case, values in found.items():
        for value, wanted in zip(values, expected, strict=True):
            if isinstance(value, list) and isinstance(value[0], float):
                assert value == pytest.approx(wanted, rel=1e-9), case
            elif isinstance(value, dict):
                assert value.keys() == wanted.keys(), case
                for name in value:
                    assert value[name] == pytest.approx(wanted[name], rel=1e-9), case
            elif isinstance(value[0], dict):
                for row, wanted_row in zip(value, wanted, strict=True):
                    assert row == pytest.approx(wanted_row, rel=1e-9), case
            else:
                assert value == wanted, case


class InterruptedSGD(torch.optim.SGD):
    """SGD during whose fifth step, between two parameters, SIGINT is sent to this process."""

    steps = 0

    def step(self, closure: Any = None) -> None:
        self.steps += 1
        for index, parameter in enumerate(self.param_groups[0]["params"]):
            with torch.no_grad():
                parameter -= self.param_groups[0]["lr"] * parameter.grad
            if self.steps == 5 and index == 0:
                os.kill(os.getpid(), signal.SIGINT)


def train_with_ctrl_c(folder: Path, optimizer_class: Any) -> tuple[list[Any], int]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)).double()
    optimizer = optimizer_class(model.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    config = TrainConfig(max_epochs=2, batch_size=12, output_dir=folder, progress="off", ema_decay=0.5)
    backend = LocalBackend(torch.device("cpu"))
    trainer = Trainer(model, optimizer, nn.MSELoss(), backend=backend, config=config, scheduler=scheduler)
    interruptions = 0
    while not trainer.is_finished:
        try:
            trainer.fit(make_data(12 * STEPS))
        except KeyboardInterrupt:
            interruptions += 1
            assert trainer.progress.step == 5
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert trainer.averaged_model is not None
    parameters = [*trainer.model.parameters(), *trainer.averaged_model.parameters()]
    return [parameter.tolist() for parameter in parameters] + [optimizer.param_groups[0]["lr"]], interruptions


def test_ctrl_c_during_a_step_is_raised_after_the_step(tmp_path: Path) -> None:
    expected, _ = train_with_ctrl_c(tmp_path / "whole", torch.optim.SGD)
    found, interruptions = train_with_ctrl_c(tmp_path / "part", InterruptedSGD)
    assert interruptions == 1
    for value, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.tensor(value), torch.tensor(wanted))


def interrupt_this_process() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_second_ctrl_c_interrupts_a_step() -> None:
    guard = CommitGuard()
    guard.install()
    try:
        with contextlib.suppress(KeyboardInterrupt), guard:
            interrupt_this_process()
            with pytest.raises(KeyboardInterrupt):
                interrupt_this_process()
        with pytest.raises(KeyboardInterrupt):
            interrupt_this_process()
        with guard:
            pass
    finally:
        guard.remove()


class PreemptedError:
    """A metric that counts its calls and sends SIGTERM to this process in the 13th call."""

    def __init__(self, *, sends_signal: bool) -> None:
        self.sends_signal, self.batches = sends_signal, 0

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        self.batches += 1
        if self.batches == 13 and self.sends_signal:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.5)  # until the thread that receives the signal has run
        return (output - target).abs().mean(1)


def preempt_in_validation(backend: Backend, folder: str, settings: dict[str, Any]) -> list[Any]:
    """Return the batches evaluated before the preemption, and the results of the resumed and of a complete run."""
    stopping._INTERVAL_SECONDS = 0.0  # the ranks exchange signals after each batch
    found: list[Any] = []
    for part, receiver in (("whole", -1), ("part", backend.size - 1), ("part", -1)):
        torch.manual_seed(0)
        model = nn.Linear(4, 2).double()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        config = TrainConfig(
            **settings, max_epochs=3, batch_size=12 // backend.size, eval_batch_size=1, progress="off",
            output_dir=f"{folder}/{part}", resume=True, keep_last=None,
        )  # fmt: skip
        metric = PreemptedError(sends_signal=backend.rank == receiver)
        trainer = Trainer(model, optimizer, nn.MSELoss(), backend=backend, config=config, metrics={"error": metric})
        try:
            results = trainer.fit(make_data(12 * STEPS), make_data(10, backend.size))
            found.append([results, nn.utils.parameters_to_vector(trainer.model.parameters()).tolist()])
        except Preempted:
            newest = files.list_checkpoints(Path(folder, part))[0]
            found.append([metric.batches, trainer.progress.step, files.step_of(newest)])
    return found


@pytest.mark.parametrize("settings", [{}, {"checkpoint_every_epochs": 3}])
def test_preemption_signal_ends_a_validation(ranks: RankGroup, tmp_path: Path, settings: dict[str, Any]) -> None:
    for whole, part, resumed in ranks.run(preempt_in_validation, str(tmp_path), settings):
        # Each rank evaluates ten batches per validation, and is interrupted in the third batch of the second one.
        assert part == [13, 2 * STEPS, 2 * STEPS]
        assert resumed[0] == pytest.approx(whole[0], rel=1e-9)
        assert resumed[1] == pytest.approx(whole[1], rel=1e-9)
