"""Where the time of an epoch goes, on every rank: into data, computing, waiting for the other ranks, and so on."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from statistics import fmean, median
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd import Variable

from unitrain.backends.base import Communicator
from unitrain.progress.stragglers import TRAINING

PARTS = (*TRAINING, "validation", "checkpoint")
_DATA, *_MEASURED = TRAINING
# A step that is measured takes some ten microseconds more, and on a GPU the host does not run ahead of it: one step in
# so many, and so many seconds apart, is too rare to be felt.
_INTERVAL_STEPS, _INTERVAL_SECONDS = 20, 0.2
_RECENT = 5

ItemT = TypeVar("ItemT")


class _Told(NamedTuple):
    """What had been counted when it was last asked for."""

    at: float
    steps: int
    data: float


class Times:
    """The training loop's stopwatch. All ranks use it alike, and `gather` is all that communicates.

    `data` is the wait for the next batch, taken in every step; where a GPU works meanwhile, it is only what that is
    kept waiting. From time to time a step is measured closely, and what training takes beside data is divided as those
    steps were: `compute` is forward and backward; `wait` lasts from the end of this rank's own backward until the
    gradients are those of all ranks, so it is the communication that backward does not hide, and the lead over slower
    ranks; `update` is what is then made of the gradients. Where ranks meet before backward, as with sync_batch_norm and
    to agree on the batches of streams, the wait for slower ranks is in what they meet in.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        device = communicator.device
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        # The first two steps tell nothing of the others: kernels are chosen, and DDP agrees on its buckets.
        self._measuring, self._due, self._unmeasured = False, 0.0, _INTERVAL_STEPS - 2
        self._step_seconds: dict[str, float] = {}
        self._lap_began = 0.0
        self._recent: deque[dict[str, float]] = deque(maxlen=_RECENT)
        self.start()

    def start(self) -> None:
        """Training begins, or goes on after something else."""
        self._started = self._fetched = self._asked = time.perf_counter()
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._measured: list[dict[str, float]] = []
        self._laps: dict[str, float] = {}
        self._steps = self._samples = 0
        self._stopped: float | None = None
        self._told = _Told(self._started, 0, 0.0)

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
            self._measured.append(self._laps)
            self._recent.append(self._laps)
            self._laps = {}
            self._unmeasured, self._due = 0, self._fetched + _INTERVAL_SECONDS
        self._measuring = self._unmeasured >= _INTERVAL_STEPS and self._fetched >= self._due

    def samples_per_second(self) -> float:
        """Return how fast it went since it was last asked for, or since `start`."""
        asked, self._asked = self._asked, time.perf_counter()
        samples, self._samples = self._samples, 0
        return samples / (self._asked - asked)

    def lately(self) -> tuple[list[float], int]:
        """Return this rank's seconds by part of TRAINING, and in how many steps, since last asked for, or `start`.

        All but data are as in the median of the last few measured steps, so that one which was disturbed does not
        count; before the first one they are zero.
        """
        told = self._told
        self._told = now = _Told(self._stopped or time.perf_counter(), self._steps, self._seconds["data"])
        steps = now.steps - told.steps
        recent = self._recent or [dict[str, float]()]
        seconds = [steps * median(laps.get(part, 0.0) for laps in recent) for part in _MEASURED]
        data = max(0.0, now.data - told.data)
        if self._stream is not None:
            data = min(data, max(0.0, now.at - told.at - sum(seconds)))
        return [data, *seconds], steps

    def stop(self) -> float:
        """Training pauses until the next `start`; return the seconds that it took."""
        self._stopped = time.perf_counter()
        seconds = self._stopped - self._started
        if self._measured:  # an epoch without is divided as the one before it was
            self._step_seconds = {part: fmean(laps.get(part, 0.0) for laps in self._measured) for part in _MEASURED}
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

    @contextmanager
    def fetching(self) -> Iterator[None]:
        """Count what is done inside it as data, wherever in a step it is done."""
        started = time.perf_counter()
        yield
        seconds = time.perf_counter() - started
        self._seconds["data"] += seconds
        self._lap_began += seconds

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
        self._laps[part] = self._laps.get(part, 0.0) + now - before

    def _begin_lap(self) -> float:
        if self._stream is not None:
            self._stream.synchronize()
        self._lap_began = time.perf_counter()
        return self._lap_began
