"""Progress display of rank 0 on standard error: a bar on a terminal, otherwise lines.

Launchers such as horovodrun capture the output of ranks, so rank 0's standard error is a pipe. `unitrain launch` passes
the path of its terminal to the ranks, and rank 0 draws the bar there.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from typing_extensions import Self

from unitrain import output
from unitrain.bootstrap import environment
from unitrain.config import ProgressStyle

_BAR_INTERVAL_SECONDS = 0.1
_LINE_INTERVAL_SECONDS = 10.0
_MAX_COLUMNS = 80


class ProgressDisplay:
    """Interface of displays. This base class shows nothing. `count_step` is called in every step, so it must be
    cheap."""

    def start(self, steps: int | None, epochs: int | None) -> None:
        """Start a run with `steps` remaining steps (None if unknown) and `epochs` epochs in total (None if not set)."""

    def show_message(self, text: str) -> None:
        """Show a message about the run."""

    def count_step(self, epoch: int, samples: int) -> None:
        """Count a step with `samples` samples over all ranks, in epoch number `epoch` (from 1)."""

    def set_loss(self, value: float) -> None:
        """Set the displayed loss: the mean over all ranks and the last logging interval."""

    def show_slow_ranks(self, description: str) -> None:
        """Show the `description` of slow ranks until a call with an empty description."""

    def show_validation(self, epoch: int, results: dict[str, float]) -> None:
        """Show the results of a validation within an epoch."""

    def show_epoch(self, epoch: int, results: dict[str, float]) -> None:
        """Show the results of a completed epoch."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        pass


class _TimedDisplay(ProgressDisplay, ABC):
    """Base class of the bar and of the lines: counts steps and limits the rate of updates."""

    interval_seconds = _LINE_INTERVAL_SECONDS

    def __init__(self, console: Console) -> None:
        self._console = console
        self._shown_loss: float | None = None
        self._slow_ranks = ""

    def start(self, steps: int | None, epochs: int | None) -> None:
        self._steps, self._epochs = steps, epochs
        self._steps_done = self._samples = 0
        self._start_time = time.perf_counter()
        self._next_update_at = self._start_time + self.interval_seconds

    def count_step(self, epoch: int, samples: int) -> None:
        self._steps_done += 1
        self._samples += samples
        now = time.perf_counter()
        if now >= self._next_update_at:
            self._next_update_at = now + self.interval_seconds
            self._show_progress(epoch)

    def show_message(self, text: str) -> None:
        self._print_line(text)

    def set_loss(self, value: float) -> None:
        self._shown_loss = value

    def show_slow_ranks(self, description: str) -> None:
        self._slow_ranks = description

    def show_validation(self, epoch: int, results: dict[str, float]) -> None:
        numbers = (f"{name} {value:.4f}" for name, value in results.items())
        self._print(self._epoch_text(epoch), f"step {self._steps_text()}", *numbers)

    def show_epoch(self, epoch: int, results: dict[str, float]) -> None:
        numbers = (f"{name} {value:.4f}" for name, value in results.items())
        self._print(self._epoch_text(epoch), *numbers, self._speed_text(), self._slow_ranks)
        self._next_update_at = time.perf_counter() + self.interval_seconds

    @abstractmethod
    def _show_progress(self, epoch: int) -> None: ...

    def _print(self, *parts: str) -> None:
        for line in _wrap_parts(parts):
            self._print_line(line)

    def _print_line(self, text: str) -> None:
        self._console.print(text)

    def _epoch_text(self, epoch: int) -> str:
        return f"epoch {epoch}" if self._epochs is None else f"epoch {epoch}/{self._epochs}"

    def _steps_text(self) -> str:
        return f"{self._steps_done}" if self._steps is None else f"{self._steps_done}/{self._steps}"

    def _speed_text(self) -> str:
        return f"{self._samples / (time.perf_counter() - self._start_time):,.0f} samples/s"

    def _loss_text(self) -> str:
        return "" if self._shown_loss is None else f"loss {self._shown_loss:.4f}"


class _Lines(_TimedDisplay):
    def _show_progress(self, epoch: int) -> None:
        remaining_text = ""
        if self._steps is not None:
            seconds = (time.perf_counter() - self._start_time) / self._steps_done * (self._steps - self._steps_done)
            remaining_text = f"{max(0.0, seconds):.0f} s left"  # data may have more batches than its length
        self._print(
            self._epoch_text(epoch),
            f"step {self._steps_text()}",
            self._loss_text(),
            self._speed_text(),
            remaining_text,
            self._slow_ranks,
        )


class _Bar(_TimedDisplay):
    interval_seconds = _BAR_INTERVAL_SECONDS

    def __init__(self, console: Console, owned_terminal: TextIO | None = None) -> None:
        super().__init__(console)
        self._owned_terminal = owned_terminal
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),  # fills the remaining width
            TextColumn("{task.fields[count]}  {task.fields[loss]}  {task.fields[speed]}", markup=False),
            TimeRemainingColumn(compact=True),
        )
        # Refreshed in `count_step`, because a refresh thread would compete with the training loop for the GIL.
        self._bar = RichProgress(*columns, console=console, auto_refresh=False, transient=True, expand=True)
        self._task = TaskID(0)

    def start(self, steps: int | None, epochs: int | None) -> None:
        super().start(steps, epochs)
        self._task = self._bar.add_task("", total=steps, count="", loss="", speed="")

    def _show_progress(self, epoch: int) -> None:
        self._bar.update(
            self._task,
            description=self._epoch_text(epoch),
            completed=self._steps_done,
            count=self._steps_text(),
            loss=self._loss_text(),
            speed=self._speed_text(),
            refresh=True,
        )

    def show_slow_ranks(self, description: str) -> None:
        if description and description != self._slow_ranks:  # printed above the bar, which is too short for this text
            self._print(description)
        super().show_slow_ranks(description)

    def show_epoch(self, epoch: int, results: dict[str, float]) -> None:
        self._slow_ranks = ""
        super().show_epoch(epoch, results)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.stop()
        if self._owned_terminal is not None:
            with suppress(OSError):  # the terminal was closed
                self._owned_terminal.close()


def choose_display(style: ProgressStyle, rank: int) -> ProgressDisplay:
    """Return the display of `style` for `rank`. "auto" is a bar on a terminal, otherwise lines. Only rank 0 shows
    anything."""
    if rank != 0 or style == "off":
        return ProgressDisplay()
    console = output.plain_console(file=output.stderr, soft_wrap=True)
    if console.is_terminal or style == "lines":
        return _Bar(console) if style != "lines" else _Lines(console)
    terminal = _open_terminal_of_launch()
    if terminal is not None:
        return _Bar(output.plain_console(file=output.guard_stream(terminal), soft_wrap=True), terminal)
    return _Bar(console) if style == "bar" else _Lines(console)


def _open_terminal_of_launch() -> TextIO | None:
    """Return the terminal of `unitrain launch` if this process can open it, otherwise None."""
    path = environment.get_variable(environment.TERMINAL_VARIABLE)
    if path is None:
        return None
    try:
        file = Path(path).open("w", encoding="utf-8")  # noqa: SIM115
    except OSError:
        return None
    if file.isatty():
        return file
    file.close()
    return None


def _wrap_parts(parts: Sequence[str]) -> list[str]:
    """Join the parts into lines of at most 80 columns, indented after the first line. Longer parts are not split."""
    lines: list[str] = []
    for part in filter(None, parts):
        if lines and len(lines[-1]) + 2 + len(part) <= _MAX_COLUMNS:
            lines[-1] += f"  {part}"
        else:
            lines.append(f"  {part}" if lines else part)
    return lines
