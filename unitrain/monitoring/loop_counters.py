"""Counters of what the training loop has done, compared between ranks in the background."""

from __future__ import annotations

import json
from typing import NamedTuple

from unitrain.bootstrap.messages import MessageStore

# As many backwards as a fast loop runs between two comparisons, with a margin.
_KEPT = 4096
_KEY = "loop"


class Counts(NamedTuple):
    """The totals of one rank at the end of its backward number `backwards`; `unused` forwards reached no backward."""

    backwards: int
    steps: int
    forwards: int
    unused: int


class LoopCounters:
    """Counts backwards, optimizer steps and forwards of this rank, which a loop runs equally often on every rank.

    The training thread counts; a background thread calls `publish` on rank 0 and `compare` on the others. A rank that
    skips a backward pairs each later one with that of another step of the other ranks, which no collective notices. It
    shows in the counts: the rank has stepped without that backward, or has run a forward that no backward followed.
    Forwards before the first backward are not compared: one rank may summarize or draw the model before training.
    """

    def __init__(self) -> None:
        # Plain tuples of what `Counts` names, which take a tenth of the time.
        self._latest = (0, 0, 0, 0)
        self._kept = [self._latest] * _KEPT
        self._steps = self._forwards = self._used = 0
        self._before = 0
        self._expected: Counts | None = None

    def step(self) -> None:
        """Count an optimizer step."""
        self._steps += 1

    def forward(self) -> Forward:
        """Count a forward whose output requires gradients."""
        self._forwards += 1
        return Forward(self)

    def backward(self) -> None:
        """Count a backward that reduces gradients, at its end on this rank."""
        number = self._latest[0] + 1
        if number == 1:
            self._before = self._forwards - self._used
        # The other thread reads it: each assignment replaces an immutable record as a whole.
        forwards = self._forwards - self._before
        latest = (number, self._steps, forwards, forwards - self._used)
        self._latest = self._kept[number % _KEPT] = latest

    def publish(self, store: MessageStore) -> None:
        """Write the latest counts to the store."""
        store.set(_KEY, json.dumps(self._latest))

    def compare(self, store: MessageStore, rank: int) -> str | None:
        """Return what is wrong if this rank's counts differ from rank 0's at the same backward, else None.

        A backward that this rank has not run yet is compared in a later call.
        """
        expected = self._expected
        if expected is None or expected.backwards <= self._latest[0]:
            if expected is None and not store.check([_KEY]):
                return None
            self._expected = expected = Counts(*json.loads(store.get(_KEY)))
        if expected.backwards > self._latest[0]:
            return None
        own = Counts(*self._kept[expected.backwards % _KEPT])
        return None if own.backwards != expected.backwards else _difference(expected, own, rank)


class Forward:
    """A forward, until a backward reaches its output."""

    __slots__ = ("_counters",)

    def __init__(self, counters: LoopCounters) -> None:
        self._counters: LoopCounters | None = counters

    def reached(self) -> None:
        """Note that a backward has reached the output; further calls do nothing."""
        if self._counters is not None:
            self._counters._used += 1
            self._counters = None


def _difference(first: Counts, own: Counts, rank: int) -> str | None:
    # Neither is an error by itself: a rank may use several forwards in one backward, and may not use one of them.
    skips = first.forwards != own.forwards and first.unused != own.unused
    if first.steps == own.steps and not skips:
        return None
    what = "optimizer steps" if first.steps != own.steps else "forwards without a backward"
    counts = (first.steps, own.steps) if first.steps != own.steps else (first.unused, own.unused)
    return (
        f"The ranks are not in the same step: before the end of backward #{own.backwards}, rank 0 had run {counts[0]} "
        f"{what} and rank {rank} had run {counts[1]}. One of them skipped a backward, so gradients of different steps "
        "are averaged. Run every backward on every rank, with a loss of (output * 0).sum() where there is nothing to "
        "learn, and other forwards inside torch.no_grad()."
    )
