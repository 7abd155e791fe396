"""The parts of the structure that only a running program shows, compared with `LIMITS`."""

from __future__ import annotations

import re
import subprocess
import sys
from types import FrameType

import pytest
import structure
import torch
from torch import nn
from torch.utils.data import TensorDataset

from unitrain import Callback, TrainConfig, Trainer
from unitrain.backends.base import Backend
from unitrain.testing import RankGroup


@pytest.mark.parametrize("name", ["ddp", "horovod"])
def test_a_step_enters_a_limited_number_of_files(name: str) -> None:
    with RankGroup(name, 2) as ranks:
        numbers = ranks.run(count_step_files)
    assert structure.compare({f"step_files_{name}": max(numbers)}) == []


def count_step_files(backend: Backend) -> int:
    """Return the number of files of unitrain that the third step of a training run enters on this rank."""
    files: set[str] = set()

    def record(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            files.add(frame.f_code.co_filename)

    class RecordStep(Callback):
        def on_step_end(self, trainer: Trainer) -> None:
            sys.setprofile(record if trainer.progress.step == 2 else None)

    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 1))
    Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.01),
        nn.functional.mse_loss,
        backend=backend,
        config=TrainConfig(max_steps=4, batch_size=4, progress="off"),
        callbacks=[RecordStep()],
    ).fit(TensorDataset(torch.randn(64, 4), torch.randn(64, 1)))
    return sum(file.startswith(f"{structure.ROOT}/unitrain/") for file in files)


def test_importing_the_trainer_loads_a_limited_number_of_modules() -> None:
    number = len(loaded_modules("-c", "import unitrain.trainer"))
    assert structure.compare({"trainer_imports": number}) == []


def test_launch_loads_a_limited_number_of_modules_before_the_launcher_starts() -> None:
    number = len(loaded_modules("-m", "unitrain", "launch", "-np", "2", "--dry-run", "examples/digits.py"))
    assert structure.compare({"launch_imports": number}) == []


def loaded_modules(*arguments: str) -> set[str]:
    """Run Python and return the modules of unitrain that it loads. Programs that it executes are not included."""
    command = [sys.executable, "-X", "importtime", *arguments]
    stderr = subprocess.run(command, cwd=structure.ROOT, check=True, stderr=subprocess.PIPE, text=True).stderr
    return set(re.findall(r"^import time: .*\| +(unitrain(?:\.\S+)?)$", stderr, re.MULTILINE))
