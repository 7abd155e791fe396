"""All that follows a run as it goes: progress for the eye, and loggers. One call for each moment of the run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Real
from pathlib import Path
from typing import Any

from torch import Tensor

from unitrain.backends.base import Communicator, together
from unitrain.config import TrainConfig
from unitrain.errors import ConfigError, LoggerError, UnitrainError
from unitrain.tracking.images import check_image, to_pixels
from unitrain.tracking.loggers.background import Background
from unitrain.tracking.loggers.logger import Logger, Start, Status
from unitrain.tracking.progress import Progress, choose_progress

_log = logging.getLogger(__name__)


class Tracker:
    """Shows and logs on rank 0, and does nothing on the others. All ranks make it and run it alike.

    `step(epoch, samples)` is progress' own, because it is called in the hot loop. Raises ConfigError,
    MissingDependencyError or LoggerError, on every rank alike, for a logger that cannot be used.
    """

    step: Callable[[int, int], None]

    def __init__(self, config: TrainConfig, communicator: Communicator, loggers: Sequence[Logger]) -> None:
        self._config, self._communicator = config, communicator
        self._output_dir = None if config.output_dir is None else Path(config.output_dir)
        self._loggers = tuple(loggers)
        self._started: list[Background] = []
        self._description: Mapping[str, Any] | None = None
        self._show(Progress())
        together(communicator, self._prepare)

    @contextmanager
    def run(self, step: int, steps_left: int, description: Mapping[str, Any], *, over: bool) -> Iterator[None]:
        """Inside it a run that has `step` steps done is followed. One that is `over` is shown, and not logged."""
        self._description, self._stopped = description, False
        if not over:
            together(self._communicator, lambda: self._start(step))
        status: Status = "failed"
        try:
            with choose_progress(self._config.progress, self._communicator.rank) as progress:
                self._show(progress)
                progress.start(steps_left, self._config.epochs)
                yield
            status = "stopped" if self._stopped else "finished"
        finally:
            self._show(Progress())
            self._finish(status)

    def note(self, text: str) -> None:
        """Something to know about the run, said once."""
        self._progress.note(text)

    def stopped(self, step: int, reason: str) -> None:
        """The run ends before its time."""
        self._stopped = True
        self.note(f"stopped after step {step}: {reason}")

    def look(self, step: int, values: Mapping[str, float]) -> None:
        """The "loss" was worked out, and what else is in `values`."""
        self._progress.loss(values["loss"])
        self._call("log", values, step)

    def epoch(self, epoch: int, step: int, results: dict[str, float], speed: Mapping[str, float]) -> None:
        """Pass number `epoch` is over, with these results, and went with this speed."""
        self._progress.epoch(epoch, results)
        self._call("log", {"epoch": epoch, **results, **speed}, step)

    def log(self, values: Mapping[str, Any], step: int) -> None:
        """Log the user's own numbers. Raises ConfigError for what is none, on every rank that calls it."""
        self._check_begun()
        for name, value in values.items():
            number = isinstance(value, Real) or (isinstance(value, Tensor) and value.numel() == 1)
            if not (isinstance(name, str) and number) or name == "step":
                raise ConfigError(
                    f"trainer.log takes names and numbers, got {name!r}: {value!r}. "
                    'Use trainer.log({"temperature": 0.7}); "step" is filled in.'
                )
        if self._logs():
            with self._open(step):
                self._call("log", {name: float(value) for name, value in values.items()}, step)

    def log_image(self, name: str, image: Tensor, step: int, caption: str | None) -> None:
        """Log the user's image. Raises TensorError for what is none, on every rank that calls it."""
        self._check_begun()
        check_image(image)
        if self._logs():
            with self._open(step):
                self._call("image", name, to_pixels(image), step, caption)

    def _logs(self) -> bool:
        return bool(self._loggers) and self._communicator.rank == 0

    def _check_begun(self) -> None:
        if self._description is None:
            raise ConfigError(
                "trainer.log was called before fit, when the run has no place yet. "
                "Log from a callback, such as on_fit_start, or after fit."
            )

    def _prepare(self) -> None:
        for logger in self._loggers:
            if not isinstance(logger, Logger):
                raise ConfigError(
                    f"A logger must be a unitrain.Logger, got {logger!r}. Use Trainer(loggers=[unitrain.CSVLogger()])."
                )
            if self._logs():
                _named(logger, lambda logger=logger: logger.prepare(self._output_dir))  # type: ignore[misc]

    def _start(self, step: int) -> None:
        if not self._logs():
            return
        start = Start(step, self._output_dir, self._description or {})
        try:
            for logger in self._loggers:
                _named(logger, lambda logger=logger: logger.start(start))  # type: ignore[misc]
                self._started.append(Background(logger))
        except BaseException:
            self._finish("failed")
            raise

    def _finish(self, status: Status) -> None:
        started, self._started = self._started, []
        for logger in started:
            logger.finish(status)

    @contextmanager
    def _open(self, step: int) -> Iterator[None]:
        """Start the loggers again for what is logged when the run is over."""
        if self._started:
            yield
            return
        try:
            self._start(step)
        except UnitrainError as error:  # on this rank alone: the others must not wait for it
            _log.warning("What was logged after the run is lost: %s", error)
        try:
            yield
        finally:
            self._finish("finished")

    def _call(self, method: str, *arguments: Any) -> None:
        for logger in self._started:
            logger.call(method, *arguments)

    def _show(self, progress: Progress) -> None:
        self._progress, self.step = progress, progress.step


def _named(logger: Logger, do: Callable[[], None]) -> None:
    """Do it. Raises LoggerError, naming the logger, for an exception that is not a deliberate one already."""
    try:
        do()
    except UnitrainError:
        raise
    except Exception as error:
        raise LoggerError(
            f"{type(logger).__name__} cannot be started: {type(error).__name__}: {error}. "
            "Mend it, or leave it out of the Trainer's loggers."
        ) from error
