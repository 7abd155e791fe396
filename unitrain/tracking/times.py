"""Where the time of an epoch goes, on every rank: into data, computing, waiting for the other ranks, and so on."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor
from torch.autograd import Variable

from unitrain.backends.base import Communicator

PARTS = ("data", "compute", "wait", "update", "validation", "checkpoint")
# A step that is measured takes some ten microseconds more, and on a GPU the host does not run ahead of it: one step in
# so many, and so many seconds apart, is too rare to be felt.
_INTERVAL_STEPS, _INTERVAL_SECONDS = 20, 0.2

ItemT = TypeVar("ItemT")


class Times:
    """The training loop's stopwatch. All ranks use it alike, and `gather` is all that communicates.

    `data` is the wait for the next batch, taken in every step; where a GPU works meanwhile, it is only what that is
    kept waiting. From time to time a step is measured closely, and what training takes beside data is divided as those
    steps were: `compute` is forward and backward; `wait` lasts from the end of this rank's own backward until the
    gradients are those of all ranks, so it is the communication that backward does not hide, and the lead over slower
    ranks; `update` is what is then made of the gradients.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        device = communicator.device
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        # The first two steps tell nothing of the others: kernels are chosen, and DDP agrees on its buckets.
        self._measuring, self._due, self._unmeasured = False, 0.0, _INTERVAL_STEPS - 2
        self._step_seconds: dict[str, float] = {}
        self.start()

    def start(self) -> None:
        """Training begins, or goes on after something else."""
        self._started = self._fetched = self._asked = time.perf_counter()
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._laps: dict[str, list[float]] = {}
        self._steps = self._samples = 0

    def batches(self, batches: Iterable[ItemT]) -> Iterator[ItemT]:
        """Yield from `batches`, which begin to be made with `start`."""
        waited_since = self._started
        for batch in batches:
            self._fetched = time.perf_counter()
            self._seconds["data"] += self._fetched - waited_since
            if self._measuring:
                self._begin_lap()
            yield batch
            waited_since = time.perf_counter()
        self._seconds["data"] += time.perf_counter() - waited_since  # until workers have come to an end

    def watched(self, loss: Tensor) -> Tensor:
        """Return `loss`; in a step that is measured, the backward from it is."""
        if self._measuring and loss.requires_grad:
            loss.register_hook(self._watch_backward)
        return loss

    def step(self, samples: int) -> None:
        """An optimizer step over `samples` of all ranks is done."""
        self._steps += 1
        self._samples += samples
        self._unmeasured += 1
        if self._measuring:
            self._lap("update")
            self._unmeasured, self._due = 0, self._fetched + _INTERVAL_SECONDS
        self._measuring = self._unmeasured >= _INTERVAL_STEPS and self._fetched >= self._due

    def samples_per_second(self) -> float:
        """Return how fast it went since it was last asked for, or since `start`."""
        asked, self._asked = self._asked, time.perf_counter()
        samples, self._samples = self._samples, 0
        return samples / (self._asked - asked)

    def stop(self) -> float:
        """Training pauses until the next `start`; return the seconds that it took."""
        seconds = time.perf_counter() - self._started
        if self._laps:  # an epoch without is divided as the one before it was
            updates = len(self._laps["update"])
            self._step_seconds = {part: sum(laps) / updates for part, laps in self._laps.items()}
        step = sum(self._step_seconds.values())
        if self._stream is not None:  # which fetching goes on beside
            self._seconds["data"] = min(self._seconds["data"], max(0.0, seconds - self._steps * step))
        rest = max(0.0, seconds - self._seconds["data"] - self._seconds["checkpoint"])
        for part, measured in (self._step_seconds or {"compute": 1.0}).items():
            self._seconds[part] = rest * measured / (step or 1.0)
        return seconds

    @contextmanager
    def spent_on(self, part: str) -> Iterator[None]:
        """Count what is done inside it as `part`."""
        started = time.perf_counter()
        yield
        self._seconds[part] += time.perf_counter() - started

    def gather(self) -> dict[str, list[float]]:
        """Return "data_seconds" and so on for every one of PARTS since `start`, with a number for each rank."""
        here = torch.tensor([[self._seconds[part] for part in PARTS]], dtype=torch.float64)
        everywhere = self._communicator.allgather(here.to(self._communicator.device)).T.tolist()
        return {
            f"{part}_seconds": [round(seconds, 6) for seconds in ranks]
            for part, ranks in zip(PARTS, everywhere, strict=True)
        }

    def _watch_backward(self, gradient: Tensor) -> None:
        # The engine calls back when the graph is done, in the order in which it was asked to. What makes gradients
        # global asks later than this, as it follows from them: one callback comes before it, and another one, asked for
        # in that, behind it.
        Variable._execution_engine.queue_callback(self._backward_is_done)

    def _backward_is_done(self) -> None:
        self._lap("compute")
        Variable._execution_engine.queue_callback(lambda: self._lap("wait"))

    def _lap(self, part: str) -> None:
        before, now = self._lap_began, self._begin_lap()
        self._laps.setdefault(part, []).append(now - before)

    def _begin_lap(self) -> float:
        if self._stream is not None:
            self._stream.synchronize()
        self._lap_began = time.perf_counter()
        return self._lap_began
