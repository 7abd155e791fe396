"""All that follows a run as it goes: progress for the eye, and loggers. One call for each moment of the run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Real
from pathlib import Path
from typing import Any

from torch import Tensor

from unitrain import validation
from unitrain.backends.base import Communicator
from unitrain.backends.synchronized_errors import call_on_all_ranks
from unitrain.config import TrainConfig
from unitrain.errors import ConfigError, LoggerError, Preempted, UnitrainError
from unitrain.loggers import create_loggers
from unitrain.loggers.background import Background
from unitrain.loggers.images import check_image, check_table, to_histogram, to_pixels
from unitrain.loggers.logger import Start, Status
from unitrain.progress.display import Progress, choose_progress


class Tracker:
    """Shows and logs on rank 0, and does nothing on the others. All ranks make it and run it alike.

    `step(epoch, samples)` is progress' own, because it is called in the hot loop. Raises ConfigError,
    MissingDependencyError or LoggerError, on every rank alike, for a logger that cannot be used.
    """

    step: Callable[[int, int], None]

    def __init__(self, config: TrainConfig, communicator: Communicator, loggers: object) -> None:
        self._config, self._communicator = config, communicator
        self._output_dir = None if config.output_dir is None else Path(config.output_dir)
        self._loggers = call_on_all_ranks(communicator, lambda: create_loggers(loggers))
        self._started: list[Background] = []
        self._description: Mapping[str, Any] | None = None
        self._show(Progress())
        call_on_all_ranks(communicator, self._prepare)

    @contextmanager
    def run(self, step: int, steps_left: int | None, description: Mapping[str, Any], *, over: bool) -> Iterator[None]:
        """Inside it a run that has `step` steps done is followed. One that is `over` is shown, and not logged."""
        self._finish("finished")  # what was logged after an earlier run
        self._description, self._stopped = description, False
        if not over:
            self._start(step)
        status: Status = "failed"
        try:
            with choose_progress(self._config.progress, self._communicator.rank) as progress:
                self._show(progress)
                progress.start(steps_left, self._config.max_epochs)
                yield
            status = "stopped" if self._stopped else "finished"
        except Preempted:
            status = "stopped"
            raise
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

    def slow(self, ranks: str) -> None:
        """Ranks that the others wait for, said in words, and shown until it is empty again."""
        self._progress.slow(ranks)

    def look(self, step: int, values: Mapping[str, float]) -> None:
        """The "loss" was worked out, and what else is in `values`."""
        self._progress.loss(values["loss"])
        self._call("log", values, step)

    def validated(self, epoch: int, step: int, results: dict[str, float]) -> None:
        """Show and log the `results` of a validation within pass number `epoch`."""
        self._progress.validated(epoch, results)
        self._call("log", results, step)

    def epoch(self, epoch: int, step: int, results: dict[str, float], samples_per_second: float) -> None:
        """Pass number `epoch` is over, with these results, and went with this speed."""
        self._progress.epoch(epoch, results)
        self._call("log", {"epoch": epoch, **results, "epoch_samples_per_second": samples_per_second}, step)

    def log(self, values: Mapping[str, Any], step: int) -> None:
        """Log the user's own numbers. Raises ConfigError for what is none, on every rank that calls it."""
        self._check_begun("log")
        for name, value in values.items():
            number = isinstance(value, Real) or (isinstance(value, Tensor) and value.numel() == 1)
            if not number or name == "step":
                raise ConfigError(
                    f"trainer.log takes numbers by name, got {name}={value!r}. "
                    'Use trainer.log(temperature=0.7); "step" is filled in.'
                )
        if self._goes_on(step):
            self._call("log", {name: _number(value) for name, value in values.items()}, step)

    def log_image(self, name: str, image: Tensor, step: int, caption: str | None) -> None:
        """Log the user's image. Raises TensorError for what is none, on every rank that calls it."""
        self._check_begun("log_image")
        validation.check_text("trainer.log_image(name)", name, "Use trainer.log_image('sample', image)")
        check_image(image)
        if self._goes_on(step):
            self._call("image", name, to_pixels(image), step, caption)

    def log_histogram(self, name: str, values: Tensor, step: int) -> None:
        """Log a histogram of the values of a tensor. Raises TensorError, on every rank that calls it."""
        self._check_begun("log_histogram")
        counts, edges = to_histogram(values)
        if self._goes_on(step):
            self._call("histogram", name, counts, edges, step)

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        """Log a table. Raises ConfigError for rows that do not fit, on every rank that calls it."""
        self._check_begun("log_table")
        check_table(name, columns, rows)
        if self._goes_on(step):
            self._call("table", name, list(columns), [list(row) for row in rows], step)

    def _check_begun(self, method: str) -> None:
        if self._description is None:
            raise ConfigError(
                f"trainer.{method} was called before fit, when the run has no place yet. "
                "Call it from a callback, such as on_fit_start, or after fit."
            )

    def _prepare(self) -> None:
        for logger in self._loggers if self._communicator.rank == 0 else ():
            try:
                logger.prepare(self._output_dir)
            except UnitrainError:
                raise
            except Exception as error:
                raise LoggerError(
                    f"{type(logger).__name__} cannot be used: {type(error).__name__}: {error}. "
                    "Fix the logger, or remove it from the Trainer's loggers."
                ) from error

    def _start(self, step: int) -> None:
        if self._communicator.rank == 0:
            start = Start(step, self._output_dir, self._description or {})
            self._started = [Background(logger, start) for logger in self._loggers]

    def _finish(self, status: Status) -> None:
        started, self._started = self._started, []
        for logger, deadline in [(logger, logger.finish(status)) for logger in started]:
            logger.wait(deadline)
        lost = [one.logger for one in started if one.is_disabled]
        self._loggers = tuple(logger for logger in self._loggers if logger not in lost)

    def _goes_on(self, step: int) -> bool:
        """Whether there is something to log to; after the run, it is started again for the rest of the program."""
        if not self._started and self._loggers:
            self._start(step)
            for logger in self._started:
                logger.wait_until_started()
        return bool(self._started)

    def _call(self, method: str, *arguments: Any) -> None:
        for logger in self._started:
            logger.call(method, *arguments)

    def _show(self, progress: Progress) -> None:
        self._progress, self.step = progress, progress.step


def _number(value: Any) -> float:
    return float(value.detach() if isinstance(value, Tensor) else value)
