"""Loggers: write the metrics of a run to files and tracking services.

logger       the interface of a logger, and functions that several loggers use
background   run a logger in a background thread
json_lines   JSON lines files, also used for the history in the output folder
csv, mlflow, tensorboard, wandb   the other loggers
images       check and convert images, histograms and tables
"""

from __future__ import annotations

from collections.abc import Callable

from unitrain.errors import ConfigError, did_you_mean
from unitrain.loggers.csv import CSVLogger
from unitrain.loggers.json_lines import JSONLinesLogger
from unitrain.loggers.logger import Logger
from unitrain.loggers.mlflow import MLflowLogger
from unitrain.loggers.tensorboard import TensorBoardLogger
from unitrain.loggers.wandb import WandbLogger

_LOGGERS: dict[str, Callable[[], Logger]] = {
    "csv": CSVLogger,
    "jsonl": JSONLinesLogger,
    "mlflow": MLflowLogger,
    "tensorboard": TensorBoardLogger,
    "wandb": WandbLogger,
}


def create_loggers(loggers: object) -> tuple[Logger, ...]:
    """Return the loggers for a list of Logger objects and names. Raises ConfigError for other arguments."""
    if not isinstance(loggers, list | tuple):
        raise ConfigError(f"The Trainer's loggers must be a list, got {loggers!r}. Use loggers=['csv'].")
    for position, logger in enumerate(loggers):
        if any(logger is previous_logger or logger == previous_logger for previous_logger in loggers[:position]):
            raise ConfigError(f"The Trainer's loggers contain {logger!r} twice. Pass each logger once.")
    return tuple(_create_logger(logger) for logger in loggers)


def _create_logger(logger: object) -> Logger:
    if isinstance(logger, Logger):
        return logger
    if not isinstance(logger, str):
        raise ConfigError(
            f"A logger must be a unitrain.Logger or a name, got {logger!r}. "
            "Use Trainer(loggers=[unitrain.CSVLogger()])."
        )
    if logger not in _LOGGERS:
        suggestion = did_you_mean(logger, _LOGGERS)
        raise ConfigError(f"Unknown logger {logger!r}. {suggestion}Available: {', '.join(_LOGGERS)}.")
    return _LOGGERS[logger]()
