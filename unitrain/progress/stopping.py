"""Periodic synchronization of stop requests and step times, so that all ranks stop at the same step."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import torch
from typing_extensions import Self

from unitrain.backends.base import Communicator
from unitrain.errors import Preempted
from unitrain.monitoring import supervisor_client
from unitrain.progress.preemption import CommitGuard, PreemptionHandler
from unitrain.progress.rank_evidence import RankDetails, RankEvidence
from unitrain.progress.reporter import RunReporter
from unitrain.progress.stragglers import MAX_NAMED_RANKS, StragglerDetector
from unitrain.progress.timing import LoopTimer

# Approximate interval between two exchanges.
_INTERVAL_SECONDS = 2.0


class LoopInterruption:
    """Ends a loop over batches on all ranks after any rank has received a preemption signal.

    The numbers of batches of the ranks may differ. All ranks call `run`, and communicate about every two seconds.
    `is_interrupted` states whether the last loop ended because of a signal. It is the same on every rank.
    """

    def __init__(self, communicator: Communicator, preemption: PreemptionHandler) -> None:
        self._communicator, self._preemption = communicator, preemption
        self._batches = self._last_exchange_batches = 0
        self._interval_batches = 1
        self._last_exchange_time = 0.0
        self.is_interrupted = self._is_aligned = False

    @property
    def is_requested(self) -> bool:
        """Whether this rank has received a signal."""
        return self._preemption.received_signal is not None

    def run(self, loop: Callable[[], None], *, is_aligned: bool) -> None:
        """Call `loop`, which calls `check` after each batch, and wait until the loops of all ranks have ended.

        If `is_aligned`, the ranks already communicate before each batch, and exchange `is_requested`. Otherwise, if
        `loop` raises an Exception, this rank raises it after the loops of the other ranks.
        """
        self.is_interrupted, self._is_aligned = False, is_aligned
        self._batches = self._last_exchange_batches = 0
        self._last_exchange_time = time.perf_counter()
        try:
            loop()
        except Exception:
            if not is_aligned:  # otherwise the exchange before the next batch of the other ranks reports the error
                self._wait_for_other_ranks()
            raise
        self._wait_for_other_ranks()

    def check(self) -> bool:
        """Count a batch, and return whether the loop ends."""
        self._batches += 1
        if self._communicator.size == 1:
            self.is_interrupted = self.is_requested
        elif not self._is_aligned and self._batches - self._last_exchange_batches >= self._interval_batches:
            self._exchange(is_running=True)
        return self.is_interrupted

    def _wait_for_other_ranks(self) -> None:
        while self._communicator.size > 1 and self._exchange(is_running=False):
            pass

    def _exchange(self, *, is_running: bool) -> bool:
        """Exchange signals, and return whether the loop of any rank continues."""
        now = time.perf_counter()
        batches = self._batches - self._last_exchange_batches
        seconds_per_batch = (now - self._last_exchange_time) / batches if is_running else 0.0
        row = torch.tensor([is_running, self.is_requested, seconds_per_batch], dtype=torch.float64, device="cpu")
        any_running, any_requested, slowest = self._communicator.allreduce(row, "max").tolist()
        self._last_exchange_batches, self._last_exchange_time = self._batches, now
        if any_running:
            self._interval_batches = max(1, round(_INTERVAL_SECONDS / max(slowest, 1e-9)))
        self.is_interrupted = bool(any_requested)
        return bool(any_running)


class StopCoordinator:
    """Stops a `fit` call at the same step on every rank: on request, at the time limit, or after a signal.

    Use it as a context manager; `is_active` is True inside it. `reason` states why the ranks stop, and is None while
    they continue. `is_preempted` is True if they stop because of a signal. Ctrl-C does not interrupt the block of the
    context manager `committing`. All ranks call every method except `request`.
    """

    def __init__(self, communicator: Communicator, *, max_seconds: float | None, signals: Sequence[str]) -> None:
        self._communicator, self._max_seconds = communicator, max_seconds
        self._preemption = PreemptionHandler(signals)
        self.loop_interruption = LoopInterruption(communicator, self._preemption)
        self.committing = CommitGuard()
        self.reason: str | None = None
        self.is_preempted = self.is_active = False
        self._requested_reason: str | None = None
        self._start_time = 0.0
        self._interval_steps = self._next_exchange_step = 1
        # Completed steps and time at the last exchange, or at the start or resumption of training.
        self._timing_start: tuple[int, float] | None = None

    def __enter__(self) -> Self:
        self.is_active = True
        self.reason, self.is_preempted, self._requested_reason = None, False, None
        self._start_time = time.perf_counter()
        self._preemption.__enter__()
        self.committing.install()
        # Exchange after the first step, to measure its duration.
        self._interval_steps = self._next_exchange_step = 1
        self._timing_start = None
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.is_active = False
        self.committing.remove()
        self._preemption.__exit__(exc_type, error, traceback)
        if isinstance(error, Preempted):
            supervisor_client.report_preempted()

    @property
    def has_started_timing(self) -> bool:
        """Whether `exchange` or `start_timing` has been called since the start of `fit`."""
        return self._timing_start is not None

    def start_timing(self, step: int) -> None:
        """Start measuring step times after `step` completed steps.

        This does not reschedule the next exchange, because epochs may be shorter than the interval.
        """
        self._timing_start = (step, time.perf_counter())

    def request(self, reason: str) -> None:
        """Request a stop for `reason`. A request on one rank is sufficient."""
        self._requested_reason = reason

    def is_due(self, step: int) -> bool:
        """Return whether an exchange is due after `step` steps: about every two seconds on the slowest rank."""
        return step >= self._next_exchange_step

    def exchange(self, step: int, numbers: Sequence[float] = ()) -> list[list[float]]:
        """Set `reason` on all ranks if any rank requested a stop, reached the time limit, or received a signal.

        Return the `numbers` of every rank, in rank order. `numbers` must have the same length on every rank.
        """
        now = time.perf_counter()
        limit, received_signal = self._max_seconds, self._preemption.received_signal
        if limit is not None and now - self._start_time >= limit:
            self.request(f"the time limit max_seconds={limit:g} was reached")
        if received_signal is not None:
            self.request(f"{received_signal} was received by rank {self._communicator.rank}")
        before, start_time = self._timing_start or (step, now)
        trained = step > before  # otherwise there are no steps to measure
        seconds_per_step = (now - start_time) / (step - before) if trained else 0.0
        local_row = torch.tensor(
            [[self._requested_reason is not None, seconds_per_step, *numbers]], dtype=torch.float64, device="cpu"
        )
        rows = self._communicator.allgather(local_row.to(self._communicator.device)).tolist()
        if trained:
            slowest = max(seconds_per_step for _, seconds_per_step, *_ in rows)
            self._interval_steps = max(1, round(_INTERVAL_SECONDS / max(slowest, 1e-9)))
        self._timing_start = (step, now)
        # An exchange at the end of an epoch must not delay the next regular one.
        self._next_exchange_step = (
            step + self._interval_steps
            if step >= self._next_exchange_step
            else min(self._next_exchange_step, step + self._interval_steps)
        )
        if any(requested for requested, *_ in rows):
            reasons = self._communicator.allgather_object((self._requested_reason, received_signal is not None))
            self.reason = next(reason for reason, _ in reasons if reason is not None)
            self.is_preempted = any(preempted for _, preempted in reasons)
        return [numbers_of_rank for _, _, *numbers_of_rank in rows]


class RankSynchronizer:
    """Periodically synchronizes stop requests between all ranks, and detects slow ranks.

    Each call of `exchange`, a collective, is a sync point of the run. The Trainer calls it before the first step of
    `fit`, about every two seconds, every `log_every_n_steps` steps if this is set, and at the end of an epoch.
    """

    def __init__(
        self, communicator: Communicator, stopping: StopCoordinator, timer: LoopTimer, reporter: RunReporter
    ) -> None:
        self._communicator, self._stopping, self._timer, self._reporter = communicator, stopping, timer, reporter
        self._reset_detection()
        self.phase_seconds: list[list[float]] = []
        """Seconds per rank and phase (see `stragglers.TRAINING`) between the last two exchanges."""

    def start_timing(self, step: int) -> None:
        """Start measuring after `step` completed steps. Call it after `LoopTimer.start`."""
        if not self._stopping.has_started_timing:  # the steps of an earlier `fit` call may have been different
            self._reset_detection()
        self._stopping.start_timing(step)
        self._evidence.start()

    def exchange(self, step: int, numbers: Sequence[float] = ()) -> list[list[float]]:
        """Synchronize after `step` steps, and return the `numbers` of every rank. `numbers` must have the same length
        on every rank."""
        previous_reason = self._stopping.reason
        seconds, steps, evidence = self._evidence.take_recent_measurements()
        phases_end = len(seconds)
        evidence_end = phases_end + len(evidence)
        rows = self._stopping.exchange(step, [*seconds, *evidence, *numbers])
        self.phase_seconds = [row[:phases_end] for row in rows]
        observed_steps = self._detector.add(self.phase_seconds, steps, [row[phases_end:evidence_end] for row in rows])
        if observed_steps:
            self._end_observation(observed_steps)
        elif self._detector.is_empty:
            self._evidence.discard()
        self._reporter.report_slow_ranks(str(self._detector))
        if self._stopping.reason not in (None, previous_reason):
            self._reporter.report_stop(step, self._stopping.reason)
        return [row[evidence_end:] for row in rows]

    def slow_ranks(self) -> dict[str, Any]:
        """Return the slow ranks for a row of steps.jsonl; an empty dictionary if there are none."""
        return (
            {"slow": [straggler.to_row() for straggler in self._detector.stragglers]}
            if self._detector.stragglers
            else {}
        )

    def _reset_detection(self) -> None:
        self._evidence, self._detector = RankEvidence(self._timer), StragglerDetector()
        # Details of the reported ranks, by rank and cause.
        self._details: dict[tuple[int, str | None], RankDetails] = {}

    def _end_observation(self, steps: int) -> None:
        """Store this rank's figures, and exchange the details of slow ranks that were not reported before.

        All ranks have the same stragglers, so all of them take part in the exchange.
        """
        detector, own_rank = self._detector, self._communicator.rank
        self._evidence.end_observation(
            steps, is_any_suspected=bool(detector.suspected_ranks), is_suspected=own_rank in detector.suspected_ranks
        )
        named_stragglers = detector.stragglers[:MAX_NAMED_RANKS]
        previous_details, self._details = self._details, {}
        for straggler in named_stragglers:
            key = (straggler.rank, straggler.cause)
            is_new = key not in previous_details
            if is_new:
                own_details = self._evidence.describe(straggler) if own_rank == straggler.rank else None
                self._details[key] = self._communicator.broadcast_object(own_details, root=straggler.rank)
            else:
                self._details[key] = previous_details[key]
            reported = detector.set_details(straggler, *self._details[key])
            if is_new and reported.explanation:
                self._reporter.show_message(f"{reported}. {reported.explanation}")
