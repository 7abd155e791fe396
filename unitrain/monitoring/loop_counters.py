"""Counters of a rank's training loop, compared between ranks in the background."""

from __future__ import annotations

import json
from typing import NamedTuple

from unitrain.bootstrap.messages import MessageStore

# The capacity exceeds the number of backward passes that a fast loop runs between two comparisons.
_MAX_KEPT = 4096
_KEY = "loop"


class LoopCounts(NamedTuple):
    """Totals of one rank at the end of a backward pass. `unused_forwards` counts forward passes without a backward
    pass."""

    backwards: int
    steps: int
    forwards: int
    unused_forwards: int


class LoopCounters:
    """Counts backward passes, optimizer steps and forward passes of this rank, and compares the counts with the counts
    of rank 0.

    The training thread counts; a background thread calls `publish` on rank 0 and `compare` on the other ranks. If a
    rank skips a backward pass, its later gradients are averaged with the other ranks' gradients of different steps.
    Collectives cannot detect this, but the counts differ: the rank has run an optimizer step or a forward pass without
    a backward pass. Forward passes before the first backward pass are not compared, because one rank may print or plot
    the model before training.
    """

    def __init__(self) -> None:
        # Plain tuples with the fields of `LoopCounts`, because they are ten times as fast to create.
        self._latest = (0, 0, 0, 0)
        self._history = [self._latest] * _MAX_KEPT
        self._steps = self._forwards = self._used_forwards = 0
        self._forwards_before_training = 0
        self._expected_counts: LoopCounts | None = None

    def count_step(self) -> None:
        """Count an optimizer step."""
        self._steps += 1

    def count_forward(self, *, is_training: bool) -> CountedForward:
        """Count a forward pass whose output requires gradients.

        A forward pass of a model in evaluation mode is not counted, because an evaluation outside torch.no_grad() may
        run more batches on some ranks.
        """
        self._forwards += is_training
        return CountedForward(self if is_training else None)

    def count_backward(self) -> None:
        """Count a backward pass that reduces gradients. Call it when the backward pass has ended on this rank."""
        num_backwards = self._latest[0] + 1
        if num_backwards == 1:
            self._forwards_before_training = self._forwards - self._used_forwards
        # Another thread reads `_latest` and `_history`, so each assignment stores one complete, immutable tuple.
        forwards = self._forwards - self._forwards_before_training
        latest = (num_backwards, self._steps, forwards, forwards - self._used_forwards)
        self._latest = self._history[num_backwards % _MAX_KEPT] = latest

    def publish(self, store: MessageStore) -> None:
        """Write the latest counts to the store."""
        store.set(_KEY, json.dumps(self._latest))

    def compare(self, store: MessageStore, rank: int) -> str | None:
        """Return a description of the difference if this rank's counts differ from rank 0's at the same backward pass.

        If this rank has not run that backward pass yet, a later call compares the counts.
        """
        expected = self._expected_counts
        if expected is None or expected.backwards <= self._latest[0]:
            if expected is None and not store.check([_KEY]):
                return None
            self._expected_counts = expected = LoopCounts(*json.loads(store.get(_KEY)))
        if expected.backwards > self._latest[0]:
            return None
        local_counts = LoopCounts(*self._history[expected.backwards % _MAX_KEPT])
        return (
            None if local_counts.backwards != expected.backwards else _describe_difference(expected, local_counts, rank)
        )


class CountedForward:
    """A forward pass, which counts as unused until a backward pass reaches its output."""

    __slots__ = ("_counters",)

    def __init__(self, counters: LoopCounters | None) -> None:
        self._counters = counters

    def mark_used(self) -> None:
        """Record that a backward pass has reached the output. Further calls have no effect."""
        if self._counters is not None:
            self._counters._used_forwards += 1
            self._counters = None


def _describe_difference(rank_zero_counts: LoopCounts, local_counts: LoopCounts, rank: int) -> str | None:
    # Only a difference in both counts of forward passes is an error: a rank may use several forward passes in one
    # backward pass, or leave a forward pass unused.
    has_skipped = (
        rank_zero_counts.forwards != local_counts.forwards
        and rank_zero_counts.unused_forwards != local_counts.unused_forwards
    )
    if rank_zero_counts.steps == local_counts.steps and not has_skipped:
        return None
    if rank_zero_counts.steps != local_counts.steps:
        quantity, counts = "optimizer steps", (rank_zero_counts.steps, local_counts.steps)
    else:
        quantity, counts = (
            "forward passes without a backward pass",
            (rank_zero_counts.unused_forwards, local_counts.unused_forwards),
        )
    number = local_counts.backwards - 1  # backward passes are numbered from 0, as in the flight recorder
    return (
        f"The ranks are not in the same step: before the end of backward #{number}, rank 0 had run "
        f"{counts[0]} {quantity} and rank {rank} had run {counts[1]}. One of them skipped a backward pass, so "
        "gradients of different steps are averaged. Run every backward pass on every rank, with a loss of "
        "(output * 0).sum() if a rank has no data, and run other forward passes inside torch.no_grad()."
    )
