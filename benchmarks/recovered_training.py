"""Training script of `recovery.py` and `goodput.py`.

    python recovered_training.py FOLDER STEPS_PER_CHECKPOINT STEPS_IN_MEMORY [WAITING_MILLISECONDS]

Each rank appends a line to FOLDER/steps-RANK.txt after each step, see `StepFile`. The run saves the state of every
STEPS_IN_MEMORY-th step in memory, or of no step if STEPS_IN_MEMORY is 0. If STEPS_PER_CHECKPOINT is 0, checkpoints are
written only after epochs. In each forward pass, the rank waits for WAITING_MILLISECONDS without using the CPU, which
simulates an accelerator.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import unitrain

WIDTH, BATCH, SAMPLES = 512, 32, 100_000


def build() -> tuple[nn.Module, torch.optim.Optimizer, TensorDataset]:
    """Return the model, the optimizer and the data."""
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
    return model, optimizer, TensorDataset(torch.randn(SAMPLES, WIDTH), torch.randn(SAMPLES, 1))


class StepFile:
    """The file of a rank in one attempt. Each line contains a completed step, the host, the process ID, the number of
    the attempt in this process, the monotonic time, and the number of ranks."""

    def __init__(self, folder: Path, rank: int, size: int, attempt: int = 0) -> None:
        self._file = (folder / f"steps-{rank}.txt").open("a", buffering=1)
        self._process, self._size = f"{socket.gethostname()} {os.getpid()} {attempt}", size

    def add(self, step: int) -> None:
        self._file.write(f"{step} {self._process} {time.monotonic()} {self._size}\n")


class StepLog(unitrain.Callback):
    """Writes a line after each step."""

    def __init__(self, file: StepFile) -> None:
        self._file = file

    def on_step_end(self, trainer: unitrain.Trainer) -> None:
        self._file.add(trainer.progress.step)


class Wait(nn.Module):
    """Module that returns its input after `milliseconds`."""

    def __init__(self, milliseconds: float) -> None:
        super().__init__()
        self._milliseconds = milliseconds

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self._milliseconds / 1000)
        return x


def main(folder: Path, steps_per_checkpoint: int, steps_in_memory: int, waiting_ms: float = 0) -> None:
    """Train until the process is killed."""
    with unitrain.init(device="cpu") as backend:
        model, optimizer, data = build()
        model = nn.Sequential(model, Wait(waiting_ms))
        config = unitrain.TrainConfig(
            max_epochs=1000,
            batch_size=BATCH,
            output_dir=folder / "run",
            resume=True,
            checkpoint_every_steps=steps_per_checkpoint or None,
            memory_checkpoint_every_steps=steps_in_memory or None,
            progress="off",
        )
        callbacks = [StepLog(StepFile(folder, backend.rank, backend.size))]
        trainer = unitrain.Trainer(
            model, optimizer, nn.functional.mse_loss, backend=backend, config=config, callbacks=callbacks
        )
        trainer.fit(data)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), *map(float, sys.argv[4:]))
