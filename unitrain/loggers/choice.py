"""Loggers by name."""

from __future__ import annotations

from collections.abc import Callable

from unitrain.errors import ConfigError, did_you_mean
from unitrain.loggers.csv import CSVLogger
from unitrain.loggers.json_lines import JSONLinesLogger
from unitrain.loggers.logger import Logger
from unitrain.loggers.mlflow import MLflowLogger
from unitrain.loggers.tensorboard import TensorBoardLogger
from unitrain.loggers.wandb import WandbLogger

_NAMED: dict[str, Callable[[], Logger]] = {
    "csv": CSVLogger,
    "jsonl": JSONLinesLogger,
    "mlflow": MLflowLogger,
    "tensorboard": TensorBoardLogger,
    "wandb": WandbLogger,
}


def choose_loggers(asked: object) -> tuple[Logger, ...]:
    """Return the loggers of a sequence of loggers and names. Raises ConfigError for anything else."""
    if not isinstance(asked, list | tuple):
        raise ConfigError(f"The Trainer's loggers must be a list, got {asked!r}. Use loggers=['csv'].")
    for place, one in enumerate(asked):
        if any(one is other or one == other for other in asked[:place]):
            raise ConfigError(f"The Trainer's loggers name {one!r} twice. Name each once.")
    return tuple(_choose(one) for one in asked)


def _choose(asked: object) -> Logger:
    if isinstance(asked, Logger):
        return asked
    if not isinstance(asked, str):
        raise ConfigError(
            f"A logger must be a unitrain.Logger or a name, got {asked!r}. Use Trainer(loggers=[unitrain.CSVLogger()])."
        )
    if asked not in _NAMED:
        near = did_you_mean(asked, _NAMED)
        raise ConfigError(f"Unknown logger {asked!r}. {near}Available: {', '.join(_NAMED)}.")
    return _NAMED[asked]()
