"""Time per rank and phase of the training loop: data, computation, waiting for other ranks, update, validation and
checkpoints.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from statistics import fmean, median
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from unitrain.backends.base import Communicator
from unitrain.progress.stragglers import TRAINING
from unitrain.torch_compat import queue_backward_callback

PHASES = (*TRAINING, "validation", "checkpoint")
_DATA, *_MEASURED = TRAINING
# Measuring a step takes about 10 µs and, on GPUs, requires host-device synchronizations, so the host does not load the
# next batch while the GPU computes. The cost is negligible, because at most one step per 0.2 s is measured, and at most
# every second step (on GPUs, every 20th).
_MIN_INTERVAL_SECONDS, _MIN_INTERVAL_STEPS, _MIN_INTERVAL_STEPS_ON_GPU = 0.2, 2, 20
_RECENT_STEPS = 5

ItemT = TypeVar("ItemT")
_Events = list[tuple[torch.cuda.Event, torch.cuda.Event]]


class _Reading(NamedTuple):
    """The counters at the last call of `take_recent_seconds`."""

    time: float
    steps: int
    data: float
    outside_steps: float


class RecentTimes(NamedTuple):
    """Seconds in the interval that the last `take_recent_seconds` covered.

    `elapsed` is the time of all steps. `forward`, the forward pass, and `copy`, host-to-device copies, are extrapolated
    from the last measured steps. `unexplained` is the part of `elapsed` that belongs to no phase.
    """

    elapsed: float = 0.0
    forward: float = 0.0
    copy: float = 0.0
    unexplained: float = 0.0


class LoopTimer:
    """Measures the phases of the training loop on each rank. Only `gather` communicates.

    `data` is the time that the loop (or the GPU) waits for batches; it is measured in every step. The other phases are
    measured in sampled steps, and the remaining time is divided in proportion to the measurements. `compute` is the
    forward and backward pass. `wait` is the time from the end of this rank's backward pass until the gradients are
    reduced: exposed communication, and waiting for slower ranks. `update` is clipping and the optimizer step. Time in
    which an earlier collective of the step, such as that of sync_batch_norm or of an iterable dataset, waits for slower
    ranks counts as `compute` or `data`.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        device = communicator.device
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        # The first two steps are not representative: kernels are selected, and DDP rebuilds its buckets.
        self._is_measuring, self._next_measurement_time = False, 0.0
        self._steps_since_measurement = self._min_interval_steps() - 2
        self._step_seconds: dict[str, float] = {}
        self._lap_start_time = 0.0
        self._recent_steps: deque[dict[str, float]] = deque(maxlen=_RECENT_STEPS)
        # Events before and after each copy of the current step, and of the last measured steps.
        self._step_copies: _Events = []
        self._recent_copies: deque[_Events] = deque(maxlen=_RECENT_STEPS)
        self.recent = RecentTimes()
        self._samples = 0
        self.start()

    def start(self) -> None:
        """Start or resume measuring."""
        self._start_time = self._last_fetch_time = time.perf_counter()
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._measured_steps: list[dict[str, float]] = []
        self._laps: dict[str, float] = {}
        self._steps = 0
        self._stop_time: float | None = None
        self._is_outside_steps = False
        self._last_reading = _Reading(self._start_time, 0, 0.0, 0.0)

    def iterate(self, batches: Iterable[ItemT]) -> Iterator[ItemT]:
        """Yield from `batches`, and measure the fetch time of each batch. The fetch time of the first batch starts at
        the last call of `start`."""
        waited_since = self._start_time
        for batch in batches:
            self._last_fetch_time = time.perf_counter()
            self._seconds["data"] += self._last_fetch_time - waited_since
            if self._is_measuring:
                self._start_lap()
            yield batch
            waited_since = time.perf_counter()
        self._seconds["data"] += time.perf_counter() - waited_since  # includes the termination of the workers

    def measure_backward(self, loss: Tensor) -> Tensor:
        """Return `loss`. If this step is measured, first measure the forward pass, and register a hook that measures
        the backward pass."""
        if self._is_measuring and loss.requires_grad:
            if self._stream is not None:
                self._stream.synchronize()
            self._laps["forward"] = self._laps.get("forward", 0.0) + time.perf_counter() - self._lap_start_time
            loss.register_hook(self._queue_end_of_compute)
        return loss

    def end_step(self, samples: int) -> None:
        """End a step with `samples` samples over all ranks."""
        self._steps += 1
        self._samples += samples
        self._steps_since_measurement += 1
        if self._is_measuring:
            self._end_lap("update")
            self._measured_steps.append(self._laps)
            self._recent_steps.append(self._laps)
            self._recent_copies.append(self._step_copies)
            self._laps, self._step_copies = {}, []
            self._steps_since_measurement = 0
            self._next_measurement_time = self._last_fetch_time + _MIN_INTERVAL_SECONDS
        self._is_measuring = (
            self._steps_since_measurement >= self._min_interval_steps()
            and self._last_fetch_time >= self._next_measurement_time
        )

    def take_samples(self) -> int:
        """Return the number of samples over all ranks since the last call, including steps of earlier epochs."""
        samples, self._samples = self._samples, 0
        return samples

    def take_recent_seconds(self) -> tuple[list[float], int]:
        """Return this rank's seconds per phase of TRAINING since the last call, and the number of steps.

        All phases except `data` are extrapolated from the median of the last measured steps, so that a single outlier
        has no effect. They are zero before the first measured step. If the steps have become faster since these were
        measured, the phases are scaled so that their sum is not longer than the steps took. `recent` describes the
        same interval.
        """
        last_reading = self._last_reading
        self._last_reading = now = _Reading(
            self._stop_time or time.perf_counter(),
            self._steps,
            self._seconds["data"],
            self._seconds["checkpoint"] + self._seconds["validation"],
        )
        steps = now.steps - last_reading.steps
        recent = self._recent_steps or [dict[str, float]()]
        seconds = [steps * median(laps.get(phase, 0.0) for laps in recent) for phase in _MEASURED]
        data = max(0.0, now.data - last_reading.data)
        if self._stream is not None:
            data = min(data, max(0.0, now.time - last_reading.time - sum(seconds)))
        elapsed = now.time - last_reading.time - (now.outside_steps - last_reading.outside_steps)
        scale = min(1.0, max(0.0, elapsed - data) / (sum(seconds) or 1.0))
        seconds = [scale * phase for phase in seconds]
        self.recent = RecentTimes(
            elapsed=elapsed,
            forward=scale * steps * median(laps.get("forward", 0.0) for laps in recent),
            copy=steps * self._median_copy_seconds(),
            unexplained=max(0.0, elapsed - data - sum(seconds)) if self._recent_steps else 0.0,
        )
        return [data, *seconds], steps

    def stop(self) -> float:
        """Pause measuring until the next `start`, and return the seconds since the last `start`."""
        self._stop_time = time.perf_counter()
        seconds = self._stop_time - self._start_time
        if self._measured_steps:  # otherwise use the proportions of the preceding epoch
            self._step_seconds = {
                phase: fmean(laps.get(phase, 0.0) for laps in self._measured_steps) for phase in _MEASURED
            }
        step = sum(self._step_seconds.values())
        if self._stream is not None:  # fetching overlaps with computation on the GPU
            self._seconds["data"] = min(self._seconds["data"], max(0.0, seconds - self._steps * step))
        outside_steps = self._seconds["checkpoint"] + self._seconds["validation"]
        step_seconds = max(0.0, seconds - self._seconds["data"] - outside_steps)
        for phase, measured in (self._step_seconds or {"compute": 1.0}).items():
            self._seconds[phase] = step_seconds * measured / (step or 1.0)
        return seconds

    @contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        """Context manager that adds its duration to `phase`."""
        start_time = time.perf_counter()
        self._is_outside_steps = True
        yield
        self._is_outside_steps = False
        self._seconds[phase] += time.perf_counter() - start_time

    @contextmanager
    def measure_fetching(self) -> Iterator[None]:
        """Context manager that adds its duration to `data` instead of the current phase of the step."""
        start_time = time.perf_counter()
        yield
        seconds = time.perf_counter() - start_time
        self._seconds["data"] += seconds
        self._lap_start_time += seconds

    @contextmanager
    def measure_copying(self) -> Iterator[None]:
        """Context manager that measures the host-to-device copies that its block enqueues in the current stream. It
        does nothing on CPUs and in steps that are not measured."""
        if not self._is_measuring or self._stream is None or self._is_outside_steps:
            yield
            return
        start_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start_event.record()
        yield
        end_event.record()
        self._step_copies.append((start_event, end_event))

    def gather(self) -> dict[str, list[float]]:
        """Return the seconds per phase of PHASES between `start` and `stop`, under keys such as "data_seconds", in
        lists with one value per rank. All ranks must call this method, after `stop`."""
        local_seconds = torch.tensor([[self._seconds[phase] for phase in PHASES]], dtype=torch.float64, device="cpu")
        seconds_by_phase = self._communicator.allgather(local_seconds.to(self._communicator.device)).T.tolist()
        return {
            f"{phase}_seconds": [round(seconds, 6) for seconds in ranks]
            for phase, ranks in zip(PHASES, seconds_by_phase, strict=True)
        }

    def _min_interval_steps(self) -> int:
        return _MIN_INTERVAL_STEPS if self._stream is None else _MIN_INTERVAL_STEPS_ON_GPU

    def _median_copy_seconds(self) -> float:
        """Return the total duration of the copies of a step: the median over recent measured steps whose copies have
        completed."""
        # `query` does not wait for the GPU.
        milliseconds: list[float] = [
            sum(start_event.elapsed_time(end_event) for start_event, end_event in copies)
            for copies in self._recent_copies
            if all(end_event.query() for _, end_event in copies)
        ]
        return median(milliseconds) / 1000 if milliseconds else 0.0

    def _queue_end_of_compute(self, gradient: Tensor) -> None:
        # After the backward pass, the autograd engine runs callbacks in the order in which they were queued. The
        # callback that waits for the reduction is queued after `_end_compute`, and the callback that `_end_compute`
        # queues runs last.
        queue_backward_callback(self._end_compute)

    def _end_compute(self) -> None:
        self._end_lap("compute")
        queue_backward_callback(lambda: self._end_lap("wait"))

    def _end_lap(self, phase: str) -> None:
        before, now = self._lap_start_time, self._start_lap()
        self._laps[phase] = self._laps.get(phase, 0.0) + now - before

    def _start_lap(self) -> float:
        if self._stream is not None:
            self._stream.synchronize()
        self._lap_start_time = time.perf_counter()
        return self._lap_start_time
