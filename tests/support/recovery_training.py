"""Training script for tests that kill ranks: `python recovery_training.py FOLDER [GATE...]`.

FOLDER/pid-N contains the process ID of rank N, FOLDER/steps-N.txt one line per completed step of rank N, and
FOLDER/result.json the final parameters. A gate is a step before which ranks wait until FOLDER/pass-GATE exists. The
default gates are 20 and 40. If FOLDER/memory exists, the run saves the state of every step in memory. If FOLDER/logical
exists, it uses four logical ranks.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import unitrain

GATES, STEPS, EPOCHS, CHECKPOINT_EVERY = (20, 40), 60, 4, 7
_GATE_SECONDS = 90.0


class GateCallback(unitrain.Callback):
    """Records completed steps, and waits before the optimizer update of each gate step."""

    def __init__(self, folder: Path, gates: Sequence[int]) -> None:
        self._folder, self._gates = folder, gates

    def on_step_end(self, trainer: unitrain.Trainer) -> None:
        with (self._folder / f"steps-{trainer.backend.rank}.txt").open("a") as file:
            file.write(f"{trainer.progress.step} {os.getpid()}\n")

    def on_before_optimizer_step(self, trainer: unitrain.Trainer) -> None:
        step = trainer.progress.step + 1
        deadline = time.monotonic() + _GATE_SECONDS
        while step in self._gates and not (self._folder / f"pass-{step}").exists() and time.monotonic() < deadline:
            time.sleep(0.01)


def main(folder: Path, gates: Sequence[int]) -> None:
    """Train, and write the exact parameters as text."""
    with unitrain.init(device="cpu", timeout_seconds=60) as backend:
        (folder / f"pid-{backend.rank}").write_text(str(os.getpid()))
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 1))
        samples = STEPS // EPOCHS * 4 * 2
        data = TensorDataset(torch.randn(samples, 8), torch.randn(samples, 1))
        config = unitrain.TrainConfig(
            max_epochs=EPOCHS,
            global_batch_size=8,
            output_dir=folder / "run",
            checkpoint_every_steps=CHECKPOINT_EVERY,
            memory_checkpoint_every_steps=1 if (folder / "memory").exists() else None,
            logical_ranks=4 if (folder / "logical").exists() else None,
            progress="off",
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        callbacks = [GateCallback(folder, gates)]
        trainer = unitrain.Trainer(
            model, optimizer, nn.functional.mse_loss, backend=backend, config=config, callbacks=callbacks
        )
        trainer.fit(data)
        if backend.rank == 0:
            parameters = [value.hex() for tensor in model.parameters() for value in tensor.flatten().tolist()]
            (folder / "result.json").write_text(json.dumps(parameters))


if __name__ == "__main__":
    main(Path(sys.argv[1]), [int(gate) for gate in sys.argv[2:]] or GATES)
