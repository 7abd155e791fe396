"""Weights that are not finite never replace finite checkpoints, and a run resumes from finite weights."""

from __future__ import annotations

import contextlib
import math
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
from unitrain.checkpoint import files, sharded_files
from unitrain.checkpoint.memory import MemoryCheckpoints
from unitrain.checkpoint.writer import CheckpointWriter, Retention
from unitrain.errors import NonFiniteLossError
from unitrain.testing import RankGroup

LOCAL = LocalBackend(torch.device("cpu"))
BROKEN_STEP = 11


class Break(Callback):
    """Sets a weight to `value` after step 11."""

    def __init__(self, value: float) -> None:
        self.value = value

    def on_step_end(self, trainer: Trainer) -> None:
        if trainer.progress.step == BROKEN_STEP:
            with torch.no_grad():
                next(trainer.model.parameters())[0, 0] = self.value


def train(backend: Backend, folder: str, value: float, **settings: Any) -> int:
    """Train until the loss is not finite, or to the end, and return the step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)).double()
    model.register_buffer("mask", torch.full((3,), -math.inf))  # buffers may be infinite
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(60, 4, generator=generator, dtype=torch.float64)

    def error(output: Tensor, target: Tensor) -> Tensor:
        # A metric that hides NaN would select the broken weights as the best ones.
        return torch.nan_to_num((output - target).abs().mean(1))

    config = TrainConfig(
        **{"max_epochs": 9, "keep_last": 1, **settings}, batch_size=12 // backend.size, output_dir=folder,
        progress="off", check_weights=False,
    )  # fmt: skip
    trainer = Trainer(
        model, torch.optim.SGD(model.parameters(), 0.01), nn.MSELoss(), backend=backend, config=config,
        metrics={"error": error}, callbacks=[Break(value)],
    )  # fmt: skip
    data = TensorDataset(inputs, inputs[:, :2])
    with contextlib.suppress(NonFiniteLossError):
        trainer.fit(data, data if "keep_best" in settings else None)
    with contextlib.suppress(NonFiniteLossError):
        trainer.checkpointer.wait()
    backend.barrier()
    return trainer.progress.step


def finite_steps(folder: Path) -> dict[int, bool]:
    """Return whether the weights of each checkpoint are finite."""
    return {
        files.step_of(path): files.are_finite(
            sharded_files.open_model(path).read_tensor(name) for name in ("0.weight", "2.weight")
        )
        for path in files.list_checkpoints(folder)
    }


@pytest.fixture(scope="module", params=GROUPS, ids=lambda group: f"{group[0]}-{group[1]}")
def ranks(request: pytest.FixtureRequest) -> Iterator[RankGroup]:
    with RankGroup(*request.param) as group:
        yield group


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"checkpoint_every_steps": 1}, {11: False, 10: True}),
        (
            {"checkpoint_every_steps": 1, "keep_last": 3, "async_checkpoints": False},
            {11: False, 10: True, 9: True, 8: True},
        ),
        ({"checkpoint_every_steps": 2, "checkpoint_format": "sharded"}, {10: True}),
        ({"checkpoint_every_epochs": 3, "checkpoint_every_steps": 11, "checkpoint_format": "sharded"}, {11: False}),
        ({"max_epochs": None, "max_steps": 11, "checkpoint_every_steps": 5}, {11: False, 10: True}),
        ({"max_epochs": None, "max_steps": 11, "keep_best": "val_error"}, {11: False, 10: True, 5: True}),
    ],
)  # fmt: skip
def test_broken_weights_replace_no_finite_checkpoint(
    ranks: RankGroup, tmp_path: Path, settings: dict[str, Any], kept: dict[int, bool]
) -> None:
    steps = ranks.run(train_named, str(tmp_path), math.nan, settings)
    assert set(steps) <= {11, 12, 15}
    found = finite_steps(tmp_path)
    if "keep_best" in settings:  # the best finite checkpoint is also kept
        assert found.items() >= {11: False, 10: True}.items()
        assert all(finite for step, finite in found.items() if step < BROKEN_STEP)
    else:
        assert found == kept


def train_named(backend: Backend, folder: str, value: float, settings: dict[str, Any]) -> int:
    return train(backend, folder, value, **settings)


def test_run_resumes_from_finite_weights(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = {"checkpoint_every_steps": 1, "keep_best": "val_error", "max_epochs": 4}
    train(LOCAL, str(tmp_path), math.inf, **settings)
    assert finite_steps(tmp_path)[11] is False
    assert files.find_newest_valid(tmp_path, required=True) == files.checkpoint_path(tmp_path, 10)
    assert "step-000000011' is skipped: its weights are not finite" in caplog.text
    assert train(LOCAL, str(tmp_path), 0.5, **settings, resume=True) == 20
    assert all(finite_steps(tmp_path).values())


def test_weights_that_are_infinite_from_the_start_are_saved(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight[0] = -math.inf
    writer = CheckpointWriter(tmp_path, LOCAL, Retention(2), asynchronous=False)
    for step in range(1, 5):
        writer.save(step, model, {}, {"step": step, "results": {}})
    assert [files.step_of(path) for path in files.list_checkpoints(tmp_path)] == [4, 3]
    assert files.find_newest_valid(tmp_path, required=True) == files.checkpoint_path(tmp_path, 4)


@pytest.mark.parametrize(
    ("in_memory", "on_disk", "selected"),
    [
        ({5: True, 6: False}, {4: True}, 5),
        ({6: False}, {4: True}, None),
        ({6: False}, {4: False}, 6),
        ({5: True}, {4: True, 6: False}, 5),
        ({5: True}, {6: True}, None),
    ],
)
def test_checkpoints_in_memory_with_broken_weights_are_not_preferred(
    tmp_path: Path, in_memory: dict[int, bool], on_disk: dict[int, bool], selected: int | None
) -> None:
    for folder, steps in (("memory", in_memory), ("disk", on_disk)):
        (tmp_path / folder).mkdir()
        writer = CheckpointWriter(tmp_path / folder, LOCAL, Retention(1), asynchronous=False)
        for step, is_finite in sorted(steps.items()):
            model = nn.Linear(2, 2)
            if not is_finite:
                nn.init.constant_(model.bias, math.nan)
            writer.save(step, model, {}, {"step": step})
        assert {files.step_of(path) for path in files.list_checkpoints(tmp_path / folder)} == set(steps)
    memory = MemoryCheckpoints(tmp_path / "memory", LOCAL, asynchronous=False)
    found = memory.prepare_and_find_newer(tmp_path / "disk", continues=True)
    assert found == (None if selected is None else files.checkpoint_path(tmp_path / "memory", selected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2, torch.complex64, torch.int64])
def test_are_finite_checks_floating_point_and_complex_tensors(dtype: torch.dtype) -> None:
    tensor = torch.ones(4, 3).to(dtype)
    assert files.are_finite([tensor, tensor.t(), torch.empty(0), torch.tensor(True)])
    if dtype.is_floating_point or dtype.is_complex:
        for value in (math.nan, math.inf, -math.inf):
            broken = torch.ones(4, 3)
            broken[2, 1] = value
            assert not files.are_finite([tensor, broken.to(dtype)])
