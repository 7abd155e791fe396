"""The small training run for fault injection, with a record of the samples that each rank used."""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from unitrain import Callback, TrainConfig, Trainer
from unitrain.backends.base import Backend
from unitrain.checkpoint import files

SAMPLES, GLOBAL_BATCH, EPOCHS = 50, 12, 4
STEPS_PER_EPOCH = -(-SAMPLES // GLOBAL_BATCH)  # the last step has 2 samples, fewer than 3 ranks
STEPS = EPOCHS * STEPS_PER_EPOCH
OPTIMIZERS = ("sgd", "adamw")


@dataclass(frozen=True)
class Settings:
    """Settings that differ between runs."""

    optimizer: str = "sgd"
    checkpoint_every_steps: int = 2
    asynchronous: bool = False
    keep_last: int | None = None


def create_trainer(backend: Backend, folder: Path, settings: Settings, *callbacks: Callback) -> Trainer:
    """Return a Trainer for the run in `folder`, which resumes if there is a checkpoint. The run uses float64, so
    rounding errors are much smaller than 1e-6."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    if settings.optimizer == "sgd":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    config = TrainConfig(
        max_epochs=EPOCHS,
        global_batch_size=GLOBAL_BATCH,
        output_dir=folder,
        resume="auto",
        checkpoint_every_steps=settings.checkpoint_every_steps,
        async_checkpoints=settings.asynchronous,
        keep_last=settings.keep_last,
        progress="off",
    )
    return Trainer(model, optimizer, _loss, backend=backend, config=config, callbacks=callbacks)


def data() -> TensorDataset:
    """Return samples whose target is a pair (value to learn, index of the sample)."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, 6, generator=generator, dtype=torch.float64)
    indices = torch.arange(SAMPLES, dtype=torch.float64)
    return TensorDataset(inputs, torch.stack([inputs.sin().sum(1), indices], dim=1))


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output[:, 0], target[:, 0])


class SampleLog(Callback):
    """Writes the samples that this rank used in each step. Each line is passed to the kernel before the next step."""

    def __init__(self, folder: Path, attempt: int, rank: int, size: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self._file = os.open(folder / f"{attempt:03d}-{rank}-of-{size}.jsonl", flags, 0o644)
        self._samples: list[int] = []

    def on_fit_start(self, trainer: Trainer) -> None:
        self._write({"start": trainer.progress.step})

    def on_micro_batch_end(self, trainer: Trainer, batch: Any, part: Any, loss: Any) -> None:
        self._samples += [int(index) for index in batch[1][: part.samples, 1]]

    def on_step_end(self, trainer: Trainer) -> None:
        self._write({"step": trainer.progress.step, "samples": self._samples})
        self._samples = []

    def _write(self, line: dict[str, Any]) -> None:
        os.write(self._file, json.dumps(line).encode() + b"\n")


@dataclass(frozen=True)
class Audit:
    """The number of samples that the complete run lost and repeated, and the number of attempts that resumed from a
    checkpoint."""

    lost: int
    repeated: int
    resumed: int


def audit(notes: Path) -> Audit:
    """Audit the sample logs of all attempts. An attempt replaces all steps after the step from which it resumed."""
    attempts: dict[str, list[Path]] = {}
    for path in sorted(notes.glob("*.jsonl")):
        attempts.setdefault(path.name.split("-")[0], []).append(path)
    kept: dict[int, list[int]] = {}
    resumed = 0
    for paths in attempts.values():
        lines = [json.loads(line) for path in paths for line in path.read_text().splitlines() if line.endswith("}")]
        starts = {line["start"] for line in lines if "start" in line}
        if not starts:
            continue  # killed before training started
        if len(starts) > 1:
            raise AssertionError(f"The ranks of one attempt started from steps {sorted(starts)}, in {notes}.")
        (start,) = starts
        resumed += start > 0
        kept = {step: samples for step, samples in kept.items() if step <= start}
        for line in lines:
            if "step" in line:
                kept.setdefault(line["step"], []).extend(line["samples"])
    lost = repeated = 0
    for epoch in range(EPOCHS):
        steps = range(epoch * STEPS_PER_EPOCH + 1, (epoch + 1) * STEPS_PER_EPOCH + 1)
        seen = Counter(sample for step in steps for sample in kept.get(step, []))
        lost += sum(sample not in seen for sample in range(SAMPLES))
        repeated += sum(times - 1 for times in seen.values())
    return Audit(lost, repeated + sum(len(samples) for step, samples in kept.items() if step > STEPS), resumed)


def final_weights(folder: Path) -> dict[str, Tensor]:
    """Return the final weights of the complete run in `folder`.

    Raises AssertionError if the last checkpoint or the history is not valid.
    """
    path = files.checkpoint_path(folder, STEPS)
    newest = files.list_checkpoints(folder)[:1]
    if newest != [path] or (wrong := files.find_corruption(path)) is not None:
        raise AssertionError(f"The newest checkpoint is {newest}, {wrong if newest == [path] else f'not {path}'}.")
    rows = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    found = [(row["epoch"], row["step"]) for row in rows]
    wanted = [(epoch, epoch * STEPS_PER_EPOCH) for epoch in range(1, EPOCHS + 1)]
    if found != wanted:
        raise AssertionError(f"The history of the finished run has the (epoch, step) {found}.")
    return load_file(path / files.MODEL)


def difference(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Return the largest difference between the weights of two models."""
    if found.keys() != wanted.keys():
        raise AssertionError(f"The weights are {sorted(found)} instead of {sorted(wanted)}.")
    return max(float((found[name] - wanted[name]).abs().max()) for name in wanted)
