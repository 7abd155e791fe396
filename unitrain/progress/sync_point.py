"""Periodic exchange between ranks of stop requests, step times and other numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from unitrain.progress.reporter import RunReporter
from unitrain.progress.stopping import StopCoordinator
from unitrain.progress.stragglers import StragglerDetector
from unitrain.progress.timing import LoopTimer


class SyncPoint:
    """One collective at which the ranks agree whether to stop, and detect slow ranks. All ranks call `exchange`."""

    def __init__(self, stopping: StopCoordinator, timer: LoopTimer, reporter: RunReporter) -> None:
        self._stopping, self._timer, self._reporter = stopping, timer, reporter
        self._detector = StragglerDetector()

    def exchange(self, step: int, numbers: Sequence[float] = ()) -> list[list[float]]:
        """Synchronize after `step` steps, and return the `numbers` of every rank. All ranks pass the same number of
        them."""
        previous_reason = self._stopping.reason
        seconds, steps = self._timer.take_recent_seconds()
        ranks = self._stopping.exchange(step, [*seconds, *numbers])
        self._detector.add([row[: len(seconds)] for row in ranks], steps)
        self._reporter.report_slow_ranks(str(self._detector))
        if self._stopping.reason not in (None, previous_reason):
            self._reporter.report_stop(step, self._stopping.reason)
        return [row[len(seconds) :] for row in ranks]

    def slow_ranks(self) -> dict[str, Any]:
        """Return the slow ranks for the row of a step in the history; empty if there are none."""
        return {"slow": [asdict(one) for one in self._detector.slow]} if self._detector.slow else {}
