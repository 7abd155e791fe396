"""Time limits for waits of the training thread, checked by the watchdog."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from unitrain.monitoring.failure_store import Shutdown
from unitrain.monitoring.flight_recorder import Operation

# Time for which a rank may wait in a collective after the exit of rank 0's process, which serves the store. Without the
# store, it is unknown whether rank 0 took part in that collective.
_UNKNOWN_PARTICIPATION_SECONDS = 30.0


class Deadline:
    """A deadline for work that the training thread has started. `describe` returns the error text of a timeout.

    The watchdog thread calls `is_done`, so it must not block. The training thread may replace `is_done`.
    """

    __slots__ = ("describe", "is_done")

    def __init__(self, is_done: Callable[[], bool], describe: Callable[[], str]) -> None:
        self.is_done, self.describe = is_done, describe

    def is_surely_done(self) -> bool:
        """Return whether the work is done. If `is_done` raises an exception, as after an error of the GPU or during the
        capture of a CUDA graph, the work counts as unfinished."""
        try:
            return self.is_done()
        except Exception:
            return False

    def cancel(self) -> None:
        """Cancel the deadline, as if the work were done."""
        self.is_done = _always_true


class Deadlines:
    """Deadlines of unfinished work. The training thread adds deadlines, and the watchdog thread checks them.

    The host may be several backward passes ahead of a GPU. The timer of a deadline starts when the watchdog detects
    that all earlier work is done, so later work does not extend the deadline of work that never completes.
    """

    def __init__(self, timeout_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._timeout_seconds, self._clock = timeout_seconds, clock
        self._deadlines: deque[Deadline] = deque()
        self._oldest: Deadline | None = None
        self._start_time = 0.0

    def add(self, is_done: Callable[[], bool], describe: Callable[[], str]) -> Deadline:
        """Add a deadline for work that is done when `is_done` returns true. Only the training thread calls it."""
        while self._deadlines and self._deadlines[0].is_surely_done():
            self._deadlines.popleft()
        deadline = Deadline(is_done, describe)
        self._deadlines.append(deadline)
        return deadline

    def find_expired(self) -> Deadline | None:
        """Return the oldest deadline with unfinished work if it has expired, else None. Only the watchdog thread calls
        it."""
        oldest = next((deadline for deadline in self._deadlines.copy() if not deadline.is_surely_done()), None)
        if oldest is not self._oldest:
            self._oldest, self._start_time = oldest, self._clock()
        if oldest is None or self._clock() <= self._start_time + self._timeout_seconds:
            return None
        return oldest


class ShutdownWaitDetector:
    """Detects an operation in which this rank waits for a rank that has shut down without starting the operation.

    Such a wait never ends, and not every transport detects it. `period_seconds` is the time between two checks.
    Messages that were in flight at the first check have arrived by the second.
    """

    def __init__(self, period_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._period_seconds, self._clock = period_seconds, clock
        self._wait_number = -1
        self._start_time = 0.0

    def is_endless(self, shutdown: Shutdown | None, wait: tuple[int, Operation | None] | None) -> bool:
        """Return whether `wait`, the current wait of this rank's main thread, can never end.

        `shutdown` is the first shutdown of another rank, if any. `wait` is a value of `FlightRecorder.wait`.
        """
        if shutdown is None or wait is None or (operation := wait[1]) is None:
            self._wait_number = -1
            return False
        if self._wait_number != wait[0]:
            self._wait_number, self._start_time = wait[0], self._clock()
        numbers = shutdown.latest_numbers
        if operation.ranks and shutdown.rank not in operation.ranks:
            return False
        if numbers is not None and numbers.get(operation.sequence, -1) >= operation.number:
            return False  # that rank took part in the operation
        timeout_seconds = _UNKNOWN_PARTICIPATION_SECONDS if numbers is None else self._period_seconds
        return self._clock() >= self._start_time + timeout_seconds


class DataDeadline:
    """Time limit for the main thread's waits for batches from DataLoader workers.

    This limit also detects that every rank waits for a hung worker, which timeouts of collectives do not detect.
    """

    def __init__(self, timeout_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._timeout_seconds, self._clock = timeout_seconds, clock
        self._waiting_for: tuple[object, ...] | None = None
        self._start_time = 0.0

    def has_expired(self, batch: tuple[int, int] | None, operation_count: int) -> bool:
        """Return whether the main thread has waited for the same `batch` longer than the timeout. Only the watchdog
        thread calls it.

        `batch` is None if the main thread does not wait. `operation_count`, the number of collectives and backward
        passes, distinguishes batches of different epochs.
        """
        waiting_for = None if batch is None else (*batch, operation_count)
        if waiting_for is None or waiting_for != self._waiting_for:
            self._waiting_for, self._start_time = waiting_for, self._clock()
        return waiting_for is not None and self._clock() > self._start_time + self._timeout_seconds


def _always_true() -> bool:
    return True
