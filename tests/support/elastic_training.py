"""Training script that records the samples of each step. On request, it changes the slots of the job or kills ranks.

python elastic_training.py FOLDER [SECONDS [TIMEOUT]]: writes the run and one line per rank and step to FOLDER.
FOLDER/plan.json contains the events. For example, {"2": {"7": "slots 3"}, "3": {"30": "kill 1"}} offers three slots
after step 7 of a job with two ranks, and kills rank 1 after step 30 of a job with three ranks. Each event occurs once.
After a change of the slots, each step sleeps for SECONDS until the job continues on another number of ranks. After the
event "slow NAME", each step sleeps for SECONDS until the file FOLDER/NAME exists.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import unitrain

SAMPLES, GLOBAL_BATCH, EPOCHS = 120, 8, 3


class NumberedDataset(Dataset[tuple[Tensor, Tensor, int]]):
    """Dataset whose samples contain their index."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(SAMPLES, 3, generator=generator, dtype=torch.float64)
        self.targets = torch.randn(SAMPLES, 1, generator=generator, dtype=torch.float64)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        return self.inputs[index], self.targets[index], index


class EventCallback(unitrain.Callback):
    """Records the samples of each step, and triggers the events planned after the step."""

    def __init__(self, folder: Path, seconds: float) -> None:
        self._folder, self._seconds, self._taken = folder, seconds, list[int]()
        plan = folder / "plan.json"
        self._plan: dict[str, dict[str, str]] = json.loads(plan.read_text()) if plan.exists() else {}

    def on_micro_batch_end(self, trainer: unitrain.Trainer, batch: Any, micro_batch: Any, loss: Any) -> None:
        if micro_batch.samples:
            self._taken += batch[2].tolist()

    def on_step_end(self, trainer: unitrain.Trainer) -> None:
        rank, size, step = trainer.backend.rank, trainer.backend.size, trainer.progress.step
        with (self._folder / f"taken-{rank}.txt").open("a") as file:
            file.write(json.dumps([step, size, self._taken]) + "\n")
        self._taken = []
        (self._folder / f"at-{rank}").write_text(f"{step} {size}")
        planned = self._plan.get(str(size), {})
        for planned_step, event in planned.items():
            mark = self._folder / f"done-{size}-{planned_step}"
            if step >= int(planned_step) and not mark.exists():
                self._trigger(*event.split(), rank=rank, mark=mark)
            action, value = event.split()
            if mark.exists() and (action == "slots" or (action == "slow" and not (self._folder / value).exists())):
                time.sleep(self._seconds)

    def _trigger(self, action: str, value: str, *, rank: int, mark: Path) -> None:
        if action == "slots" and rank == 0:
            (self._folder / "slots").write_text(value)
            mark.touch()
        elif action == "slow":
            mark.touch()
        elif action == "kill" and rank == int(value):
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def forward(model: nn.Module, batch: Any) -> tuple[Any, Tensor]:
    return model(batch[0]), batch[1]


def train(backend: unitrain.Backend, folder: Path, seconds: float = 0.0) -> list[float]:
    """Train, and return the parameters."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    config = unitrain.TrainConfig(
        max_epochs=EPOCHS,
        batch_size=GLOBAL_BATCH // backend.size if backend.size == 1 else 4,
        output_dir=folder / "run",
        checkpoint_every_steps=5,
        log_every_n_steps=1,
        progress="off",
    )
    trainer = unitrain.Trainer(
        model,
        optimizer,
        nn.functional.mse_loss,
        backend=backend,
        config=config,
        forward=forward,
        callbacks=[EventCallback(folder, seconds)],
    )
    trainer.fit(NumberedDataset())
    return [*model.weight.flatten().tolist(), *model.bias.tolist()]


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    seconds, timeout = [*map(float, sys.argv[2:]), *(0.0, 100.0)[len(sys.argv) - 2 :]]
    with unitrain.init(device="cpu", timeout_seconds=timeout) as backend:
        parameters = train(backend, folder, seconds)
        if backend.rank == 0:
            (folder / "parameters.json").write_text(json.dumps([backend.size, parameters]))
