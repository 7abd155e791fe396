"""Training runs whose checkpoints, written by earlier versions of unitrain, are stored in the folder `stored_runs`.

To add the checkpoints of a version, run `python tests/support/stored_training.py VERSION` with that version installed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset, TensorDataset

from unitrain import Callback, LocalSGDConfig, PowerSGD, TrainConfig, Trainer
from unitrain.backends.base import Backend
from unitrain.testing import RankGroup

FOLDER = Path(__file__).parent / "stored_runs"
STEPS_PER_EPOCH, STEPS = 4, 10
# Number of ranks of ddp (local with one rank), last step of the stored checkpoint, and settings.
RUNS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "within_epoch": (1, 6, {"ema_decay": 0.9, "tokens": True, "scheduler": "cosine"}),
    "epoch_end": (1, 8, {"scheduler": "plateau", "scheduler_interval": "epoch"}),
    "planned": (2, 6, {"scheduler": "planned"}),
    "stream": (1, 6, {"stateful": True}),
    "logical_ranks": (2, 6, {"logical_ranks": 4}),
    "sharded": (2, 6, {"shard": "state", "ema_decay": 0.9, "scheduler": "cosine"}),
    "local_sgd": (2, 6, {"local_sgd": LocalSGDConfig(steps=4)}),
    "local_sgd_sharded": (2, 6, {"local_sgd": LocalSGDConfig(steps=4), "checkpoint_format": "sharded"}),
    "power_sgd": (2, 6, {"compression": PowerSGD(rank=1, start_step=2, min_compression_rate=0.1)}),
}


class Stop(Callback):
    """Stops after step `last`, and has a state."""

    def __init__(self, last: int) -> None:
        self.last, self.steps = last, 0

    def on_step_end(self, trainer: Trainer) -> None:
        self.steps += 1
        if trainer.progress.step == self.last:
            trainer.stop("the checkpoint of this step is stored")

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]


class Stream(IterableDataset[Any]):
    """A stateful dataset."""

    def __init__(self, data: TensorDataset) -> None:
        self.data, self.position = data, 0

    def __iter__(self) -> Any:
        while self.position < len(self.data):
            self.position += 1
            yield self.data[self.position - 1]
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


def train(backend: Backend, name: str, folder: str, last: int | None, resume: bool) -> tuple[list[float], int, Any]:
    """Train to step `last` or to the end. Return the parameters, the number of calls of a hook, and the results."""
    _, _, settings = RUNS[name]
    settings = dict(settings)
    stateful, tokens, kind = (
        settings.pop("stateful", False),
        settings.pop("tokens", False),
        settings.pop("scheduler", ""),
    )
    torch.manual_seed(3)
    model: nn.Module = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 4)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    generator = torch.Generator().manual_seed(4)
    inputs = torch.randn(STEPS_PER_EPOCH * 8, 4, generator=generator, dtype=torch.float64)
    data: Any = TensorDataset(inputs, inputs.flip(1) ** 2)
    schedulers: dict[str, Any] = {
        "": lambda: None,
        "cosine": lambda: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS),
        "plateau": lambda: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, threshold=9.0, patience=0),
        "planned": lambda: lambda optimizer, total: torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total),
    }

    def loss_fn(output: Tensor, target: Tensor) -> Any:
        errors = (output - target) ** 2
        return (errors.sum(), errors.numel()) if tokens else errors.mean()

    config = TrainConfig(
        max_steps=STEPS, global_batch_size=8, output_dir=folder, resume=resume, progress="off", keep_last=1,
        log_every_n_steps=1, **settings,
    )  # fmt: skip
    callback = Stop(-1 if last is None else last)
    trainer = Trainer(
        model, optimizer, loss_fn, backend=backend, config=config, scheduler=schedulers[kind](), callbacks=[callback]
    )
    results = trainer.fit(Stream(data) if stateful else data, TensorDataset(inputs[:8], inputs[:8].flip(1) ** 2))
    models = [trainer.model] if trainer.averaged_model is None else [trainer.model, trainer.averaged_model]
    parameters = [value for model in models for tensor in model.parameters() for value in tensor.flatten().tolist()]
    return parameters, callback.steps, results


def group_of(name: str) -> RankGroup:
    """Return the ranks of a run."""
    size = RUNS[name][0]
    return RankGroup("local" if size == 1 else "ddp", size)


def main(version: str) -> None:
    """Store the checkpoint of each run, and the results of the resumed run."""
    import shutil
    import tempfile

    for name, (_, last, _) in RUNS.items():
        with group_of(name) as ranks, tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) / "run"
            ranks.run(train, name, str(folder), last, False)
            target = FOLDER / version / name
            (checkpoint,) = folder.glob("step-*")
            shutil.copytree(checkpoint, target / checkpoint.name)
            parameters, steps, results = ranks.run(train, name, str(folder), None, True)[0]
            expected = {"parameters": parameters, "steps": steps, "results": results}
            (target / "expected.json").write_text(json.dumps(expected) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
