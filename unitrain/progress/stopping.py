"""Stopping a run before its end, at the same step on every rank."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import torch

from unitrain.backends.base import Communicator
from unitrain.errors import Preempted
from unitrain.monitoring import supervisor_client
from unitrain.progress.preemption import Preemption

# How long a request may go unheard on the other ranks.
_AGREE_SECONDS = 2.0


class Stopping:
    """Collects this rank's reasons to stop, and agrees with the others. All ranks use it alike, one call of `fit` long.

    `reason` is what was agreed on, None while the run goes on; `preempted` is whether a signal was it.
    """

    def __init__(self, communicator: Communicator, *, max_seconds: float | None, signals: Sequence[str]) -> None:
        self._communicator, self._max_seconds = communicator, max_seconds
        self._preemption = Preemption(signals)
        self.reason: str | None = None
        self.preempted = False
        self._requested: str | None = None
        self._started = 0.0
        self._interval = self._next = 1
        # When training began or was agreed on last, and the steps that were done by then.
        self._since: tuple[int, float] | None = None

    def __enter__(self) -> Self:
        self.reason, self.preempted, self._requested = None, False, None
        self._started = time.perf_counter()
        self._preemption.__enter__()
        self._interval, self._next, self._since = 1, 1, None  # one step tells how long a step takes
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._preemption.__exit__(kind, error, trace)
        if isinstance(error, Preempted):
            supervisor_client.report_preempted()

    def begin(self, step: int) -> None:
        """Training begins, or continues after something else, with `step` steps done.

        The step at which `due` is next stays: epochs may be shorter than the interval.
        """
        self._since = (step, time.perf_counter())

    def request(self, reason: str) -> None:
        """Ask for the end, on this rank."""
        self._requested = reason

    def due(self, step: int) -> bool:
        """Whether it is time to `agree`, now that `step` steps are done: about every two seconds of the slowest rank,
        which the ranks work out as they agree."""
        return step >= self._next

    def agree(self, step: int, beside: Sequence[float] = ()) -> list[list[float]]:
        """Stop on every rank where any has asked for it, has no time left, or has had a signal. All ranks call it.

        Numbers that each rank wants to tell on the occasion go `beside`, as many everywhere. Return those of every
        rank.
        """
        now = time.perf_counter()
        limit, signalled = self._max_seconds, self._preemption.received
        if limit is not None and now - self._started >= limit:
            self.request(f"max_seconds={limit:g} are over")
        if signalled is not None:
            self.request(f"{signalled} came to rank {self._communicator.rank}")
        before, then = self._since or (step, now)
        trained = step > before  # otherwise nothing new is known of how long a step takes
        pace = (now - then) / (step - before) if trained else 0.0
        here = torch.tensor([[self._requested is not None, pace, *beside]], dtype=torch.float64)
        ranks = self._communicator.allgather(here.to(self._communicator.device)).tolist()
        if trained:
            slowest = max(pace for _, pace, *_ in ranks)
            self._interval = max(1, round(_AGREE_SECONDS / max(slowest, 1e-9)))
        self._since = (step, now)
        # Between two epochs the ranks agree before it is due, which must not delay the next look at the loss.
        self._next = step + self._interval if step >= self._next else min(self._next, step + self._interval)
        if any(asked for asked, *_ in ranks):
            reasons = self._communicator.allgather_object((self._requested, signalled is not None))
            self.reason = next(reason for reason, _ in reasons if reason is not None)
            self.preempted = any(preempted for _, preempted in reasons)
        return [told for _, _, *told in ranks]
