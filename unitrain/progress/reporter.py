"""RunReporter: progress display and loggers of a run."""

from __future__ import annotations

import secrets
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
from unitrain.loggers.background import BackgroundLogger
from unitrain.loggers.images import check_image, check_table, to_histogram, to_pixels
from unitrain.loggers.logger import RunInfo, Status
from unitrain.progress.display import ProgressDisplay, choose_display
from unitrain.progress.training_progress import TrainingProgress


class RunReporter:
    """Displays and logs a run on rank 0, and does nothing on other ranks. All ranks must create it and enter
    `report_run`.

    Raises ConfigError, MissingDependencyError or LoggerError on every rank for a logger that cannot be used.
    """

    count_step: Callable[[int, int], None]
    """`count_step(epoch, samples)` counts a step. It is the display's own method, so that a step has no additional
    function call."""

    def __init__(self, config: TrainConfig, communicator: Communicator, loggers: object) -> None:
        self._config, self._communicator = config, communicator
        self._output_dir = None if config.output_dir is None else Path(config.output_dir)
        self._loggers = call_on_all_ranks(communicator, lambda: create_loggers(loggers))
        self._started_loggers: list[BackgroundLogger] = []
        self._description: Mapping[str, Any] | None = None
        self._trainer_id = secrets.token_hex(8)
        self.stop_reason: str | None = None
        """Why the run stops before its end, or None."""
        self._use_display(ProgressDisplay())
        call_on_all_ranks(communicator, self._prepare_loggers)

    @contextmanager
    def report_run(
        self, step: int, remaining_steps: int | None, description: Mapping[str, Any], *, is_complete: bool
    ) -> Iterator[None]:
        """Context manager that reports a run, starting at `step`. If `is_complete`, no steps remain, and the run is not
        logged."""
        self._finish_loggers("finished")  # finish loggers that `log` restarted after an earlier run
        self._description, self.stop_reason = description, None
        if not is_complete:
            self._start_loggers(step)
        status: Status = "failed"
        try:
            with choose_display(self._config.progress, self._communicator.rank) as display:
                self._use_display(display)
                display.start(remaining_steps, self._config.max_epochs)
                yield
            status = "stopped" if self.stop_reason is not None else "finished"
        except Preempted:
            status = "stopped"
            raise
        finally:
            self._use_display(ProgressDisplay())
            self._finish_loggers(status)

    def show_message(self, text: str) -> None:
        """Show a message about the run."""
        self._display.show_message(text)

    def report_stop(self, step: int, reason: str) -> None:
        """Report that the run stops before its end."""
        self.stop_reason = reason
        self.show_message(f"stopped after step {step}: {reason}")

    def report_slow_ranks(self, description: str) -> None:
        """Show the `description` of slow ranks until a call with an empty description."""
        self._display.show_slow_ranks(description)

    def report_sync_point(self, step: int, values: Mapping[str, float]) -> None:
        """Show the "loss" of `values`, and log all of them."""
        self._display.set_loss(values["loss"])
        self._call_loggers("log", values, step)

    def report_validation(self, epoch: int, step: int, results: dict[str, float]) -> None:
        """Show and log the `results` of a validation within epoch number `epoch`."""
        self._display.show_validation(epoch, results)
        self._call_loggers("log", results, step)

    def report_epoch(
        self,
        epoch: int,
        step: int,
        results: dict[str, float],
        samples_per_second: float,
        goodput: Mapping[str, float],
    ) -> None:
        """Show and log the `results` and the throughput of the completed epoch number `epoch`, and log the goodput."""
        self._display.show_epoch(epoch, results)
        speed = {"epoch_samples_per_second": samples_per_second}
        self._call_loggers("log", {"epoch": epoch, **results, **speed, **goodput}, step)

    def log(self, values: Mapping[str, Any], step: int) -> None:
        """Log the user's numbers. Raises ConfigError on every calling rank for values that are not numbers and for the
        name "step". Like the other methods for the user's values, it also raises ConfigError before the first `fit`
        call.
        """
        self._check_fit_called("log")
        for name, value in values.items():
            is_number = isinstance(value, Real) or (
                isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex()
            )
            if not is_number or name == "step":
                raise ConfigError(
                    f"trainer.log takes numbers by name, got {name}={value!r}. "
                    'Use trainer.log(temperature=0.7); unitrain adds "step" itself.'
                )
        if self._start_loggers_if_needed(step):
            self._call_loggers("log", {name: _to_float(value) for name, value in values.items()}, step)

    def log_image(self, name: str, image: Tensor, step: int, caption: str | None) -> None:
        """Log an image. Raises TensorError on every calling rank for a tensor that is not an image."""
        self._check_fit_called("log_image")
        validation.check_text("trainer.log_image(name)", name, "Use trainer.log_image('sample', image)")
        check_image(image)
        if self._start_loggers_if_needed(step):
            self._call_loggers("image", name, to_pixels(image), step, caption)

    def log_histogram(self, name: str, values: Tensor, step: int) -> None:
        """Log a histogram of the values of a tensor. Raises TensorError on every calling rank if it is not a tensor."""
        self._check_fit_called("log_histogram")
        counts, edges = to_histogram(values)
        if self._start_loggers_if_needed(step):
            self._call_loggers("histogram", name, counts, edges, step)

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        """Log a table. Raises ConfigError on every calling rank if the rows do not match the columns."""
        self._check_fit_called("log_table")
        check_table(name, columns, rows)
        if self._start_loggers_if_needed(step):
            self._call_loggers("table", name, list(columns), [list(row) for row in rows], step)

    def _check_fit_called(self, method: str) -> None:
        if self._description is None:
            raise ConfigError(
                f"trainer.{method} was called before fit, when the step of the run is unknown. "
                "Call it from a callback, such as on_fit_start, or after fit."
            )

    def _prepare_loggers(self) -> None:
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

    def _start_loggers(self, step: int) -> None:
        if self._communicator.rank == 0:
            run_info = RunInfo(step, self._output_dir, self._description or {}, self._trainer_id)
            self._started_loggers = [BackgroundLogger(logger, run_info) for logger in self._loggers]

    def _finish_loggers(self, status: Status) -> None:
        started_loggers, self._started_loggers = self._started_loggers, []
        for logger, deadline in [(logger, logger.finish(status)) for logger in started_loggers]:
            logger.wait(deadline)
        failed = [logger.logger for logger in started_loggers if logger.is_disabled]
        self._loggers = tuple(logger for logger in self._loggers if logger not in failed)

    def _start_loggers_if_needed(self, step: int) -> bool:
        """Restart the loggers if they were finished at the end of a run, and return whether loggers are running. Return
        False on ranks other than 0."""
        if not self._started_loggers and self._loggers:
            self._start_loggers(step)
            for logger in self._started_loggers:
                logger.wait_until_started()
        return bool(self._started_loggers)

    def _call_loggers(self, method: str, *arguments: Any) -> None:
        for logger in self._started_loggers:
            logger.call(method, *arguments)

    def _use_display(self, display: ProgressDisplay) -> None:
        self._display, self.count_step = display, display.count_step


class LoggingMethods:
    """The methods of the Trainer with which users log values. Any rank may call them, but only rank 0 logs."""

    _reporter: RunReporter
    progress: TrainingProgress

    def log(self, **values: float | Tensor) -> None:
        """Log numbers at the current step. Any rank may call this method, but only rank 0 logs."""
        self._reporter.log(values, self.progress.step)

    def log_image(self, name: str, image: Tensor, caption: str | None = None) -> None:
        """Log an image: a tensor [height, width], [channels, height, width] or [height, width, channels] with 1, 3 or 4
        channels, of dtype uint8 or with values from 0 to 1. Any rank may call this method, but only rank 0 logs."""
        self._reporter.log_image(name, image, self.progress.step, caption)

    def log_histogram(self, name: str, values: Tensor) -> None:
        """Log a histogram of the values of a tensor. The CSV logger ignores it. Any rank may call this method, but only
        rank 0 logs."""
        self._reporter.log_histogram(name, values, self.progress.step)

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Log a table of numbers, strings, booleans and None. The CSV logger ignores it. Any rank may call this method,
        but only rank 0 logs."""
        self._reporter.log_table(name, columns, rows, self.progress.step)


def _to_float(value: Any) -> float:
    return float(value.detach() if isinstance(value, Tensor) else value)
