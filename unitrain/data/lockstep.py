"""Ranks whose numbers of batches are unequal, or unknown, kept in the same steps."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from typing import Any

import torch

from unitrain.backends.base import Communicator, raise_together
from unitrain.config import Uneven
from unitrain.data.batch import copy_batch
from unitrain.data.order import Slice
from unitrain.errors import DataError
from unitrain.randomness import OwnGenerators

Counted = tuple[int, Any]

# What a rank says of a batch that it does not have, instead of its samples.
OUT = -1
# What it says of the batch that it could stand in with.
_NO_SPARE, _SPARE, _FAILED = range(3)


class Lockstep:
    """Lets all ranks take the same steps over the batches that each of them has. All ranks use it alike.

    The ranks tell each other the sizes of their next batches, for at most `ahead` micro-steps at a time, but for one
    step at least, and hold these batches meanwhile: copies of them, with `copies`, where the next batch may overwrite
    the memory of the one before. With `full`, a step of fewer samples ends the epoch.
    """

    def __init__(
        self,
        communicator: Communicator,
        *,
        accumulate: int,
        uneven: Uneven,
        ahead: int,
        full: int | None,
        copies: bool,
    ) -> None:
        self._communicator, self._accumulate, self._uneven, self._full = communicator, accumulate, uneven, full
        self._steps = max(1, ahead // accumulate)
        self._copies = copies and self._steps * accumulate > 1
        # A batch that was trained on, here or on another rank: it stands in for those that this rank does not have.
        self._spare: Counted | None = None
        self._error: DataError | None = None

    def epoch(
        self, batches: Callable[[], Generator[Counted]], *, start: int, stride: int, passed: int
    ) -> Generator[tuple[Any, Slice]]:
        """Yield (batch, its slice) for each of this rank's micro-steps, until the epoch ends for all ranks.

        `batches` begins this rank's (samples, batch) pairs, of which as many as `passed` micro-steps took are passed
        over. `start` is the position after these, and `stride` how far a micro-step goes. Raises DataError on every
        rank when the batches of any cannot be had.
        """
        # An error of another rank leaves its traceback, and with it what is iterated over, to the garbage collector.
        with closing(batches()) as own, closing(_endless(batches)) as again:
            self._error = None
            self._pass_over(own, again, passed)
            window, per_step = self._steps * self._accumulate, self._accumulate * stride
            over = False
            while not over:
                held: list[Counted | None] = [None] * window
                self._fill(held, range(window), own)
                table = self._agree(held)
                steps, over = plan(table, self._accumulate, self._uneven, self._full)
                lacking = [at for step in steps for at in step if any(counts[at] == OUT for counts in table)]
                if self._uneven == "pad" and lacking:
                    self._fill(held, [at for at in lacking if held[at] is None], again)
                    table = self._agree(held)
                for live in steps:
                    end = start + per_step
                    total = sum(max(0, counts[at]) for counts in table for at in live)
                    for at in live:
                        samples, batch = held[at] or (0, None)
                        held[at] = None  # from now on only the loop holds it
                        if not samples and self._spare is not None:
                            batch = self._spare[1]
                        yield batch, Slice(slice(start, end), samples, total, end, at == live[-1])
                    start = end

    def _pass_over(self, own: Iterator[Counted], again: Iterator[Counted], passed: int) -> None:
        """Pass over what an interrupted run has trained on, and what it has repeated."""
        # What is drawn in this process meanwhile was drawn before the interruption, and is not drawn once more.
        with OwnGenerators(0):
            done = self._fill([None] * passed, range(passed), own, keep=False)
            if self._uneven == "pad":
                self._fill([None] * passed, range(passed - done), again, keep=False)

    def _fill(
        self, held: list[Counted | None], places: Iterable[int], batches: Iterator[Counted], *, keep: bool = True
    ) -> int:
        """Put the next batches into `places` and return how many there were; what goes wrong is told by `_agree`."""
        done = 0
        try:
            for at, taken in zip(places, batches, strict=False):
                if keep:
                    held[at] = taken = (taken[0], copy_batch(taken[1])) if self._copies else taken
                done += 1
                if taken[0]:
                    self._spare = taken
        except DataError as error:
            self._error = error
        except Exception as error:  # whatever it is, the other ranks would wait for this one
            self._error = DataError(
                f"The training data failed on rank {self._communicator.rank}: {type(error).__name__}: {error}. "
                "Mend the dataset, or what makes batches of it."
            )
            self._error.__cause__ = error
        return done

    def _agree(self, held: list[Counted | None]) -> list[list[int]]:
        """Return the samples of the batches of every rank, OUT where it has none."""
        state = _FAILED if self._error is not None else _NO_SPARE if self._spare is None else _SPARE
        here = [state, *(OUT if taken is None else taken[0] for taken in held)]
        gathered = self._communicator.allgather(torch.tensor(here, device=self._communicator.device))
        table: list[list[int]] = gathered.view(self._communicator.size, len(here)).tolist()
        states = [counts.pop(0) for counts in table]
        if _FAILED in states:
            error, self._error = self._error, None
            raise_together(self._communicator, error)
        if _NO_SPARE in states and _SPARE in states and self._uneven != "drop":
            # Seldom, and once in a run: for a rank that has had no batch of its own to stand in with.
            lent = self._communicator.broadcast_object(self._spare, root=states.index(_SPARE))
            self._spare = self._spare or lent
        return table


def plan(table: list[list[int]], accumulate: int, uneven: Uneven, full: int | None) -> tuple[list[list[int]], bool]:
    """Return the places in `table` that each step takes, and whether the epoch ends with these steps.

    `table` has the samples of the next batches of each rank, OUT where it has none. A place is taken where any rank has
    samples, so a step may have fewer places than micro-steps, even none.
    """
    steps: list[list[int]] = []
    for first in range(0, len(table[0]), accumulate):
        places = range(first, first + accumulate)
        total = sum(max(0, counts[at]) for counts in table for at in places)
        if uneven == "drop" and any(counts[at] == OUT for counts in table for at in places):
            return steps, True
        if full is not None and total < full:
            return steps, True
        steps.append([at for at in places if any(counts[at] > 0 for counts in table)])
        if all(counts[places[-1]] == OUT for counts in table):
            return steps, True
    return steps, False


def _endless(batches: Callable[[], Generator[Counted]]) -> Generator[Counted]:
    """Yield what `batches` begins, over and over, as long as that is anything."""
    found = True
    while found:
        found = False
        for taken in batches():
            found = True
            yield taken
