"""Checkpoints that are written in a background thread, and their retention."""

from __future__ import annotations

import json
import logging
import math
import os
import threading
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedulers
from torch.optim import swa_utils
from torch.utils.data import TensorDataset

from unitrain import Callback, TrainConfig, Trainer
from unitrain.backends.base import Backend
from unitrain.backends.local import LocalBackend
from unitrain.checkpoint import files
from unitrain.checkpoint.state_copy import copy_to_host, plain_state
from unitrain.checkpoint.writer import CheckpointWriter, Retention
from unitrain.errors import CallbackError, CheckpointError, ConfigError
from unitrain.testing import RankGroup

LOCAL = LocalBackend(torch.device("cpu"))


def make_trainer(backend: Backend, output: Path | None, **settings: Any) -> Trainer:
    """Return a Trainer with four steps per epoch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.2), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    metrics, callbacks = settings.pop("metrics", None), settings.pop("callbacks", ())
    kept = {"keep_last": None} if output is not None else {}
    config = TrainConfig(
        **{"batch_size": 12 // backend.size, "output_dir": output, "progress": "off", **kept, **settings}
    )
    return Trainer(
        model, optimizer, nn.CrossEntropyLoss(), backend=backend, config=config, metrics=metrics, callbacks=callbacks
    )


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(48, 6, generator=generator), torch.randint(3, (48,), generator=generator))


def parameters(trainer: Trainer) -> Tensor:
    return nn.utils.parameters_to_vector(trainer.model.parameters()).detach()


def saved_steps(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in folder.glob("step-*"))


def test_host_copy_is_independent_and_keeps_shared_memory() -> None:
    weight = torch.arange(12.0).reshape(3, 4)
    large = torch.zeros(10_000)
    state = {"a": weight, "tied": weight, "row": [weight[1], 3], "t": (weight.t(), None), "view": large[5:7]}
    copy = copy_to_host(state)
    expected = weight.clone()
    weight.fill_(-1)
    assert torch.equal(copy["a"], expected)
    assert torch.equal(copy["t"][0], expected.t())
    assert not copy["t"][0].is_contiguous()
    assert torch.equal(copy["row"][0], expected[1])
    assert copy["a"].data_ptr() == copy["tied"].data_ptr() == copy["t"][0].data_ptr()
    assert copy["view"].untyped_storage().nbytes() == 8
    assert copy["row"][1] == 3
    assert copy["t"][1] is None


def test_host_copy_keeps_container_types() -> None:
    tensor = torch.ones(2)
    state = {
        "counter": Counter({2: 1, 5: 3}), "ordered": OrderedDict(b=tensor, a=1), "tuple": (tensor, [tensor, {1: "x"}]),
        "of tensors": Counter({"a": tensor}), "size": torch.Size([2, 3]), "set": {1, 2},
    }  # fmt: skip
    copy = copy_to_host(plain_state(state))
    tensor.fill_(7)
    assert str(copy) == str(state).replace("tensor([7., 7.])", "tensor([1., 1.])")
    assert {name: type(value) for name, value in copy.items()} == {name: type(value) for name, value in state.items()}
    assert copy["set"] is not state["set"]


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "LambdaLR": lambda optimizer: schedulers.LambdaLR(optimizer, lambda step: 0.9**step),
    "MultiplicativeLR": lambda optimizer: schedulers.MultiplicativeLR(optimizer, lambda step: 0.9),
    "StepLR": lambda optimizer: schedulers.StepLR(optimizer, 3),
    "MultiStepLR": lambda optimizer: schedulers.MultiStepLR(optimizer, [2, 5, 5, 9]),
    "MultiStepLR of numpy": lambda optimizer: schedulers.MultiStepLR(optimizer, np.array([2, 5, 5, 9])),
    "ConstantLR": lambda optimizer: schedulers.ConstantLR(optimizer, total_iters=9),
    "LinearLR": lambda optimizer: schedulers.LinearLR(optimizer, total_iters=9),
    "ExponentialLR": lambda optimizer: schedulers.ExponentialLR(optimizer, 0.9),
    "PolynomialLR": lambda optimizer: schedulers.PolynomialLR(optimizer, 20, 2.0),
    "CosineAnnealingLR": lambda optimizer: schedulers.CosineAnnealingLR(optimizer, 20),
    "CosineAnnealingWarmRestarts": lambda optimizer: schedulers.CosineAnnealingWarmRestarts(optimizer, 5, 2),
    "CyclicLR": lambda optimizer: schedulers.CyclicLR(optimizer, 0.01, 0.1, 4, mode="exp_range", gamma=0.9),
    "OneCycleLR": lambda optimizer: schedulers.OneCycleLR(optimizer, 0.1, total_steps=20, three_phase=True),
    "SequentialLR": lambda optimizer: schedulers.SequentialLR(
        optimizer, [schedulers.ConstantLR(optimizer), schedulers.MultiStepLR(optimizer, [1, 4])], [4]
    ),
    "ChainedScheduler": lambda optimizer: schedulers.ChainedScheduler(
        [schedulers.LinearLR(optimizer), schedulers.MultiStepLR(optimizer, [2, 5])]
    ),
    "ReduceLROnPlateau": lambda optimizer: schedulers.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5),
    "SWALR": lambda optimizer: swa_utils.SWALR(optimizer, 0.2, anneal_epochs=9),
}


def test_parametrization_covers_every_torch_scheduler() -> None:
    public = {
        name
        for name, value in vars(schedulers).items()
        if isinstance(value, type) and issubclass(value, schedulers.LRScheduler) and not name.startswith("_")
    }
    assert {name.split()[0] for name in SCHEDULERS} == public - {"LRScheduler"} | {"SWALR"}


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step", "ignore:To get the last learning rate")
@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_torch_scheduler_continues_after_a_resume(tmp_path: Path, name: str, asynchronous: bool) -> None:
    def run(epochs: int, output: Path | None) -> list[float]:
        rates: list[float] = []

        class Rates(Callback):
            def on_step_end(self, trainer: Trainer) -> None:
                rates.append(trainer.optimizer.param_groups[0]["lr"])

        torch.manual_seed(0)
        model = nn.Linear(6, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        config = TrainConfig(
            max_epochs=epochs, batch_size=12, output_dir=output, resume=output is not None, progress="off",
            scheduler_interval="epoch" if name == "ReduceLROnPlateau" else "step", async_checkpoints=asynchronous,
        )  # fmt: skip
        Trainer(
            model, optimizer, nn.CrossEntropyLoss(), backend=LOCAL, config=config, callbacks=[Rates()],
            scheduler=SCHEDULERS[name](optimizer),
        ).fit(data())  # fmt: skip
        return [*rates, *nn.utils.parameters_to_vector(model.parameters()).tolist()]

    uninterrupted = run(4, None)
    assert [*run(1, tmp_path)[:4], *run(4, tmp_path)] == uninterrupted
    assert len(set(uninterrupted[:16])) > 1


class StatefulCallback(Callback):
    """A callback with state of every supported type. It modifies the state in place after every step."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {
            "counts": Counter(), "ordered": OrderedDict(), "tensor": torch.zeros(3),
            "nested": [{"list": [0]}, (1, [2])], "set": {0}, "numpy": np.float64(0), "none": None, "shared": None,
        }  # fmt: skip
        self.values["shared"] = self.values["tensor"][1:]

    def on_step_end(self, trainer: Trainer) -> None:
        step = trainer.progress.step
        self.values["counts"][f"step {step % 3}"] += step
        self.values["ordered"][str(step)] = step
        self.values["tensor"] += step
        self.values["nested"][0]["list"].append(step)
        self.values["set"].add(step)
        self.values["numpy"] += 0.5

    def state_dict(self) -> dict[str, Any]:
        return self.values

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = state


@pytest.mark.parametrize("asynchronous", [True, False])
def test_callback_state_is_saved_at_the_step_and_restored(
    tmp_path: Path, asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = files.write

    def slow_write(*arguments: Any) -> None:
        time.sleep(0.2)  # training could modify the state during this time
        write(*arguments)

    monkeypatch.setattr(files, "write", slow_write)
    known: list[str] = []

    class RecordState(Callback):
        def on_step_end(self, trainer: Trainer) -> None:
            known.append(str(stateful.values))

    stateful = StatefulCallback()
    model = nn.Linear(6, 3)
    config = TrainConfig(
        max_steps=4, batch_size=12, output_dir=tmp_path, checkpoint_every_steps=1, keep_last=None, progress="off",
        async_checkpoints=asynchronous,
    )  # fmt: skip
    parts = (model, torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss())
    Trainer(*parts, backend=LOCAL, config=config, callbacks=[stateful, RecordState()]).fit(data())
    for step in (1, 2, 3, 4):
        again = StatefulCallback()
        config = TrainConfig(max_steps=5, batch_size=12, resume=tmp_path / f"step-{step:09d}", progress="off")
        Trainer(*parts, backend=LOCAL, config=config, callbacks=[again])
        # numpy numbers are restored as Python numbers.
        assert str(again.values) == known[step - 1].replace("np.float64", "float").replace(
            f"float({step / 2})", str(step / 2)
        )


@pytest.mark.parametrize("asynchronous", [True, False])
def test_unsupported_callback_state_is_rejected_by_name(tmp_path: Path, asynchronous: bool) -> None:
    class Groups(Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"groups": defaultdict(list, a=[1])}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    model = nn.Linear(6, 3)
    config = TrainConfig(
        max_steps=2, batch_size=12, output_dir=tmp_path, progress="off", async_checkpoints=asynchronous
    )
    parts = (model, torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss())
    with pytest.raises(
        CheckpointError, match=r"^callbacks\['Groups'\]\['groups'\] is of class collections\.defaultdict, which"
    ):
        Trainer(*parts, backend=LOCAL, config=config, callbacks=[Groups()]).fit(data())
    assert saved_steps(tmp_path) == []


class Gate:
    """Simulates a slow disk: `files.write` blocks until `opened` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened, self.entered, self._write = threading.Event(), threading.Event(), files.write
        monkeypatch.setattr(files, "write", self.write)

    def write(self, *arguments: Any) -> None:
        self.entered.set()
        assert self.opened.wait(30)
        self._write(*arguments)


def test_training_continues_while_a_checkpoint_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    writer = CheckpointWriter(tmp_path, LOCAL, Retention(None), asynchronous=True)
    model = nn.Linear(4, 4)
    saved = model.weight.detach().clone()
    writer.save(1, model, {"step": 1}, {"step": 1})
    assert gate.entered.wait(10)
    with torch.no_grad():
        model.weight.fill_(7)  # simulates the next step while the first checkpoint is being written
    assert saved_steps(tmp_path) == []
    started = time.perf_counter()
    threading.Timer(0.5, gate.opened.set).start()
    writer.save(2, model, {"step": 2}, {"step": 2})  # blocks until the first checkpoint is written
    assert time.perf_counter() - started > 0.3
    writer.wait()
    assert saved_steps(tmp_path) == [1, 2]
    other = nn.Linear(4, 4)
    files.load_model(other, str(files.checkpoint_path(tmp_path, 1) / files.MODEL))
    assert torch.equal(other.weight, saved)


def test_state_that_does_not_fit_in_host_memory_is_reported_by_wait(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, LOCAL, Retention(None), asynchronous=True)
    # A copy of this expanded view needs 2**57 bytes.
    too_large = torch.zeros(1, dtype=torch.complex64).expand(2**54).conj()
    writer.save(1, nn.Linear(4, 4), {"large": too_large}, {"step": 1})
    with pytest.raises(CheckpointError, match=r"(?s)^Cannot copy the state of .*: .*async_checkpoints=False"):
        writer.wait()
    assert saved_steps(tmp_path) == []


def test_long_wait_for_checkpoint_is_logged_with_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unitrain.checkpoint.writer.MAX_WAIT_PER_COLLECTIVE_SECONDS", 0.01)
    monkeypatch.setattr("unitrain.checkpoint.writer._WARN_AFTER_SECONDS", 0.02)
    gate, messages = Gate(monkeypatch), []

    class OpenAfterSecondWarning(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())
            if len(messages) == 2:
                gate.opened.set()

    handler, log = OpenAfterSecondWarning(), logging.getLogger("unitrain.checkpoint.writer")
    log.addHandler(handler)
    try:
        model = nn.Linear(4, 4)
        CheckpointWriter(tmp_path, LOCAL, Retention(None), asynchronous=False).save(1, model, {"step": 1}, {"step": 1})
    finally:
        log.removeHandler(handler)
    assert saved_steps(tmp_path) == [1]
    for message in messages:
        assert f"s for a checkpoint that is being written to '{tmp_path}'. Check that its file system" in message


@pytest.mark.parametrize("asynchronous", [True, False])
def test_fit_returns_after_the_last_checkpoint_is_written(tmp_path: Path, asynchronous: bool) -> None:
    make_trainer(LOCAL, tmp_path, max_epochs=2, async_checkpoints=asynchronous).fit(data())
    assert saved_steps(tmp_path) == [4, 8]
    assert [files.find_corruption(path) for path in files.list_checkpoints(tmp_path)] == [None, None]


def test_checkpoint_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    reported: list[int] = []
    writer = CheckpointWriter(
        tmp_path, LOCAL, Retention(None), asynchronous=False, on_written=lambda step, *_: reported.append(step)
    )
    path, model = files.checkpoint_path(tmp_path, 1), nn.Linear(2, 2)
    for results in ({}, {"val_loss": 0.5}):
        with torch.no_grad():
            model.weight += 1
        writer.save(1, model, {}, {"step": 1, "epoch": 1, "sample": 2, "results": results})
        assert files.read_manifest(path)["results"] == results
        assert files.read_tensors(path / files.MODEL)["weight"].equal(model.weight)
        assert files.find_corruption(path) is None
    assert reported == [1, 1]


@pytest.mark.parametrize("checkpoint_format", ["full", "sharded"])
def test_fit_after_an_exception_waits_for_the_checkpoint_that_is_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpoint_format: str
) -> None:
    fsync, delays, identify_checkpoints = os.fsync, iter([1.0]), files.identify_checkpoints

    # If `fit` did not wait, it would remove the folder of the checkpoint that is being written.
    def slow_fsync(file: int) -> None:
        if threading.current_thread() is not threading.main_thread():  # the main thread writes the lock file
            time.sleep(next(delays, 0.0))
        fsync(file)

    def identify_slowly(folder: Path) -> dict[Path, tuple[int, int]]:
        if threading.current_thread() is not threading.main_thread():  # the writer thread
            time.sleep(1.0)
        return identify_checkpoints(folder)

    class FailsOnce(Callback):
        failed = False

        def on_step_end(self, trainer: Trainer) -> None:
            if trainer.progress.step == 5 and not self.failed:
                self.failed = True
                raise ValueError("stopped by the test")

    monkeypatch.setattr(os, "fsync", slow_fsync)
    monkeypatch.setattr(files, "identify_checkpoints", identify_slowly)
    trainer = make_trainer(LOCAL, tmp_path, max_epochs=2, callbacks=[FailsOnce()], checkpoint_format=checkpoint_format)
    with pytest.raises(CallbackError, match="stopped by the test"):
        trainer.fit(data())
    trainer.fit(data())
    assert saved_steps(tmp_path) == [4, 8]
    assert [files.find_corruption(path) for path in files.list_checkpoints(tmp_path)] == [None, None]


def test_checkpoints_within_an_epoch_resume_bit_for_bit(tmp_path: Path) -> None:
    uninterrupted = make_trainer(LOCAL, None, max_epochs=2)
    uninterrupted.fit(data())
    first = make_trainer(LOCAL, tmp_path, max_steps=7, checkpoint_every_steps=3)
    first.fit(data())
    assert saved_steps(tmp_path) == [3, 4, 6, 7]
    for step in (7, 4):  # simulates a kill before these checkpoints were written
        files.checkpoint_path(tmp_path, step).rename(tmp_path / f"gone-{step}")
    resumed = make_trainer(LOCAL, tmp_path, max_epochs=2, resume="auto")
    assert resumed.progress.step == 6
    resumed.fit(data())
    assert torch.equal(parameters(resumed), parameters(uninterrupted))


def test_checkpoint_at_the_end_of_an_epoch_has_its_results(tmp_path: Path) -> None:
    make_trainer(LOCAL, tmp_path, max_epochs=1, checkpoint_every_steps=2).fit(data(), data())
    manifest = files.read_manifest(files.checkpoint_path(tmp_path, 4))
    assert set(manifest["results"]) == {"train_loss", "val_loss"}
    assert (manifest["epoch"], manifest["step"], manifest["sample"]) == (1, 4, 0)
    assert manifest["config"]["output_dir"] == str(tmp_path)
    assert manifest["torch"] == torch.__version__
    assert files.read_manifest(files.checkpoint_path(tmp_path, 2))["sample"] == 24


def metric_with_values(values: list[float]) -> dict[str, Any]:
    left = iter(values)
    return {"score": lambda output, target: next(left)}


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({}, [4, 8, 12, 16, 20, 24]),
        ({"keep_last": 1}, [24]),
        ({"keep_last": 2}, [20, 24]),
        ({"keep_last": 1, "keep_every_epochs": 2}, [8, 16, 24]),
        ({"keep_last": 1, "keep_best": "val_score"}, [12, 24]),
        ({"keep_last": 1, "keep_best": "val_score", "keep_best_mode": "max"}, [16, 24]),
        ({"keep_last": 2, "keep_every_epochs": 4, "keep_best": "val_score"}, [12, 16, 20, 24]),
    ],
)
def test_retention_keeps_last_periodic_and_best_checkpoints(
    tmp_path: Path, settings: dict[str, Any], kept: list[int]
) -> None:
    metrics = metric_with_values([3.0, 2.0, 1.0, 5.0, math.nan, 4.0])
    make_trainer(LOCAL, tmp_path, max_epochs=6, metrics=metrics, eval_batch_size=48, **settings).fit(data(), data())
    assert saved_steps(tmp_path) == kept
    assert not list(tmp_path.glob(".*"))


def test_damaged_checkpoint_does_not_replace_a_valid_one(tmp_path: Path) -> None:
    make_trainer(LOCAL, tmp_path, max_epochs=2).fit(data())
    (files.checkpoint_path(tmp_path, 8) / files.MANIFEST).unlink()
    assert Retention(1).obsolete_checkpoints(files.checkpoint_path(tmp_path, 8)) == []


def test_damaged_later_checkpoints_do_not_replace_new_ones(tmp_path: Path) -> None:
    make_trainer(LOCAL, tmp_path, max_epochs=3).fit(data())
    for step in (8, 12):
        (files.checkpoint_path(tmp_path, step) / files.TRAINING).write_bytes(b"")
    resumed = make_trainer(LOCAL, tmp_path, max_steps=6, checkpoint_every_steps=1, keep_last=1, resume="auto")
    assert resumed.progress.step == 4
    resumed.fit(data())
    assert make_trainer(LOCAL, tmp_path, max_epochs=3, resume="auto").progress.step == 6


def test_invalid_retention_settings_are_rejected() -> None:
    with pytest.raises(ConfigError, match=r"keep_best='val_loss' keeps .* keep_last=None all are kept\. Use .*=3"):
        TrainConfig(max_epochs=1, output_dir="runs/first", keep_last=None, keep_best="val_loss")
    with pytest.raises(ConfigError, match=r"TrainConfig\.keep_last must be at least 1, got 0"):
        TrainConfig(max_epochs=1, keep_last=0)


def write_slowly_then_fail(backend: Backend, folder: str) -> dict[str, Any]:
    """Write a checkpoint, which takes longer than the collective timeout. Then fail to write, both during a run and at
    its end. Return the errors."""
    found: dict[str, Any] = {}
    write = files.write

    def write_slowly(*arguments: Any) -> None:
        time.sleep(8)
        write(*arguments)

    def fail(*arguments: Any) -> None:
        raise OSError("no room")

    files.write = write_slowly
    make_trainer(backend, Path(folder, "slow"), max_epochs=1).fit(data())
    files.write = fail
    for name, epochs in (("in the run", 3), ("at its end", 1)):
        try:
            make_trainer(backend, Path(folder, name), max_epochs=epochs).fit(data())
        except CheckpointError as error:
            found[name] = str(error)
    files.write = write
    return found


@pytest.mark.parametrize("backend", ["ddp", "horovod"])
def test_ranks_wait_for_a_slow_disk_and_report_a_full_disk(tmp_path: Path, backend: str) -> None:
    with RankGroup(backend, 2, backend_timeout_seconds=6) as group:
        ranks = group.run(write_slowly_then_fail, str(tmp_path), timeout_seconds=100)
    assert saved_steps(tmp_path / "slow") == [4]
    for found in ranks:
        for name in ("in the run", "at its end"):
            target = tmp_path / name / "step-000000004"
            assert found[name].startswith(f"Cannot write checkpoint '{target}': no room. Check that the folder")
    assert json.loads((tmp_path / "slow" / "step-000000004" / "manifest.json").read_text())["step"] == 4


@pytest.mark.parametrize(
    "damaged", ['{"results": null, "epoch": null}', '{"results": {"val_loss": "x"}}', "[" * 100_000]
)
def test_a_damaged_manifest_of_an_older_checkpoint_does_not_affect_a_newer_checkpoint(
    damaged: str, tmp_path: Path
) -> None:
    older, newer = (files.checkpoint_path(tmp_path, step) for step in (2, 4))
    retention = Retention(1, keep_every_epochs=2, keep_best="val_loss")
    for path in (older, newer):
        path.mkdir()
    (older / files.MANIFEST).write_text(damaged)
    (newer / files.MANIFEST).write_text(json.dumps({"epoch": 2, "results": {"val_loss": 0.5}}))
    assert newer not in retention.obsolete_checkpoints(newer)
    assert files.find_corruption(older) is not None
