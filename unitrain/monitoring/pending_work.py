"""Work that must be done within the timeout, in the order in which it was begun."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable


class Expectation:
    """Work begun by the training thread; `describe` returns who is missing if it is not done in time.

    The training thread may replace `is_done`. The watchdog thread calls it, so it must not wait.
    """

    __slots__ = ("describe", "is_done")

    def __init__(self, is_done: Callable[[], bool], describe: Callable[[], str]) -> None:
        self.is_done, self.describe = is_done, describe

    def end(self) -> None:
        """Expect it no longer."""
        self.is_done = _yes


class Expectations:
    """The work that is not done yet. The training thread adds to it, and the watchdog thread asks what is overdue.

    The host may run ahead of a GPU by several backwards. The time of each begins when the watchdog finds that all work
    before it is done, so work that is added later does not move the deadline of work that never ends.
    """

    def __init__(self, patience_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._patience_seconds, self._clock = patience_seconds, clock
        self._added: deque[Expectation] = deque()
        self._oldest: Expectation | None = None
        self._since = 0.0

    def add(self, is_done: Callable[[], bool], describe: Callable[[], str]) -> Expectation:
        """Expect work until its `is_done` returns true. Only the training thread calls this."""
        while self._added and self._added[0].is_done():
            self._added.popleft()
        expectation = Expectation(is_done, describe)
        self._added.append(expectation)
        return expectation

    def overdue(self) -> Expectation | None:
        """Return the oldest work if it has not been done in time. Only the watchdog thread calls this."""
        oldest = next((expectation for expectation in self._added.copy() if not expectation.is_done()), None)
        if oldest is not self._oldest:
            self._oldest, self._since = oldest, self._clock()
        if oldest is None or self._clock() <= self._since + self._patience_seconds:
            return None
        return oldest


def _yes() -> bool:
    return True
