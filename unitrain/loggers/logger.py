"""The interface of a logger, and functions shared by loggers."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from numpy.typing import NDArray

from unitrain import validation
from unitrain.errors import ConfigError, MissingDependencyError
from unitrain.output import get_logger

Status = Literal["finished", "stopped", "failed"]

_log = get_logger(__name__)


@dataclass(frozen=True)
class RunInfo:
    """A run that starts, or resumes after `step` optimizer steps.

    `description` contains the configuration and the environment of the run: numbers, strings, and dictionaries of
    these. `trainer_id` identifies the Trainer. Later starts by the same Trainer resume its run.
    """

    step: int
    output_dir: Path | None
    description: Mapping[str, Any]
    trainer_id: str = ""


class Logger:
    """Base class for loggers. Override the methods that you need. They are called on rank 0 only.

    The Trainer's constructor calls `prepare`; its exceptions are raised on every rank. The other methods are called
    sequentially in a background thread, so training does not wait for them; only the end of a run waits, for a limited
    time. If one of them raises an exception or hangs, a warning is logged and the run continues without this logger.
    """

    def prepare(self, output_dir: Path | None) -> None:
        """Check the requirements before training. Raises ConfigError or MissingDependencyError."""

    def start(self, run_info: RunInfo) -> None:
        """Start a run, or resume one. Values for steps after `run_info.step` will be logged again.

        A run is new if `run_info.step` is 0. A finished run is resumed to log further results.
        """

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log `values`, which may be nan or infinite, at `step` (completed optimizer steps)."""

    def image(self, name: str, image: NDArray[Any], step: int, caption: str | None) -> None:
        """Log an image: uint8 [height, width, channels] with 1, 3 or 4 channels."""

    def histogram(self, name: str, counts: NDArray[Any], edges: NDArray[Any], step: int) -> None:
        """Log a histogram: `counts`, int64 [bins], and bin `edges`, float64 [bins + 1]."""

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        """Log a table. Cells are numbers, strings, booleans or None."""

    def finish(self, status: Status) -> None:
        """Finish the run with `status`: finished, stopped early, or failed with an exception.

        This is the last call, unless `start` is called again to log further results.
        """


def import_package(module: str, logger: Logger, extra: str) -> Any:
    """Import and return the module. If it is missing, raise MissingDependencyError with the extra that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingDependencyError(
            f"{type(logger).__name__} needs a package that is missing: {error}. "
            f'Install it, in the source folder of unitrain, with: pip install ".[{extra}]"'
        ) from error


def select_folder(logger: Logger, folder: str | Path | None, output_dir: Path | None, default: str = "") -> Path:
    """Return `folder`, or else the subfolder `default` of the output folder (by default the output folder itself).

    Raises ConfigError if both folders are None.
    """
    name = type(logger).__name__
    folder = validation.check_path(f"{name}(folder)", folder, f'Use {name}(folder="runs/first")', optional=True)
    if folder is not None:
        return Path(folder)
    if output_dir is None:
        raise ConfigError(
            f'{name} has no folder to write to, and TrainConfig.output_dir is not set. Use {name}(folder="runs/first").'
        )
    return output_dir / default


class ServiceRun:
    """The run ID that a tracking service has assigned, and the last logged step per metric, saved in `folder`.

    Tracking services cannot remove values. If a resumed run repeats steps, the values that were logged first remain,
    and the values of the repeated steps are not logged. If `folder` is None, nothing is saved, and a run resumes from
    `previous`, the object of the previous start of the same run in this process, if any.
    """

    def __init__(self, name: str, folder: Path | None, step: int, previous: ServiceRun | None = None) -> None:
        self._path = None if folder is None else folder / f".{name}.json"
        self.id: str | None = None
        self._previous_steps: dict[str, int] = {}
        if step and self._path is None and previous is not None:
            self.id, self._previous_steps = previous.id, dict(previous._last_steps)
        if step and self._path is not None and self._path.exists():
            try:
                saved = json.loads(self._path.read_text())
                previous_steps = {name: int(last_step) for name, last_step in saved["steps"].items()}
                self.id, self._previous_steps = saved["id"], previous_steps
            except (ValueError, TypeError, LookupError, AttributeError) as error:
                _log.warning(
                    "'%s', which contains the ID of the run at the tracking service, is damaged, which can happen "
                    "after a power loss (%s: %s). The values are logged to a new run.",
                    *(self._path, type(error).__name__, error),
                )
        self._last_steps: dict[str, int] = dict(self._previous_steps)

    def set_id(self, run_id: str) -> None:
        """Save the run ID assigned by the service."""
        self.id = run_id
        self._save()

    def filter_unlogged(self, names: Iterable[str], step: int) -> list[str]:
        """Return the names that were not logged for `step` before the run was resumed."""
        return [name for name in names if step > self._previous_steps.get(name, -1)]

    def mark_logged(self, names: Iterable[str], step: int) -> None:
        """Save `step` as the last logged step of `names`."""
        self._last_steps.update(dict.fromkeys(names, step))
        self._save()

    def _save(self) -> None:
        if self._path is not None:
            rewritten = self._path.with_name(f"{self._path.name}.unfinished")
            rewritten.write_text(json.dumps({"id": self.id, "steps": self._last_steps}))
            rewritten.rename(self._path)
