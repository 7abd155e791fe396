"""What a logger is: it takes the numbers and images of a run somewhere."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from numpy.typing import NDArray

from unitrain import validation
from unitrain.errors import ConfigError, MissingDependencyError

Status = Literal["finished", "stopped", "failed"]


@dataclass(frozen=True)
class Start:
    """A run begins, or goes on, after `step` optimizer steps.

    `description` is what it was asked for and where it runs, in numbers, strings and dictionaries of these.
    """

    step: int
    output_dir: Path | None
    description: Mapping[str, Any]


class Logger:
    """Takes the numbers of a run somewhere; override what is needed. Every rank has one, only rank 0's is ever called.

    `prepare` is called in the Trainer's constructor, and what it raises ends the run on every rank. The others are
    called in a thread of the logger's own, one after the other, so that training never waits for them. What they raise
    is told in a warning, as is one that does not come back, and the run goes on without this logger.
    """

    def prepare(self, output_dir: Path | None) -> None:
        """Find all that is needed, before anything is trained. Raises ConfigError or MissingDependencyError."""

    def start(self, start: Start) -> None:
        """Begin, or go on: what was logged for steps after `start.step` is going to be logged again.

        A run goes on also to log a result when it is over. It begins anew where `start.step` is 0.
        """

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Take `values`, which may be nan or infinite, as they are after `step` optimizer steps of all ranks."""

    def image(self, name: str, image: NDArray[Any], step: int, caption: str | None) -> None:
        """Take an image, uint8 [height, width, 1, 3 or 4 channels]. A logger that only takes numbers leaves it."""

    def histogram(self, name: str, counts: NDArray[Any], edges: NDArray[Any], step: int) -> None:
        """Log a histogram: `counts` int64 [bins] of the values between `edges` float64 [bins + 1]."""

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        """Log a table, whose cells are numbers, strings, booleans or None."""

    def finish(self, status: Status) -> None:
        """The run is over, was stopped before its time, or an exception ends it; the last call before a new start."""


def imported(module: str, logger: Logger, extra: str) -> Any:
    """Return the module. Raises MissingDependencyError, with the extra of unitrain that brings it, where it is not."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingDependencyError(
            f"{type(logger).__name__} needs a package that is missing: {error}. "
            f'Install it, in the source folder of unitrain, with: pip install ".[{extra}]"'
        ) from error


def chosen_folder(logger: Logger, folder: str | Path | None, output_dir: Path | None, default: str = "") -> Path:
    """Return `folder`, or `default` in the output folder. Raises ConfigError where there is neither."""
    name = type(logger).__name__
    validation.folder(f"{name}(folder)", folder, f'Use {name}(folder="runs/first")', optional=True)
    if folder is not None:
        return Path(folder)
    if output_dir is None:
        raise ConfigError(
            f'{name} has no folder to write to, and TrainConfig.output_dir is not set. Use {name}(folder="runs/first").'
        )
    return output_dir / default
