"""Resuming a run with a different optimizer, scheduler or learning rate."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, OneCycleLR, ReduceLROnPlateau, StepLR
from torch.utils.data import TensorDataset

from unitrain import TrainConfig, Trainer, init
from unitrain.backends.base import Backend
from unitrain.checkpoint import files, loading
from unitrain.errors import CheckpointError
from unitrain.testing import RankGroup

SGD, ADAM, ADAMW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW


def train(
    backend: Backend,
    folder: str,
    epochs: int,
    optimizer_class: Any = SGD,
    scheduler: Any = None,
    options: dict[str, Any] | None = None,
    **settings: Any,
) -> list[float]:
    """Train until `epochs` epochs are complete, and return the final learning rate and weight decay."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = optimizer_class(model.parameters(), **{"lr": 0.1, **(options or {})})
    config = TrainConfig(max_epochs=epochs, batch_size=2, output_dir=folder, resume=True, progress="off", **settings)
    scheduled = None if scheduler is None else scheduler(optimizer)
    trainer = Trainer(model, optimizer, nn.functional.mse_loss, backend=backend, config=config, scheduler=scheduled)
    trainer.fit(TensorDataset(torch.ones(4, 3), torch.ones(4, 1)))
    return [optimizer.param_groups[0]["lr"], optimizer.param_groups[0].get("weight_decay", 0.0)]


def step_lr(optimizer: Any) -> Any:
    return StepLR(optimizer, 2)


def exponential(optimizer: Any) -> Any:
    return ExponentialLR(optimizer, 0.9)


def plateau(optimizer: Any) -> Any:
    return ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=1e9)


def error_of_resume(backend: Backend, folder: str, first: tuple[Any, Any], second: tuple[Any, Any]) -> str:
    train(backend, folder, 1, *first)
    try:
        train(backend, folder, 2, *second)
    except CheckpointError as error:
        return str(error)
    return "accepted"


@pytest.fixture(
    scope="module", params=[("local", 1), ("ddp", 2), ("horovod", 2)], ids=["local-1", "ddp-2", "horovod-2"]
)
def group(request: pytest.FixtureRequest) -> Any:
    with RankGroup(*request.param) as ranks:
        yield ranks


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ((SGD, None), (ADAM, None), "has the state of SGD, but the optimizer of this run is Adam"),
        ((ADAM, None), (ADAMW, None), "has the state of Adam, but the optimizer of this run is AdamW"),
        (
            (SGD, step_lr),
            (SGD, exponential),
            "has the state of StepLR, but the scheduler of this run is Exponential",
        ),
        ((SGD, None), (SGD, step_lr), "has no scheduler and this run has one."),
    ],
    ids=["sgd-adam", "adam-adamw", "other scheduler", "a scheduler now"],
)
def test_another_optimizer_or_scheduler_class_raises_on_every_rank(
    group: RankGroup, first: tuple[Any, Any], second: tuple[Any, Any], message: str, tmp_path: Path
) -> None:
    texts = group.run(error_of_resume, str(tmp_path), first, second)
    assert len(set(texts)) == 1
    assert texts[0].startswith(f"Checkpoint '{tmp_path / 'step-00000000'}"), texts[0]
    assert message in texts[0], texts[0]


def test_another_optimizer_is_detected_in_checkpoints_without_class_names(tmp_path: Path) -> None:
    """Checkpoints of earlier versions and converted checkpoints do not contain class names."""
    model = nn.Linear(3, 1)
    kept = SGD(model.parameters(), lr=0.1).state_dict()
    path = files.checkpoint_path(tmp_path, 3)
    files.write(path, model.state_dict(), {"optimizer": kept, "progress": {}}, {})
    with pytest.raises(CheckpointError, match=r"has no betas, eps, amsgrad.* of Adam: another optimizer wrote it\."):
        loading.load(path, model, ADAM(model.parameters(), lr=0.1), None)
    loading.load(path, model, SGD(model.parameters(), lr=0.1), None)


def test_changed_settings_of_the_optimizer_are_named_and_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with init("local") as backend:
        train(backend, str(tmp_path), 1, options={"weight_decay": 0.5})
        assert caplog.text == ""
        ended = train(backend, str(tmp_path), 2, options={"lr": 0.05, "weight_decay": 0.25})
    assert ended == [0.1, 0.5]
    assert "has lr=0.1 in parameter group 0, and the optimizer of this run was built with lr=0.05." in caplog.text
    fix = "To change it, set it after the Trainer is built: optimizer.param_groups[0]['lr'] = 0.05"
    assert f"The run continues with 0.1. {fix}" in caplog.text
    assert "has weight_decay=0.5 in parameter group 0" in caplog.text
    assert caplog.text.count("WARNING") == 2


@pytest.mark.parametrize("scheduler", [step_lr, exponential, plateau])
def test_learning_rate_changed_by_a_scheduler_does_not_cause_a_warning(
    scheduler: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with init("local") as backend:
        every = {"scheduler_interval": "epoch"}
        first = train(backend, str(tmp_path), 3, scheduler=scheduler, **every)
        assert first[0] < 0.1
        train(backend, str(tmp_path), 4, scheduler=scheduler, **every)
        assert caplog.text == ""
        if scheduler is not plateau:
            train(backend, str(tmp_path), 5, scheduler=scheduler, options={"lr": 0.2}, **every)
            assert (
                "has lr=0.1 in parameter group 0, and the optimizer of this run was built with lr=0.2." in caplog.text
            )


@pytest.mark.parametrize("checkpoint_format", ["full", "sharded"])
def test_learning_rates_that_a_scheduler_function_explains_do_not_cause_a_warning(
    checkpoint_format: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def one_cycle(max_lr: float) -> Any:
        return lambda _: lambda optimizer, total_steps: OneCycleLR(optimizer, max_lr, total_steps, div_factor=5)

    def decay(_: Any) -> Any:
        return lambda optimizer, total_steps: LambdaLR(optimizer, lambda step: 1 - step / total_steps)

    cycle, decayed, settings = (
        str(tmp_path / "cycle"),
        str(tmp_path / "decay"),
        {"checkpoint_format": checkpoint_format},
    )
    with init("local") as backend:
        for _ in range(2):
            train(backend, cycle, 2, scheduler=one_cycle(0.25), **settings)
            train(backend, decayed, 2, scheduler=decay, **settings)
        # The scheduler replaces the learning rate in `options`.
        train(backend, cycle, 2, scheduler=one_cycle(0.25), options={"lr": 0.3}, **settings)
        assert caplog.text == ""
        train(backend, cycle, 2, scheduler=one_cycle(0.5), **settings)
        train(backend, decayed, 2, scheduler=decay, options={"lr": 0.2}, **settings)
    assert "has lr=0.05 in parameter group 0, and the optimizer of this run was built with lr=0.1." in caplog.text
    assert "has lr=0.1 in parameter group 0, and the optimizer of this run was built with lr=0.2." in caplog.text
    assert caplog.text.count("WARNING") == 2


@pytest.mark.parametrize("checkpoint_format", ["full", "sharded"])
def test_a_checkpoint_of_another_run_causes_one_warning(
    checkpoint_format: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own, other, renamed, fork = (str(tmp_path / name) for name in ("own", "other", "renamed", "fork"))
    settings: dict[str, Any] = {"checkpoint_format": checkpoint_format}

    def warnings() -> list[str]:
        texts = [record.getMessage() for record in caplog.records if "another run" in record.getMessage()]
        caplog.clear()
        return texts

    with init(backend="local", device="cpu") as backend:
        train(backend, own, 1, **settings)
        train(backend, own, 2, **settings)
        train(backend, other, 3, **settings)
        shutil.copytree(own, renamed)
        train(backend, renamed, 3, **settings)
        newest = files.list_checkpoints(Path(other))[0]
        shutil.copytree(newest, Path(fork) / newest.name)
        train(backend, fork, 4, **settings)
        assert warnings() == []
        ids = [files.read_manifest(files.list_checkpoints(Path(folder))[0])["run_id"] for folder in (own, other)]
        shutil.copytree(newest, Path(own) / newest.name)
        train(backend, own, 4, **settings)
        (text,) = warnings()
        train(backend, own, 5, **settings)
        assert warnings() == []
    assert f"'{Path(own) / newest.name}' was written by another run (ID {ids[1]}, output_dir='{other}')" in text
    assert f"(ID {ids[0]}, output_dir='{own}')" in text
    assert f"rm -r '{Path(own) / newest.name}'" in text
