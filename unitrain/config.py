"""What a training run is asked to do: one frozen dataclass that checks itself."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from unitrain.backends.base import Communicator, Compression
from unitrain.errors import ConfigError, did_you_mean

SchedulerUnit = Literal["step", "epoch"]
ProgressStyle = Literal["auto", "bar", "lines", "off"]


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The settings of a run; every rank passes the same. Raises ConfigError for a value that cannot be meant.

    `batch_size` counts samples per rank and micro-step. With a DataLoader it may be left out: the loader's own counts,
    as do its shuffling and its workers. `eval_batch_size` is for evaluation; without it a DataLoader's own counts, and
    for a Dataset the one trained with. `steps` and `show_every` count optimizer steps, `checkpoint_every` epochs.
    `seed` decides the order of the data, and each rank's random numbers (dropout, augmentation) from the first step on,
    whatever generator a DataLoader has. In its workers they begin anew with every epoch, so that a run resumed between
    two epochs repeats them; persistent workers are seeded only when they start.
    `clip_norm` limits the norm of the gradient of the global batch. `show_every` is how often the exact mean loss over
    ranks is worked out, shown and checked, without it about every two seconds; that is an allreduce of two numbers, and
    the only time the loop waits for the device. Without `output_dir` nothing is written. `resume=True` goes on from the
    newest checkpoint in `output_dir`, or starts from the beginning where there is none; `resume="path"` demands a
    checkpoint there.
    """

    epochs: int | None = None
    steps: int | None = None
    batch_size: int | None = None
    eval_batch_size: int | None = None
    accumulate: int = 1
    clip_norm: float | None = None
    scheduler_every: SchedulerUnit = "step"
    seed: int = 0
    shuffle: bool = True
    num_workers: int = 0
    unused_parameters: bool = False
    compression: Compression | None = None
    output_dir: str | Path | None = None
    checkpoint_every: int = 1
    resume: bool | str | Path = False
    progress: ProgressStyle = "auto"
    show_every: int | None = None

    def __post_init__(self) -> None:
        self._check_length()
        self._check_integer("batch_size", 1, "Use 32 to start with", optional=True)
        self._check_integer("eval_batch_size", 1, "Leave it out to evaluate with batch_size", optional=True)
        self._check_integer("accumulate", 1, "Use 1 to step after every batch")
        self._check_integer("seed", 0, "Use 0")
        self._check_integer("num_workers", 0, "Use 0 to load the data in the training process")
        self._check_integer("checkpoint_every", 1, "Use 1 to write a checkpoint after every epoch")
        self._check_integer("show_every", 1, "Leave it out to show the loss every two seconds", optional=True)
        self._check_choice("scheduler_every", get_args(SchedulerUnit))
        self._check_choice("progress", get_args(ProgressStyle))
        if self.compression is not None:
            self._check_choice("compression", get_args(Compression))
        clip = self.clip_norm
        if clip is not None and not (isinstance(clip, (int, float)) and math.isfinite(clip) and clip > 0):
            raise ConfigError(f"TrainConfig.clip_norm must be a number above 0, got {clip!r}. Use None not to clip.")
        if self.resume is True and self.output_dir is None:
            raise ConfigError(
                "TrainConfig.resume=True looks for checkpoints in output_dir, which is not set. "
                'Use TrainConfig(output_dir="runs/first", resume=True), or name a checkpoint: resume="runs/first".'
            )

    def _check_length(self) -> None:
        if (self.epochs is None) == (self.steps is None):
            found = "neither" if self.epochs is None else f"epochs={self.epochs} and steps={self.steps}"
            raise ConfigError(f"TrainConfig takes either epochs or steps, got {found}. Use TrainConfig(epochs=10).")
        self._check_integer("epochs", 1, "Use epochs=1 to pass over the data once", optional=True)
        self._check_integer("steps", 1, "Use steps=1 to change the parameters once", optional=True)

    def _check_integer(self, name: str, least: int, fix: str, *, optional: bool = False) -> None:
        value: Any = getattr(self, name)
        if value is None and optional:
            return
        if not isinstance(value, int) or isinstance(value, bool):
            raise ConfigError(f"TrainConfig.{name} must be a whole number, got {value!r}. {fix}.")
        if value < least:
            raise ConfigError(f"TrainConfig.{name} must be at least {least}, got {value}. {fix}.")

    def _check_choice(self, name: str, choices: tuple[str, ...]) -> None:
        value: Any = getattr(self, name)
        if value not in choices:
            near = did_you_mean(str(value), choices)
            raise ConfigError(f"Unknown TrainConfig.{name} {value!r}. {near}Available: {', '.join(choices)}.")


def check_alike(config: TrainConfig, communicator: Communicator) -> None:
    """Raise ConfigError on every rank when `config` is not the same on all of them. All ranks call it."""
    configs = communicator.allgather_object(config)
    for field in fields(config):
        values = [getattr(one, field.name) for one in configs]
        if any(value != values[0] for value in values):
            raise ConfigError(
                f"TrainConfig.{field.name} differs between ranks: {values}. Give every rank the same TrainConfig."
            )
