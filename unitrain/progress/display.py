"""Show the progress of a run on rank 0: a bar on a terminal, otherwise lines, on standard error.

Launchers such as horovodrun read what the ranks print, so that rank 0's standard error is a pipe. `unitrain launch`
passes the name of its terminal on, and the bar is drawn there.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from unitrain.bootstrap import environment
from unitrain.config import ProgressStyle

_BAR_SECONDS = 0.1
_LINE_SECONDS = 10.0
_COLUMNS = 80


class Progress:
    """Shows nothing, and defines what can be shown. `step` is called in the hot loop, so it must cost very little."""

    def start(self, steps: int | None, epochs: int | None) -> None:
        """A run of `steps` more optimizer steps begins, None where nobody knows how many.

        `epochs` is its number of passes, None when steps decide.
        """

    def note(self, text: str) -> None:
        """Something to know about the run, said once."""

    def step(self, epoch: int, samples: int) -> None:
        """A step over `samples` of all ranks is done, in pass number `epoch`, counted from 1."""

    def loss(self, value: float) -> None:
        """The mean loss over ranks, as last worked out."""

    def slow(self, ranks: str) -> None:
        """Ranks that the others wait for, said in words, and shown until it is empty again."""

    def validated(self, epoch: int, results: dict[str, float]) -> None:
        """A validation within pass number `epoch` has these results."""

    def epoch(self, epoch: int, results: dict[str, float]) -> None:
        """A pass is over, with these results."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


class _Shown(Progress, ABC):
    """What bar and lines share: counting, and asking the clock rarely enough."""

    interval_seconds = _LINE_SECONDS

    def __init__(self, console: Console) -> None:
        self._console = console
        self._loss: float | None = None
        self._slow = ""

    def start(self, steps: int | None, epochs: int | None) -> None:
        self._steps, self._epochs = steps, epochs
        self._done = self._samples = 0
        self._started = time.perf_counter()
        self._due = self._started + self.interval_seconds

    def step(self, epoch: int, samples: int) -> None:
        self._done += 1
        self._samples += samples
        now = time.perf_counter()
        if now >= self._due:
            self._due = now + self.interval_seconds
            self._show(epoch)

    def note(self, text: str) -> None:
        self._console.print(text, highlight=False)

    def loss(self, value: float) -> None:
        self._loss = value

    def slow(self, ranks: str) -> None:
        self._slow = ranks

    def validated(self, epoch: int, results: dict[str, float]) -> None:
        numbers = (f"{name} {value:.4f}" for name, value in results.items())
        self._print(self._name(epoch), f"step {self._count()}", *numbers)

    def epoch(self, epoch: int, results: dict[str, float]) -> None:
        numbers = (f"{name} {value:.4f}" for name, value in results.items())
        self._print(self._name(epoch), *numbers, self._speed(), self._slow)
        self._due = time.perf_counter() + self.interval_seconds

    @abstractmethod
    def _show(self, epoch: int) -> None: ...

    def _print(self, *parts: str) -> None:
        for line in _folded(parts):
            self._console.print(line, highlight=False)

    def _name(self, epoch: int) -> str:
        return f"epoch {epoch}" if self._epochs is None else f"epoch {epoch}/{self._epochs}"

    def _count(self) -> str:
        return f"{self._done}" if self._steps is None else f"{self._done}/{self._steps}"

    def _speed(self) -> str:
        return f"{self._samples / (time.perf_counter() - self._started):,.0f} samples/s"

    def _loss_text(self) -> str:
        return "" if self._loss is None else f"loss {self._loss:.4f}"


class _Lines(_Shown):
    def _show(self, epoch: int) -> None:
        left = ""
        if self._steps is not None:
            seconds = (time.perf_counter() - self._started) / self._done * (self._steps - self._done)
            left = f"{seconds:.0f} s left"
        self._print(self._name(epoch), f"step {self._count()}", self._loss_text(), self._speed(), left, self._slow)


class _Bar(_Shown):
    interval_seconds = _BAR_SECONDS

    def __init__(self, console: Console, opened: TextIO | None = None) -> None:
        super().__init__(console)
        self._opened = opened
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),  # takes the space that the others leave
            TextColumn("{task.fields[count]}  {task.fields[loss]}  {task.fields[speed]}"),
            TimeRemainingColumn(compact=True),
        )
        # Refreshed from `step`: rich's own thread would take the interpreter's lock from the training loop.
        self._bar = RichProgress(*columns, console=console, auto_refresh=False, transient=True, expand=True)
        self._task = TaskID(0)

    def start(self, steps: int | None, epochs: int | None) -> None:
        super().start(steps, epochs)
        self._task = self._bar.add_task("", total=steps, count="", loss="", speed="")

    def _show(self, epoch: int) -> None:
        self._bar.update(
            self._task,
            description=self._name(epoch),
            completed=self._done,
            count=self._count(),
            loss=self._loss_text(),
            speed=self._speed(),
            refresh=True,
        )

    def slow(self, ranks: str) -> None:
        if ranks and ranks != self._slow:  # above the bar, which has no room for it
            self._print(ranks)
        super().slow(ranks)

    def epoch(self, epoch: int, results: dict[str, float]) -> None:
        self._slow = ""
        super().epoch(epoch, results)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
        if self._opened is not None:
            self._opened.close()


def choose_progress(style: ProgressStyle, rank: int) -> Progress:
    """Return what this rank shows: with "auto" a bar on a terminal and lines elsewhere; nothing except on rank 0."""
    if rank != 0 or style == "off":
        return Progress()
    console = Console(stderr=True, soft_wrap=True)
    if console.is_terminal or style == "lines":
        return _Bar(console) if style != "lines" else _Lines(console)
    terminal = _terminal_of_launch()
    if terminal is not None:
        return _Bar(Console(file=terminal, soft_wrap=True), terminal)
    return _Bar(console) if style == "bar" else _Lines(console)


def _terminal_of_launch() -> TextIO | None:
    """Return the terminal that `unitrain launch` was started on, on this host and by this user; None elsewhere."""
    path = environment.setting(environment.TERMINAL)
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


def _folded(parts: Sequence[str]) -> list[str]:
    """Return the parts as lines of at most 80 columns, those after the first indented; a longer part has its own."""
    lines: list[str] = []
    for part in filter(None, parts):
        if lines and len(lines[-1]) + 2 + len(part) <= _COLUMNS:
            lines[-1] += f"  {part}"
        else:
            lines.append(f"  {part}" if lines else part)
    return lines
