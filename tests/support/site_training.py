"""Training script for low-communication training between hosts. It records the weights of each attempt.

python site_training.py FOLDER STEPS [TIMEOUT]: writes to FOLDER: the run, the file `at-RANK` with the step and the
number of ranks, and the file `weights-SIZE-STEP-RANK.json` with the weights of a rank at the start of an attempt. While
FOLDER/pause-SIZE-STEP exists, all ranks of a job with SIZE ranks wait after STEP. While FOLDER/slow-SIZE exists, they
sleep for a second after each step. The final weights and the validation loss of a rank are in `final-RANK.json`.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import unitrain

SETTINGS = unitrain.LocalSGDConfig(
    steps=4,
    outer_lr=0.7,
    outer_momentum=0.9,
    compression="int8",
    fragments=2,
    overlap_steps=1,
    synchronous_ranks="host",
)
CHECKPOINT_EVERY_STEPS = 3


def weights(model: nn.Module) -> list[float]:
    """Return the weights of `model`."""
    return [value for parameter in model.parameters() for value in parameter.flatten().tolist()]


class Recorder(unitrain.Callback):
    """Records the progress of this rank, and its weights at the start of training."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def on_fit_start(self, trainer: unitrain.Trainer) -> None:
        backend, step = trainer.backend, trainer.progress.step
        with (self._folder / f"weights-{backend.size}-{step}-{backend.rank}.json").open("w") as file:
            json.dump(weights(trainer.model), file)

    def on_step_end(self, trainer: unitrain.Trainer) -> None:
        backend, step = trainer.backend, trainer.progress.step
        (self._folder / f"at-{backend.rank}").write_text(f"{step} {backend.size}")
        while (self._folder / f"pause-{backend.size}-{step}").exists():
            time.sleep(0.05)
        if (self._folder / f"slow-{backend.size}").exists():
            time.sleep(1)


def main() -> None:
    """Train, with different initial weights on each rank and in each attempt."""
    folder, steps, timeout = Path(sys.argv[1]), int(sys.argv[2]), float([*sys.argv[3:], "60"][0])
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(400, 8, generator=generator, dtype=torch.float64)
    data = TensorDataset(inputs, inputs[:, :2].sin())
    with unitrain.init(device="cpu", timeout_seconds=timeout) as backend:
        torch.seed()
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2)).double()
        config = unitrain.TrainConfig(
            max_steps=steps,
            batch_size=4,
            local_sgd=SETTINGS,
            output_dir=folder / "run",
            checkpoint_every_steps=CHECKPOINT_EVERY_STEPS,
            keep_last=100,
            log_every_n_steps=1,
            progress="off",
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        trainer = unitrain.Trainer(
            model, optimizer, nn.functional.mse_loss, backend=backend, config=config, callbacks=[Recorder(folder)]
        )
        results = trainer.fit(data, data)
        (folder / f"final-{backend.rank}.json").write_text(json.dumps([weights(model), results["val_loss"]]))


if __name__ == "__main__":
    main()
