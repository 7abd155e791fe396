"""Showing how a run goes, on rank 0: a bar on a terminal, otherwise a line now and then. It goes to standard error."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from unitrain.config import ProgressStyle

_BAR_SECONDS = 0.1
_LINE_SECONDS = 10.0


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

    def epoch(self, epoch: int, results: dict[str, float]) -> None:
        numbers = (f"{name} {value:.4f}" for name, value in results.items())
        self._print(self._name(epoch), *numbers, self._speed(), self._slow)
        self._due = time.perf_counter() + self.interval_seconds

    @abstractmethod
    def _show(self, epoch: int) -> None: ...

    def _print(self, *parts: str) -> None:
        self._console.print("  ".join(part for part in parts if part), highlight=False)

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

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[count]}  {task.fields[loss]}  {task.fields[speed]}"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[slow]}"),
        )
        # Refreshed from `step`: rich's own thread would take the interpreter's lock from the training loop.
        self._bar = RichProgress(*columns, console=console, auto_refresh=False, transient=True)
        self._task = TaskID(0)

    def start(self, steps: int | None, epochs: int | None) -> None:
        super().start(steps, epochs)
        self._task = self._bar.add_task("", total=steps, count="", loss="", speed="", slow="")

    def _show(self, epoch: int) -> None:
        self._bar.update(
            self._task,
            description=self._name(epoch),
            completed=self._done,
            count=self._count(),
            loss=self._loss_text(),
            speed=self._speed(),
            slow=self._slow,
            refresh=True,
        )

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()


def choose_progress(style: ProgressStyle, rank: int) -> Progress:
    """Return what this rank shows: with "auto" a bar on a terminal and lines elsewhere; nothing except on rank 0."""
    if rank != 0 or style == "off":
        return Progress()
    console = Console(stderr=True, soft_wrap=True)
    bar = console.is_terminal if style == "auto" else style == "bar"
    return _Bar(console) if bar else _Lines(console)
