"""Periodic exchange between ranks of stop requests and step times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from unitrain.checkpoint.run_state import Run
from unitrain.progress.stragglers import Stragglers
from unitrain.progress.timing import Times
from unitrain.progress.tracker import Tracker


class SyncPoint:
    """Lets the ranks of a run agree on whether to stop, and hear which of them are slow. All ranks use it alike."""

    def __init__(self, run: Run, times: Times, tracker: Tracker) -> None:
        self._run, self._times, self._tracker = run, times, tracker
        self._stragglers = Stragglers()

    def hold(self, beside: Sequence[float] = ()) -> list[list[float]]:
        """Agree and hear; return what each rank tells `beside`, as many numbers everywhere."""
        stopping, step = self._run.stopping, self._run.progress.step
        known = stopping.reason
        seconds, steps = self._times.lately()
        ranks = stopping.agree(step, beside=[*seconds, *beside])
        self._stragglers.hear([told[: len(seconds)] for told in ranks], steps)
        self._tracker.slow(str(self._stragglers))
        if stopping.reason not in (None, known):
            self._tracker.stopped(step, stopping.reason)
        return [told[len(seconds) :] for told in ranks]

    def slow(self) -> dict[str, Any]:
        """Return which ranks are slow, for the record of a step; empty if none is."""
        return {"slow": [asdict(one) for one in self._stragglers.slow]} if self._stragglers.slow else {}
